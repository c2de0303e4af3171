"""What the services' Prometheus endpoints say after real requests, held against what the clients got."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
import yaml

from k8s.dashboards.build import DASHBOARDS
from outrider.bundled import bundled_model
from outrider.client import AsyncClient
from outrider.completion import Chunk, Completion
from outrider.errors import InvalidRequestError
from outrider.local import LocalCluster, Options
from tests.end_to_end.services import free_addresses
from tests.exported_metrics import exported_names, instruments
from tests.prometheus_server import SCRAPE_SECONDS, running_prometheus
from tests.scrape import Scrape
from tests.service_device import DRAFTER_FLAGS, SERVICE_DEVICE, VERIFIER_FLAGS

pytestmark = pytest.mark.asyncio(loop_scope="module")

ALERTS = Path(__file__).resolve().parents[2] / "k8s" / "dashboards" / "alerts.yaml"
SERVICES = ("gateway", "verifier", "drafter")
PROMPTS = ("def main():", "import os\n", "class Reader:\n    def __init__(self", "for index in range(")
ONLY_ON_A_GPU = {"outrider_verifier_gpu_memory_bytes", "outrider_drafter_gpu_memory_bytes"}


class Observed:
    """A cluster whose services all have a metrics endpoint."""

    def __init__(self, cluster: LocalCluster, addresses: dict[str, str]) -> None:
        self.cluster = cluster
        self.addresses = addresses
        self.completions: list[Completion] = []

    async def look(self) -> dict[str, Scrape]:
        """Each service's numbers, when nothing runs any more."""
        async with asyncio.timeout(20):
            while True:
                found = {
                    name: await asyncio.to_thread(Scrape.of_address, address)
                    for name, address in self.addresses.items()
                }
                if is_idle(found):
                    return found
                await asyncio.sleep(0.1)

    async def generate(self, **options: object) -> list[Completion]:
        """A completion of each prompt, all at once."""
        async with AsyncClient(self.cluster.address) as client:
            found = await asyncio.gather(
                *(client.generate(prompt, **options) for prompt in PROMPTS)  # type: ignore[arg-type]
            )
        self.completions += found
        return found


def is_idle(found: dict[str, Scrape]) -> bool:
    running = found["verifier"].total("outrider_verifier_sequences_running")
    return not running and not found["drafter"].total("outrider_drafter_sequences_open")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def observed(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Observed]:
    """The bundled pair, after its first requests: with and without speculation, greedy and sampled."""
    addresses = dict(zip(SERVICES, free_addresses(len(SERVICES)), strict=True))
    options = Options(
        target=bundled_model("target"),
        draft=bundled_model("draft"),
        device=SERVICE_DEVICE,
        dtype="float32",
        http_port=0,
        log_directory=tmp_path_factory.mktemp("logs"),
        drain_seconds=2.0,
        gateway_flags=("--metrics-listen", addresses["gateway"]),
        verifier_flags=(*VERIFIER_FLAGS, "--metrics-listen", addresses["verifier"]),
        drafter_flags=(*DRAFTER_FLAGS, "--metrics-listen", addresses["drafter"]),
    )
    async with LocalCluster(options) as cluster:
        found = Observed(cluster, addresses)
        await found.generate(max_tokens=24, temperature=0.0)
        await found.generate(max_tokens=24, temperature=1.0, seed=7, max_draft_tokens=3)
        await found.generate(max_tokens=12, temperature=0.0, speculation=False, ignore_eos=True)
        yield found


def lengths(completions: Iterable[Completion]) -> int:
    return sum(len(completion.tokens) for completion in completions)


async def test_tokens_and_speculation_add_up(observed: Observed) -> None:
    """Catches whatever is counted twice, not at all, or under another name than its own, in any of the services."""
    completions = observed.completions
    found = await observed.look()
    gateway, verifier, drafter = (found[name] for name in SERVICES)
    origins = Counter(token.origin.lower() for completion in completions for token in completion.tokens)
    assert set(origins) == {"accepted", "recovered", "bonus", "plain"}, "a run without all of these proves little"
    assert gateway.by("outrider_gateway_tokens_total", "origin") == origins
    assert verifier.by("outrider_verifier_tokens_total", "origin") == origins
    assert gateway.total("outrider_gateway_prompt_tokens_total") == sum(c.usage.num_prompt_tokens for c in completions)
    assert verifier.total("outrider_verifier_prefill_tokens_total") == sum(
        c.usage.num_prompt_tokens for c in completions
    )
    speculation = [completion.speculation for completion in completions]
    drafted = verifier.total("outrider_verifier_draft_tokens_total")
    accepted = verifier.total("outrider_verifier_draft_accepted_total")
    assert drafted == sum(s.num_draft_tokens for s in speculation)
    assert accepted == sum(s.num_accepted_tokens for s in speculation) == origins["accepted"]
    assert drafted > accepted
    assert verifier.by("outrider_verifier_draft_tokens_total", "drafter") == {observed.cluster.drafter.address: drafted}
    per_position: Counter[str] = Counter()
    for statistics in speculation:
        per_position.update({str(p): num for p, num in enumerate(statistics.num_accepted_per_position)})
    assert verifier.by("outrider_verifier_draft_accepted_per_position_total", "position") == +per_position
    assert verifier.total("outrider_verifier_draft_accepted_per_position_total") == accepted
    assert verifier.total("outrider_verifier_draft_tokens_per_position_total") == drafted
    first = verifier.total("outrider_verifier_draft_tokens_per_position_total", position="0")
    assert verifier.total("outrider_verifier_acceptance_length_count") == first
    assert verifier.total("outrider_verifier_acceptance_length_sum") == (
        accepted + origins["recovered"] + origins["bonus"]
    )
    # Each expansion brings a draft token, which is verified, or is still there when its sequence ends. In turns each
    # rejection is answered by a new tree.
    assert drafter.total("outrider_drafter_expansions_total") >= drafted
    assert drafter.total("outrider_drafter_children_total") >= drafter.total("outrider_drafter_expansions_total")
    assert drafter.total("outrider_drafter_roots_total") >= origins["recovered"] > 0


