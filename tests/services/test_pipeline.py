"""Steps in flight: on a CPU each is computed at its launch and comes back later, on a GPU it really is in flight."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from engine.block_manager import BlockManager
from outrider.v1 import verifier_pb2
from tests.services.harness import (
    DecodeClient,
    Result,
    decode_client,
    drafter_settings,
    eventually,
    running_drafter,
    running_verifier,
    scripted_drafter,
    verifier_is_empty,
    verifier_settings,
)
from tests.services.reference import greedy
from tests.services.sequences import LINK, commit, propose, target_sequence
from tests.services.test_scheduler import decoding, make_scheduler, run
from verifier_service import gathering, pipeline
from verifier_service.decode_graph import DecodeGraphs, GraphRun
from verifier_service.gathering import Gathering
from verifier_service.pipeline import Pipeline
from verifier_service.scheduler import Scheduled, Scheduler
from verifier_service.sequence import TargetSequence
from verifier_service.speculation import LinkKey
from verifier_service.target import Target

PROMPTS = [[index, 7, 3 + index, 5] for index in range(8)]

Pair = tuple[Path, Path]


@pytest.fixture
def depths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Steps in flight after each launch, of verifiers that launch their steps as on a GPU, whatever they run on."""
    load = Target.load

    def load_with_graphs(target: Target) -> None:
        load(target)
        if target.graphs is None:
            target.graphs = DecodeGraphs(target.runner, max_sequences=32, max_draft_tokens=4, num_candidates=64)

    monkeypatch.setattr(Target, "load", load_with_graphs)
    found: list[int] = []
    launch = Pipeline.launch

    def counted(self: Pipeline, batch: Sequence[Scheduled], *, schedule_seconds: float) -> bool:
        is_launched = launch(self, batch, schedule_seconds=schedule_seconds)
        found.append(len(self))
        return is_launched

    monkeypatch.setattr(Pipeline, "launch", counted)
    return found


async def decode_all(client: DecodeClient, drafter: str, *, temperature: float) -> list[Result]:
    results = [
        client.open(prompt, drafter=drafter, seed=seed, max_tokens=40, sampling={"temperature": temperature})[1]
        for seed, prompt in enumerate(PROMPTS)
    ]
    for result in results:
        await eventually(result.done.is_set, timeout=60)
    return results


