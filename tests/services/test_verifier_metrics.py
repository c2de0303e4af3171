"""What the verifier counts where things do not go as they should."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from outrider.v1 import verifier_pb2
from tests.scrape import Scrape
from tests.services.conftest import Pair
from tests.services.fake_drafter import fake_drafter, late
from tests.services.harness import (
    DecodeClient,
    decode_client,
    drafter_settings,
    eventually,
    fail_once,
    replay,
    runner_of,
    running_drafter,
    running_verifier,
    scripted_drafter,
    verifier_is_empty,
    verifier_settings,
)
from tests.services.reference import greedy, prompts
from verifier_service.metrics import VerifierMetrics

PROMPT = prompts(3)[2]
NUM_TOKENS = 40


@pytest.fixture
def metrics() -> Iterator[VerifierMetrics]:
    made = VerifierMetrics.from_environment(is_scraped=True, environment={})
    yield made
    made.stop()


async def look(metrics: VerifierMetrics, client: DecodeClient) -> Scrape:
    """The numbers when all is over."""
    await eventually(lambda: verifier_is_empty(client))
    found = Scrape.of_text(metrics.render()[0].decode())
    assert found.total("outrider_verifier_kv_blocks", state="used") == 0
    return found


async def test_drafts_that_are_all_wrong(pair: Pair, metrics: VerifierMetrics) -> None:
    target, _ = pair
    expected = greedy(target, PROMPT, NUM_TOKENS)
    async with (
        scripted_drafter(replay([*PROMPT, *expected], offset=1)) as drafter,
        running_verifier(verifier_settings(target), metrics=metrics) as (verifier, _),
        decode_client(verifier.address) as client,
    ):
        await client.use_drafters(drafter.address)
        result = await client.decode(PROMPT, drafter=drafter.address, max_tokens=NUM_TOKENS)
        found = await look(metrics, client)
    assert found.total("outrider_verifier_draft_accepted_total") == 0
    assert found.total("outrider_verifier_draft_tokens_total") == result.num_drafted > NUM_TOKENS
    num_rejections = found.total("outrider_verifier_tokens_total", origin="recovered")
    # One token a step: none of the drafted ones, and one in their place.
    assert num_rejections == found.total("outrider_verifier_acceptance_length_bucket", le="1.0") > 30
    assert num_rejections == found.total("outrider_verifier_draft_tokens_per_position_total", position="0")
    assert found.by("outrider_verifier_draft_accepted_per_position_total", "position") == {}
    # Each was waited for, and answered.
    assert found.total("outrider_verifier_draft_wait_seconds_count") >= num_rejections
    assert found.total("outrider_verifier_drafter_round_trip_seconds_count", drafter=drafter.address) >= num_rejections
    assert found.by("outrider_verifier_fallbacks_total", "reason") == {}


async def test_a_sequence_that_ends_among_its_draft_tokens(pair: Pair, metrics: VerifierMetrics) -> None:
    """Catches tokens behind the end that are counted although nobody gets them."""
    target, _ = pair
    expected = greedy(target, PROMPT, NUM_TOKENS)
    # The first token comes without a draft; of the four that the first chain has, the second ends the sequence.
    stop = expected[2]
    assert stop not in expected[:2]
    async with (
        scripted_drafter(replay([*PROMPT, *expected])) as drafter,
        running_verifier(verifier_settings(target), metrics=metrics) as (verifier, _),
        decode_client(verifier.address) as client,
    ):
        await client.use_drafters(drafter.address)
        result = await client.decode(
            PROMPT, drafter=drafter.address, max_tokens=NUM_TOKENS, stop_token_ids=[stop], ignore_eos=True
        )
        found = await look(metrics, client)
    assert result.token_ids == expected[:3]
    assert result.num_accepted == 2
    assert found.by("outrider_verifier_tokens_total", "origin") == {"plain": 1, "accepted": 2}
    assert found.by("outrider_verifier_draft_accepted_per_position_total", "position") == {"0": 1, "1": 1}
    assert found.total("outrider_verifier_draft_accepted_total") == 2
    assert found.total("outrider_verifier_acceptance_length_sum") == 2
    assert found.by("outrider_verifier_sequences_ended_total", "reason") == {"stop_token": 1}


async def test_drafts_that_come_too_late(pair: Pair, metrics: VerifierMetrics) -> None:
    """Catches time and tokens that are lost to the drafter, and that nobody can see."""
    target, _ = pair
    expected = greedy(target, PROMPT, 80)
    async with (
        fake_drafter(replay([*PROMPT, *expected]), late(0.25)) as drafter,
        running_verifier(verifier_settings(target, draft_timeout_seconds=0.1), metrics=metrics) as (verifier, _),
        decode_client(verifier.address) as client,
    ):
        await client.use_drafters(drafter.address)
        result = await client.decode(PROMPT, drafter=drafter.address, max_tokens=60)
        found = await look(metrics, client)
    reasons = [reason.lower() for reason in result.reasons]
    num_late = found.total("outrider_verifier_draft_late_total")
    assert num_late or "drafter_lost" in reasons
    assert found.by("outrider_verifier_fallbacks_total", "reason") == dict.fromkeys(reasons, 1)
    assert found.total("outrider_verifier_tokens_total", origin="plain") > 10
    assert found.total("outrider_verifier_tokens_total") == 60


@pytest.mark.parametrize("drafting", ["turns", "ahead"])
async def test_what_became_of_the_drafters_work(pair: Pair, metrics: VerifierMetrics, drafting: str) -> None:
    """Catches expansions and outcomes that are counted twice, or not at all."""
    target, _ = pair
    expected = greedy(target, PROMPT, NUM_TOKENS + 8)
    async with (
        fake_drafter(replay([*PROMPT, *expected], offset=1)) as wrong,
        fake_drafter(replay([*PROMPT, *expected])) as right,
        running_verifier(verifier_settings(target, drafting=drafting), metrics=metrics) as (verifier, _),
        decode_client(verifier.address) as client,
    ):
        await client.use_drafters(wrong.address, right.address)
        result = await client.decode(PROMPT, drafter=wrong.address, max_tokens=NUM_TOKENS)
        found = await look(metrics, client)
        assert result.token_ids == expected[:NUM_TOKENS]
        expansions = found.by("outrider_verifier_tree_expansions_total", "state")
        assert expansions["received"] >= 4 * (result.num_steps - 5 if drafting == "turns" else 3)
        assert 0 < expansions["walked"] <= expansions["received"] / 3, "roots alone"
        outcomes = found.by("outrider_verifier_tree_outcomes_total", "outcome")
        # The first token meets no draft, and behind the last one comes nothing.
        assert sum(outcomes.values()) == result.num_steps - 2
        # Running ahead, roots often come when their place is behind already.
        assert outcomes.keys() <= ({"miss"} if drafting == "turns" else {"miss", "unseen"})
        assert not outcomes.get("other_child")
        assert found.total("outrider_verifier_draft_tokens_total") == result.num_drafted > 0
        result = await client.decode(PROMPT, drafter=right.address, max_tokens=NUM_TOKENS)
        found = await look(metrics, client)
        assert result.token_ids == expected[:NUM_TOKENS]
        walked = found.by("outrider_verifier_tree_expansions_total", "state")["walked"] - expansions["walked"]
        assert walked > 0
        assert walked >= 0.75 * result.num_accepted
        lengths = found.total("outrider_verifier_tree_chain_length_count")
        assert lengths > result.num_steps


async def test_series_of_a_drafter_go_with_it(pair: Pair, metrics: VerifierMetrics) -> None:
    """Catches labels that pile up, one for each pod that ever was."""
    target, draft = pair
    async with (
        running_drafter(drafter_settings(model=draft)) as drafter,
        running_verifier(verifier_settings(target), metrics=metrics) as (verifier, _),
        decode_client(verifier.address) as client,
    ):
        await client.use_drafters(drafter.address)
        result = await client.decode(PROMPT, drafter=drafter.address, max_tokens=NUM_TOKENS)
        found = await look(metrics, client)
        assert found.total("outrider_verifier_draft_tokens_total", drafter=drafter.address) == result.num_drafted > 0
        assert found.by("outrider_verifier_drafters", "state") == {"ready": 1}
        await client.use_drafters()

        async def is_forgotten() -> bool:
            scrape = await look(metrics, client)
            return not any(sample.labels.get("drafter") for sample in scrape.samples)

        await eventually(is_forgotten)
        found = await look(metrics, client)
        assert found.by("outrider_verifier_drafters", "state") == {}
        # Of all drafters together, the counts stay.
        assert found.total("outrider_verifier_draft_tokens_per_position_total") == result.num_drafted


async def test_failures_refusals_and_preemptions(
    pair: Pair, metrics: VerifierMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, _ = pair
    settings = verifier_settings(target, num_blocks=16)
    async with (
        running_verifier(settings, metrics=metrics) as (verifier, service),
        decode_client(verifier.address) as client,
    ):
        await client.decode([], max_tokens=4)
        fail_once(monkeypatch, runner_of(service), at_call=1)
        await client.decode(PROMPT, max_tokens=4)
        # Five of 80 tokens at the end, and room for 256.
        results = [client.open(PROMPT[:4], max_tokens=76, seed=seed)[1] for seed in range(5)]
        for result in results:
            await result.done.wait()
        found = await look(metrics, client)
        load = (await client.stub.GetInfo(verifier_pb2.VerifierServiceGetInfoRequest())).load
    assert found.by("outrider_verifier_sequences_ended_total", "reason") == {"error": 2, "length": 5}
    assert found.total("outrider_verifier_preemptions_total") > 0
    # What was lost is computed again.
    assert found.total("outrider_verifier_prefill_tokens_total") > 5 * 4
    assert found.total("outrider_verifier_tokens_total") == found.total(
        "outrider_verifier_tokens_total", origin="plain"
    )
    assert found.total("outrider_verifier_tokens_total") == 5 * 76
    # Without graphs there are two kinds; a pass of both prompts and what decodes counts as the latter.
    passes = found.by("outrider_verifier_passes_total", "kind")
    assert passes["prompt"] > 0
    assert passes["eager"] >= 76
    assert found.total("outrider_verifier_sequences_limit") == load.max_running