async def test_requests_and_sequences_add_up(observed: Observed) -> None:
    completions = observed.completions
    found = await observed.look()
    gateway, verifier, drafter = (found[name] for name in SERVICES)
    reasons = Counter(completion.finish_reason.lower() for completion in completions)
    fallbacks = Counter(f.reason.lower() for c in completions for f in c.speculation.fallbacks)
    assert gateway.by("outrider_gateway_requests_ended_total", "reason") == reasons
    assert verifier.by("outrider_verifier_sequences_ended_total", "reason") == reasons
    assert fallbacks["client_disabled"] == len(PROMPTS)
    assert gateway.by("outrider_gateway_fallbacks_total", "reason") == fallbacks
    assert verifier.by("outrider_verifier_fallbacks_total", "reason") == fallbacks
    for name in ("request_duration", "time_to_first_token", "time_per_output_token"):
        assert gateway.total(f"gen_ai_server_{name}_seconds_count", gen_ai_request_model="target") == len(completions)
    first_tokens = sum(c.timings.time_to_first_token_seconds for c in completions)
    measured = gateway.total("gen_ai_server_time_to_first_token_seconds_sum")
    assert measured == pytest.approx(first_tokens, abs=0.02 * len(completions))
    durations = gateway.total("gen_ai_server_request_duration_seconds_sum")
    assert durations == pytest.approx(sum(c.timings.total_seconds for c in completions), abs=0.02 * len(completions))
    for name in ("queue", "prefill"):
        assert verifier.total(f"outrider_verifier_{name}_duration_seconds_count") == len(completions)
    num_steps = verifier.total("outrider_verifier_batch_sequences_count")
    assert verifier.by("outrider_verifier_step_duration_seconds_count", "stage") == dict.fromkeys(
        ("schedule", "verify", "commit", "report"), num_steps
    )
    # Prompts that take several steps are in more of them than their sequence has.
    assert verifier.total("outrider_verifier_batch_sequences_sum") >= sum(c.speculation.num_steps for c in completions)
    assert verifier.total("outrider_verifier_batch_tokens_sum") >= lengths(completions)
    assert drafter.total("outrider_drafter_step_duration_seconds_count") == drafter.total(
        "outrider_drafter_batch_sequences_count"
    )


async def test_what_is_held_is_given_back_and_bytes_arrive(observed: Observed) -> None:
    found = await observed.look()
    gateway, verifier, drafter = (found[name] for name in SERVICES)
    for service, name in ((verifier, "verifier"), (drafter, "drafter")):
        assert service.total(f"outrider_{name}_kv_blocks", state="used") == 0
        assert service.total(f"outrider_{name}_kv_blocks", state="free") > 0
    for state in ("running", "waiting"):
        assert gateway.total(f"outrider_gateway_requests_{state}") == 0
    assert gateway.by("outrider_gateway_verifiers", "state") == {"ready": 1}
    assert gateway.by("outrider_gateway_drafters", "state") == {"ready": 1}
    assert verifier.by("outrider_verifier_drafters", "state") == {"ready": 1}
    assert drafter.total("outrider_drafter_verifiers") == 1
    for near, upper, far, lower in (
        (gateway, "gateway", verifier, "verifier"),
        (verifier, "verifier", drafter, "drafter"),
    ):
        for there, back in (("sent", "received"), ("received", "sent")):
            num_bytes = near.total(f"outrider_{upper}_wire_bytes_total", peer=lower, direction=there)
            assert num_bytes == far.total(f"outrider_{lower}_wire_bytes_total", peer=upper, direction=back) > 0
    # Beside the draft tokens travel their places in the tree, and their distributions.
    expansions = drafter.total("outrider_drafter_expansions_total")
    assert drafter.total("outrider_drafter_wire_bytes_total", direction="sent") > 11 * expansions