async def test_steps_in_flight_change_nothing(pair: Pair, depths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a step prepared from what another, still in flight, is about to change."""
    target, draft = pair
    numbers = random.Random(0)
    is_done = GraphRun.is_done.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(GraphRun, "is_done", property(lambda step: numbers.random() < 0.05 and is_done(step)))
    async with running_drafter(drafter_settings(model=draft)) as drafter:
        outputs = []
        for most in (2, 1):
            monkeypatch.setattr(pipeline, "MAX_STEPS_IN_FLIGHT", most)
            depths.clear()
            async with (
                running_verifier(verifier_settings(target, split_from=2), busy_poll_seconds=0.001) as (verifier, _),
                decode_client(verifier.address) as client,
            ):
                await client.use_drafters(drafter.address)
                plain = await decode_all(client, drafter.address, temperature=0.0)
                assert [result.token_ids for result in plain] == [greedy(target, prompt, 40) for prompt in PROMPTS]
                sampled = await decode_all(client, drafter.address, temperature=1.0)
                outputs.append([result.token_ids for result in sampled])
                assert sum(result.num_accepted for result in sampled) > 0
                await eventually(lambda: verifier_is_empty(client))
            assert max(depths) == most
    assert outputs[0] == outputs[1]


async def test_plain_steps_are_chained(pair: Pair, depths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a chained step at the wrong position, with another's token, or one that outlives its sequence's end."""
    target, _ = pair
    expected = [greedy(target, prompt, 40) for prompt in PROMPTS]
    outputs = []
    for most in (2, 1):
        monkeypatch.setattr(pipeline, "MAX_STEPS_IN_FLIGHT", most)
        depths.clear()
        async with (
            running_verifier(verifier_settings(target)) as (verifier, _),
            decode_client(verifier.address) as client,
        ):
            plain = await decode_all(client, "", temperature=0.0)
            assert [result.token_ids for result in plain] == expected
            # Ends by length and by stop token, at all times and in company.
            lengths = [client.open(prompt, max_tokens=3 + 4 * i)[1] for i, prompt in enumerate(PROMPTS)]
            stops = [
                client.open(prompt, max_tokens=40, stop_token_ids=[tokens[2 + 3 * i]])[1]
                for i, (prompt, tokens) in enumerate(zip(PROMPTS, expected, strict=True))
            ]
            for result in (*lengths, *stops):
                await eventually(result.done.is_set, timeout=60)
            assert [result.token_ids for result in lengths] == [
                tokens[: 3 + 4 * i] for i, tokens in enumerate(expected)
            ]
            for i, (result, tokens) in enumerate(zip(stops, expected, strict=True)):
                assert result.token_ids == tokens[: tokens.index(tokens[2 + 3 * i]) + 1]
                assert result.finish == "STOP_TOKEN"
            sampled = await decode_all(client, "", temperature=1.0)
            outputs.append([result.token_ids for result in sampled])
            await eventually(lambda: verifier_is_empty(client))
        assert max(depths) == most
    assert outputs[0] == outputs[1]


async def test_a_sequence_closed_in_flight_ends_there(
    pair: Pair, depths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches tokens committed to a sequence that is gone, and blocks that nobody gives back."""
    target, _ = pair
    is_held = True
    is_done = GraphRun.is_done.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(GraphRun, "is_done", property(lambda step: not is_held and is_done(step)))

    def silent(token_ids: Sequence[int], max_draft_tokens: int) -> Sequence[int]:
        while is_held:
            time.sleep(0.01)
        return ()

    async with (
        scripted_drafter(silent) as drafter,
        running_verifier(verifier_settings(target), busy_poll_seconds=0.001) as (verifier, _),
        decode_client(verifier.address) as client,
    ):
        await client.use_drafters(drafter.address)
        # Its wait for a proposal keeps the engine looking for news while the other one's step is in flight.
        _, waiting = client.open([1, 2, 3], drafter=drafter.address, max_tokens=6)
        await eventually(lambda: len(waiting.token_ids) == 1)
        closed_id, closed = client.open([4, 5, 6], max_tokens=50)
        await eventually(lambda: bool(closed.token_ids) and 1 in depths)
        num_tokens = len(closed.token_ids)
        client.send(client.closing(closed_id))
        await eventually(lambda: has_running(client, 1))
        _, again = client.open([4, 5, 6], max_tokens=5)
        is_held = False
        await eventually(again.done.is_set)
        await eventually(waiting.done.is_set)
        assert len(closed.token_ids) == num_tokens
        assert again.token_ids == greedy(target, [4, 5, 6], 5)
        assert waiting.token_ids == greedy(target, [1, 2, 3], 6)
        await eventually(lambda: verifier_is_empty(client))


async def has_running(client: DecodeClient, num_running: int) -> bool:
    info = await client.stub.GetInfo(verifier_pb2.VerifierServiceGetInfoRequest())
    return info.load.num_running == num_running


def test_nobody_in_flight_is_preempted() -> None:
    """Catches blocks taken from a sequence whose step is still reading them, and a scheduler that then stands still."""
    scheduler, blocks = make_scheduler(num_blocks=4)
    first, second = (decoding(scheduler, blocks, length=7, drafter=None) for _ in range(2))
    second.num_in_flight = 1
    first.token_ids.append(0)
    first.num_computed = 8
    assert run(scheduler, blocks) == []
    assert scheduler.is_short
    assert second in scheduler.running
    second.num_in_flight = 0
    assert [part.sequence for part in run(scheduler, blocks)] == [first]
    assert not scheduler.is_short
    assert second not in scheduler.running


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(gathering.time, "monotonic", lambda: self.now)


def speculating(drafter: LinkKey = LINK, *, is_ready: bool, length_limit: int = 64) -> TargetSequence:
    sequence = target_sequence(4, drafter=drafter, num_computed=4, length_limit=length_limit)
    commit(sequence, [0], 0)
    if is_ready:
        propose(sequence, [1, 2])
    return sequence


def make_late(sequence: TargetSequence) -> None:
    assert sequence.speculation.give_up_waiting(1.0, timeout=1.0)


def reject(sequence: TargetSequence) -> None:
    """A step comes back with another token than the first of its drafts."""
    sequence.num_computed += 1
    commit(sequence, [63], 0)


def scheduler_over(*sequences: TargetSequence, split_from: int) -> tuple[Scheduler, Gathering]:
    blocks = BlockManager(256, 4)
    gathered = Gathering()
    scheduler = Scheduler(blocks, max_running=32, max_num_batched_tokens=200, split_from=split_from, gathering=gathered)
    for sequence in sequences:
        assert blocks.grow(sequence.block_ids, 12)
        scheduler.running[sequence] = None
    return scheduler, gathered


def verified(scheduler: Scheduler) -> set[TargetSequence]:
    """Whose proposals the next step would verify."""
    return {part.sequence for part in scheduler.schedule()[0] if part.num_drafts}


def test_few_sequences_of_a_drafter_are_verified_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches two groups that take turns for ever, and one that waits for another drafter's or for a lost answer."""
    clock = Clock(monkeypatch)
    ready, elsewhere = speculating(is_ready=True), speculating(LinkKey("drafter:2", 1), is_ready=True)
    missing, plain = speculating(is_ready=False), target_sequence(4, drafter=None)
    scheduler, gathered = scheduler_over(ready, elsewhere, missing, plain, split_from=100)
    parts, _ = scheduler.schedule()
    assert {part.sequence for part in parts} == {elsewhere, plain}
    assert gathered.time_left() == pytest.approx(gathering.MAX_PATIENCE_SECONDS)
    propose(missing, [3])
    assert verified(scheduler) == {ready, elsewhere, missing}
    # In flight: its next proposal is worth waiting for as well.
    missing.num_in_flight = 1
    assert verified(scheduler) == {elsewhere}
    clock.now += gathering.MAX_PATIENCE_SECONDS + 0.001
    assert verified(scheduler) == {ready, elsewhere}
    # A new step, a new wait; and no longer than answers usually take.
    for _ in range(100):
        gathered.began([ready])
        clock.now += 0.01
        gathered.answered(ready, clock.now)
    assert verified(scheduler) == {elsewhere}
    assert gathered.time_left() == pytest.approx(0.015, rel=0.01)
    clock.now += 0.016
    assert verified(scheduler) == {ready, elsewhere}


def test_nobody_waits_longer_for_those_who_wait_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a wait that begins anew with each step of a sequence whose drafter is late, or that such steps cause."""
    clock = Clock(monkeypatch)
    ready, missing = speculating(is_ready=True), speculating(is_ready=False)
    late = [speculating(is_ready=False) for _ in range(2)]
    for sequence in late:
        make_late(sequence)
    scheduler, gathered = scheduler_over(ready, missing, *late, split_from=100)
    start = clock.now
    for number in range(100):
        # One of them is always in flight.
        late[number % 2].num_in_flight, late[1 - number % 2].num_in_flight = 0, 1
        parts = [part.sequence for part in scheduler.schedule()[0]]
        assert late[number % 2] in parts
        gathered.began(parts)
        if ready in parts:
            break
        clock.now += 0.004
    assert gathering.MAX_PATIENCE_SECONDS <= clock.now - start < gathering.MAX_PATIENCE_SECONDS + 0.005
    # With the late ones alone beside it, there is nobody to wait for.
    scheduler.remove(missing)
    for sequence in (ready, *late):
        sequence.num_in_flight = 0
    late[0].num_in_flight = 1
    assert verified(scheduler) == {ready}


def test_a_wait_that_is_over_is_not_slept_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an engine that goes to sleep until the next frame, as time ran out while it asked whether it may."""
    clock = Clock(monkeypatch)
    ready, missing = speculating(is_ready=True), speculating(is_ready=False)
    scheduler, gathered = scheduler_over(ready, missing, split_from=100)
    assert gathered.time_left() is None
    assert verified(scheduler) == set()
    clock.now += gathering.MAX_PATIENCE_SECONDS + 0.001
    assert gathered.time_left() == 0.001
    assert verified(scheduler) == {ready}
    gathered.began([ready])
    assert gathered.time_left() is None


def test_many_sequences_of_a_drafter_are_verified_in_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches halves that fall apart: each step then verifies fewer sequences in the same time."""
    Clock(monkeypatch)
    sequences = [speculating(is_ready=True) for _ in range(8)]
    scheduler, _ = scheduler_over(*sequences, split_from=8)
    first = verified(scheduler)
    assert len(first) == 4
    for sequence in first:
        sequence.num_in_flight = 1
    others = [sequence for sequence in sequences if not sequence.is_in_flight]
    assert verified(scheduler) == set(others)
    for sequence in others[:2]:
        reject(sequence)
    assert verified(scheduler) == set()
    propose(others[0], [1])
    assert verified(scheduler) == {others[0], *others[2:]}


def test_a_half_does_not_wait_for_the_larger_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches halves of an odd number of sequences that take turns in idling: the smaller is no equal share."""
    Clock(monkeypatch)
    sequences = [speculating(is_ready=True) for _ in range(9)]
    scheduler, _ = scheduler_over(*sequences, split_from=8)
    first = verified(scheduler)
    assert len(first) == 5
    for sequence in first:
        sequence.num_in_flight = 1
    assert verified(scheduler) == set(sequences) - first


def test_what_needs_no_proposal_comes_along_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches steps of their own for last tokens: each takes about as long as a step over all the others."""
    clock = Clock(monkeypatch)
    # With room for one more token, the target's own.
    last, unmatched, late = (speculating(is_ready=False, length_limit=limit) for limit in (6, 64, 64))
    unmatched.speculation.find_nothing(unmatched.length, unmatched.token_ids, 0.0)
    make_late(late)
    others = [speculating(is_ready=False) for _ in range(3)]
    first_token = target_sequence(1, drafter=LINK)
    scheduler, _ = scheduler_over(last, unmatched, late, *others, first_token, split_from=100)

    def stepping() -> set[TargetSequence]:
        return {part.sequence for part in scheduler.schedule()[0]}

    # Neither a first token nor a sequence whose drafter is late waits for anybody.
    assert stepping() == {late, first_token}
    for sequence in (late, first_token):
        sequence.num_in_flight = 1
    assert stepping() == set()
    late.speculation.leave()
    for sequence in others:
        propose(sequence, [1])
    assert stepping() == {last, unmatched, *others}
    reject(others[0])
    assert stepping() == set()
    clock.now += gathering.MAX_PATIENCE_SECONDS + 0.001
    assert stepping() == {last, unmatched, *others[1:]}
    # With nobody left to wait for, at once.
    for sequence in others:
        scheduler.remove(sequence)
    assert stepping() == {last, unmatched}
