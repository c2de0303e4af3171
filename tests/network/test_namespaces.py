"""Gateway, verifier and drafter in a network namespace each, joined by nothing but what the NetworkPolicies of k8s/
allow: that it is enough, that nothing else gets through, and what an isolated service costs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from outrider.client import AsyncClient, ClientError, UnavailableError
from outrider.completion import Chunk, Completion, CompletionBuilder, FallbackReason, ModelInfo
from outrider.service.settings import ServiceSettings
from tests.network.conftest import Pair
from tests.network.namespaces import ROUTER, Network, why_not
from tests.network.policies import CLIENT, SERVICES, allowed_edges
from tests.network.test_faults import NOTICE_SECONDS, SLACK_SECONDS

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "they can be made"),
    pytest.mark.slow,
]

MODULES = {"gateway": "gateway", "verifier": "verifier_service", "drafter": "drafter_service"}
PORTS = {"gateway": 50051, "verifier": 50052, "drafter": 50053}
PROMPT = [7, 1, 40, 3]
PROBE = """
import asyncio, json, sys

async def probe(host, port):
    try:
        async with asyncio.timeout(0.7):
            _, writer = await asyncio.open_connection(host, port)
            writer.close()
        return "open"
    except ConnectionRefusedError:
        return "closed"
    except OSError:
        return "dropped"

async def main():
    targets = json.loads(sys.argv[1])
    print(json.dumps(await asyncio.gather(*(probe(*target) for target in targets))))

asyncio.run(main())
"""


@dataclass
class Cluster:
    """The services, each in its namespace, with a name server and proxies on the router."""

    network: Network
    directory: Path
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def address(self) -> str:
        """The gateway's."""
        return f"{self.network.address('gateway')}:{PORTS['gateway']}"

    @property
    def answers(self) -> Path:
        """The file that the name server answers from."""
        return self.directory / "answers.json"

    def use_proxies(self, is_so: bool) -> None:
        """Let the names of verifier and drafter mean the proxies in front of them, or the services themselves."""
        at = {"verifier": self.network.near("gateway"), "drafter": self.network.near("verifier")}
        names = {name: [at[name] if is_so else self.network.address(name)] for name in at}
        fresh = self.answers.with_suffix(".new")
        fresh.write_text(json.dumps(names))
        fresh.replace(self.answers)

    def tell_proxy(self, name: str, command: str) -> None:
        """Delay, stall, resume or reset the way to a service."""
        process = self.processes["proxies"]
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{('verifier', 'drafter').index(name)} {command}\n".encode())
        process.stdin.flush()
        assert process.stdout.readline() == b"done\n"

    def start(self, pair: Pair, leash: int) -> None:
        """Start everything; the services go on loading."""
        network = self.network
        self.use_proxies(False)
        listen = [f"{network.near(name)}:53" for name in SERVICES]
        self._start(
            "dns", ROUTER, ["-m", "tests.network.dns_server", "--answers", str(self.answers), "--listen", *listen]
        )
        routes = [
            f"{network.near(near)}:{PORTS[name]}={network.address(name)}:{PORTS[name]}"
            for near, name in (("gateway", "verifier"), ("verifier", "drafter"))
        ]
        self._start("proxies", ROUTER, ["-m", "tests.network.tcp_proxy", *routes])
        target, draft = (str(path) for path in pair)
        flags = {
            "gateway": ["--verifiers", "dns:///verifier:50052", "--drafters", "dns:///drafter:50053"],
            "verifier": ["--model", target, "--device", "cpu", "--dtype", "float32"],
            "drafter": ["--model", draft, "--device", "cpu", "--dtype", "float32"],
        }
        flags["gateway"] += ["--dns-refresh-seconds", "1"]
        for name in SERVICES:
            common = ["--listen", f"0.0.0.0:{PORTS[name]}", "--drain-seconds", "0"]
            # Here as in a cluster whose network does the encrypting.
            for flag in ("allow_plaintext", "allow_unauthenticated"):
                if flag in ServiceSettings.model_fields or (name == "gateway" and flag in _gateway_fields()):
                    common.append(f"--{flag.replace('_', '-')}")
            arguments = ["-m", "outrider.leash", str(leash), MODULES[name], *common, *flags[name]]
            self._start(name, name, arguments, leash)

    def stop(self) -> None:
        """End every process that was started here."""
        for process in self.processes.values():
            process.send_signal(signal.SIGKILL)
            process.wait(10)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def _start(self, name: str, place: str, arguments: list[str], *fds: int) -> None:
        is_tool = place == ROUTER
        pipe = subprocess.PIPE if is_tool else subprocess.DEVNULL
        with (self.directory / f"{name}.log").open("wb") as log:
            process = self.network.start(place, arguments, log, stdin=pipe, stdout=pipe, pass_fds=fds)
        self.processes[name] = process
        if is_tool:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n", (self.directory / f"{name}.log").read_text()