async def test_every_instrument_is_exported_under_the_name_that_it_is_known_by(observed: Observed) -> None:
    """Catches dashboards, alerts and autoscalers that ask for a name that the exporter has changed."""
    found = await observed.look()
    names = set().union(*(scrape.names for scrape in found.values()))
    if SERVICE_DEVICE == "cpu":
        assert exported_names() - ONLY_ON_A_GPU == names
    else:
        assert exported_names() == names
    allowed = {name.replace(".", "_") for i in instruments() for name in i.labels} | {"le"}
    for scrape in found.values():
        used = {label for s in scrape.samples if s.name != "target_info" for label in s.labels}
        assert used <= allowed
        # Labels that grow with traffic would show here: a few dozen requests have not made more series than there are.
        assert len(scrape.samples) < 600
    over_http = Scrape.of_text(await get_text(observed.cluster.http_address))
    assert over_http.names == found["gateway"].names


async def get_text(address: str) -> str:
    async with httpx.AsyncClient(trust_env=False) as client:
        response = await client.get(f"http://{address}/metrics")
    assert response.status_code == 200
    return response.text


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="a real Prometheus is asked, and there is none here")
async def test_each_panel_has_data_after_some_traffic(observed: Observed, tmp_path: Path) -> None:
    """Catches queries that Prometheus does not take, and panels that stay empty; asked as Grafana asks."""
    rules = yaml.safe_load(ALERTS.read_text())["spec"]
    panels = [(name, panel) for name, dashboard in DASHBOARDS.items() for panel in dashboard.panels]
    # What no machine without a GPU, or without another exporter, has.
    asked = [(name, panel) for name, panel in panels if not panel.source]
    assert {panel.source for _, panel in panels} == {"", "GPU", "DCGM exporter"}
    (address,) = free_addresses(1)
    async with running_prometheus(tmp_path, address, observed.addresses, rules) as prometheus:
        missing = [f"{name}: {panel.title}" for name, panel in asked]
        for _ in range(4):
            await observed.generate(max_tokens=16, temperature=0.0)
            await asyncio.sleep(1.5 * SCRAPE_SECONDS)
            missing = [
                f"{name}: {panel.title}: {query.expression}"
                for name, panel in asked
                for query in panel.queries
                if not await prometheus.series(as_grafana_asks(query.expression))
            ]
            if not missing:
                break
        assert not missing
        for _, panel in panels:
            for query in panel.queries:
                await prometheus.series(as_grafana_asks(query.expression))  # is at least PromQL
        assert await prometheus.rule_errors() == {}
        # On two cores that all services share, drafts are slow.
        assert set(await prometheus.alerts()) <= {"OutriderDraftsSlow", "OutriderAcceptanceLow"}


def as_grafana_asks(expression: str) -> str:
    """The query with what Grafana puts in for its variables, for a short look."""
    return expression.replace("$namespace", ".*").replace("$__rate_interval", f"{5 * SCRAPE_SECONDS}s")


async def test_requests_that_fail_or_are_cut_short_are_counted_as_that(observed: Observed) -> None:
    before = await observed.look()
    async with AsyncClient(observed.cluster.address) as client:
        with pytest.raises(InvalidRequestError):
            await client.generate(PROMPTS[0], max_tokens=4, temperature=-1.0)
        # What it says anyway.
        stop = observed.completions[0].text[4:8]
        stopped = await client.generate(PROMPTS[0], max_tokens=400, temperature=0.0, stop=stop, ignore_eos=True)
        assert stopped.finish_reason == "STOP_STRING"
        async with aclosing(client.stream(PROMPTS[1], max_tokens=800, temperature=0.0, ignore_eos=True)) as events:
            async for event in events:
                if isinstance(event, Chunk):
                    break
        async with asyncio.timeout(20):
            while True:
                after = await observed.look()
                ended = change(before, after, "gateway", "outrider_gateway_requests_ended_total")
                if sum(ended.values()) == 3:
                    break
                await asyncio.sleep(0.1)
    assert ended == {"invalid_argument": 1, "stop_string": 1, "cancelled": 1}
    assert change(before, after, "verifier", "outrider_verifier_sequences_ended_total") == {"closed": 2}
    errors = after["gateway"].by("gen_ai_server_request_duration_seconds_count", "error_type")
    assert (errors["INVALID_ARGUMENT"], errors["CANCELLED"]) == (1, 1)
    for service in ("verifier", "drafter"):
        assert after[service].total(f"outrider_{service}_kv_blocks", state="used") == 0


def change(before: dict[str, Scrape], after: dict[str, Scrape], service: str, name: str) -> dict[str, float]:
    """How a counter grew, by reason."""
    earlier = before[service].by(name, "reason")
    grown = {reason: value - earlier.get(reason, 0) for reason, value in after[service].by(name, "reason").items()}
    return {reason: value for reason, value in grown.items() if value}