def _gateway_fields() -> set[str]:
    from gateway.settings import GatewaySettings

    return set(GatewaySettings.model_fields)


@pytest.fixture(scope="module")
def cluster(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Everything up; the gateway serves."""
    network = Network()
    cluster = Cluster(network, tmp_path_factory.mktemp("namespaces"))
    leash = os.pipe()
    try:
        network.create(allowed_edges())
        cluster.start(pair, leash[0])
        asyncio.run(is_up(cluster))
        yield cluster
    finally:
        cluster.stop()
        network.delete()
        for end in leash:
            os.close(end)


async def is_up(cluster: Cluster) -> None:
    """Return when the gateway serves with a drafter. Raises TimeoutError with what the services logged."""
    try:
        async with asyncio.timeout(90), client_of(cluster) as client:
            await members_become(client, is_drafter_ready=True)
    except TimeoutError:
        logs = [path.read_text()[-1500:] for path in sorted(cluster.directory.glob("*.log"))]
        raise TimeoutError("\n---\n".join(logs)) from None


@asynccontextmanager
async def client_of(cluster: Cluster) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(cluster.address) as client:
        yield client


async def members_become(client: AsyncClient, *, is_drafter_ready: bool) -> ModelInfo:
    """Return once the gateway sees all of its verifiers ready, and all of its drafters so."""
    while True:
        with contextlib.suppress(ClientError):
            model = await client.model(timeout=2.0)
            are_ready = all(member.is_ready for member in model.verifiers)
            are_so = all(member.is_ready == is_drafter_ready for member in model.drafters)
            if model.verifiers and model.drafters and are_ready and are_so:
                return model
        await asyncio.sleep(0.05)


@dataclass
class Run:
    """One greedy request and when its tokens came."""

    builder: CompletionBuilder = field(default_factory=CompletionBuilder)
    times: list[float] = field(default_factory=list)
    num_tokens: int = 0

    async def read(self, client: AsyncClient, max_tokens: int) -> Completion:
        """To the end."""
        stream = client.stream(token_ids=PROMPT, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        async for event in stream:
            self.times.append(time.monotonic())
            self.builder.add(event)
            if isinstance(event, Chunk):
                self.num_tokens += len(event.tokens)
        return self.builder.build()

    async def has(self, num_tokens: int) -> None:
        """Return when so many tokens are there."""
        async with asyncio.timeout(20):
            while self.num_tokens < num_tokens:
                await asyncio.sleep(0.01)

    @property
    def longest_gap(self) -> float:
        """Most seconds between two events."""
        return max(after - before for before, after in zip(self.times, self.times[1:], strict=False))


async def undisturbed(client: AsyncClient, max_tokens: int) -> tuple[int, ...]:
    """What the target alone says."""
    completion = await client.generate(
        token_ids=PROMPT, max_tokens=max_tokens, temperature=0.0, ignore_eos=True, speculation=False
    )
    return completion.token_ids


def test_only_what_the_policies_allow_gets_through(cluster: Cluster) -> None:
    """The services work, with no other connections than these: a policy that forgot one would show as well."""
    network = cluster.network
    assert {edge for edge in allowed_edges() if edge[2] in PORTS.values()} == {
        (CLIENT, "gateway", 50051),
        ("gateway", "verifier", 50052),
        ("verifier", "drafter", 50053),
    }
    ports = [*PORTS.values(), 50050, 9464]
    probes = {}
    for source in (CLIENT, *SERVICES):
        targets = [(network.address(name), port) for name in SERVICES if name != source for port in ports]
        arguments = ["-c", PROBE, json.dumps(targets)]
        with (cluster.directory / "probe.log").open("ab") as log:
            if source == CLIENT:
                process = subprocess.Popen(["python3", *arguments], stdout=subprocess.PIPE, stderr=log)
            else:
                process = network.start(source, arguments, log, stdout=subprocess.PIPE)
        probes[source] = targets, process
    names = {network.address(name): name for name in SERVICES}
    found = {}
    for source, (targets, process) in probes.items():
        output, _ = process.communicate(timeout=20)
        for (host, port), result in zip(targets, json.loads(output), strict=True):
            found[source, names[host], port] = result
    assert len(found) == 3 * 5 + 3 * 2 * 5
    assert {edge for edge, result in found.items() if result != "dropped"} == {
        edge for edge in allowed_edges() if edge[2] in ports
    }
    assert all(result in ("open", "dropped") for result in found.values())


async def test_requests_complete_over_a_bad_network(cluster: Cluster) -> None:
    """20 ms of delay on each way, a stall of either, and a reset towards the drafter. DNS brings the traffic there."""
    async with client_of(cluster) as client:
        expected = await undisturbed(client, 120)
        for name in ("verifier", "drafter"):
            cluster.tell_proxy(name, "delay 0.02")
        cluster.use_proxies(True)
        network = cluster.network
        async with asyncio.timeout(15):
            while True:
                model = await members_become(client, is_drafter_ready=True)
                found = {member.address.rpartition(":")[0] for member in (*model.verifiers, *model.drafters)}
                if found == {network.near("gateway"), network.near("verifier")}:
                    break
                await asyncio.sleep(0.05)
        runs = [Run() for _ in range(3)]
        reading = [asyncio.create_task(run.read(client, 120)) for run in runs]
        await runs[0].has(10)
        cluster.tell_proxy("verifier", "stall")
        await asyncio.sleep(1.0)
        cluster.tell_proxy("verifier", "resume")
        await runs[0].has(25)
        cluster.tell_proxy("drafter", "stall")
        await asyncio.sleep(0.3)
        cluster.tell_proxy("drafter", "resume")
        await runs[0].has(40)
        cluster.tell_proxy("drafter", "reset")
        for completion in await asyncio.gather(*reading):
            assert completion.token_ids == expected
            assert completion.speculation.num_accepted_tokens > 0
            assert FallbackReason.DRAFTER_LOST in [fallback.reason for fallback in completion.speculation.fallbacks]
        cluster.use_proxies(False)
        async with asyncio.timeout(15):
            await members_become(client, is_drafter_ready=True)


async def test_an_isolated_drafter_costs_less_than_a_second(cluster: Cluster) -> None:
    """Packets to and from the drafter vanish: plain decoding within a second; healed, new sequences speculate again."""
    network = cluster.network
    async with client_of(cluster) as client:
        await asyncio.wait_for(members_become(client, is_drafter_ready=True), 15)
        expected = await undisturbed(client, 300)
        run = Run()
        reading = asyncio.create_task(run.read(client, 300))
        await run.has(40)
        try:
            network.cut("verifier", "drafter")
            completion = await reading
            assert completion.token_ids == expected
            # It went on plainly; only one that is silent for ten waits counts as lost.
            assert {f.reason for f in completion.speculation.fallbacks} <= {FallbackReason.DRAFTER_LOST}
            assert completion.speculation.num_accepted_tokens > 0
            print(f"drafter isolated: longest gap between tokens {run.longest_gap:.3f} s")
            assert run.longest_gap < 1.0
            await asyncio.wait_for(members_become(client, is_drafter_ready=False), 15)
            alone = await client.generate(token_ids=PROMPT, max_tokens=10, temperature=0.0)
            assert [f.reason for f in alone.speculation.fallbacks] == [FallbackReason.NO_DRAFTER]
        finally:
            network.heal()
        healed = time.monotonic()
        await asyncio.wait_for(members_become(client, is_drafter_ready=True), 15)
        print(f"drafter healed: found again after {time.monotonic() - healed:.3f} s")
        again = await client.generate(token_ids=PROMPT, max_tokens=60, temperature=0.0, ignore_eos=True)
        assert again.token_ids == expected[:60]
        assert again.speculation.num_accepted_tokens > 0
        assert again.speculation.fallbacks == ()


async def test_an_isolated_verifier_is_missed_and_found_again(cluster: Cluster) -> None:
    """What runs there fails within the time that docs/operations.md names, and never hangs."""
    network = cluster.network
    async with client_of(cluster) as client:
        await asyncio.wait_for(members_become(client, is_drafter_ready=True), 15)
        run = Run()
        reading = asyncio.create_task(run.read(client, 1500))
        await run.has(20)
        try:
            network.cut("gateway", "verifier")
            began = time.monotonic()
            with pytest.raises(UnavailableError):
                await reading
            print(f"verifier isolated: missed after {time.monotonic() - began:.3f} s")
            assert time.monotonic() - began < NOTICE_SECONDS + SLACK_SECONDS
        finally:
            network.heal()
        healed = time.monotonic()
        async with asyncio.timeout(15):
            await members_become(client, is_drafter_ready=True)
        print(f"verifier healed: found again after {time.monotonic() - healed:.3f} s")
        assert (await client.generate(token_ids=PROMPT, max_tokens=10, temperature=0.0)).token_ids


async def test_a_name_server_that_is_gone_takes_nobody_along(cluster: Cluster) -> None:
    """The system's resolver asks a name server that answers nothing: the links stay."""
    async with client_of(cluster) as client:
        await asyncio.wait_for(members_become(client, is_drafter_ready=True), 15)
        cluster.answers.write_text(json.dumps({"verifier": "silence", "drafter": "SERVFAIL"}))
        log = cluster.directory / "gateway.log"
        async with asyncio.timeout(10):
            while not all(f"cannot look up {name}" in log.read_text() for name in ("verifier", "drafter")):
                await asyncio.sleep(0.1)
        completion = await client.generate(token_ids=PROMPT, max_tokens=30, temperature=0.0, ignore_eos=True)
        assert completion.speculation.fallbacks == ()
        cluster.use_proxies(False)
