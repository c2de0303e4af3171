"""Sequences of a drafter are kept together in as few steps as possible, and nobody waits for long."""

from __future__ import annotations

import pytest

from engine.block_manager import BlockManager
from tests.services.sequences import LINK, NoModel, commit, propose, target_sequence
from verifier_service import gathering
from verifier_service.gathering import Gathering
from verifier_service.scheduler import Scheduler
from verifier_service.sequence import TargetSequence
from verifier_service.speculation import LinkKey


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("verifier_service.gathering.time.monotonic", lambda: self.now)


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
    scheduler = Scheduler(
        blocks, NoModel(), max_running=32, max_num_batched_tokens=200, split_from=split_from, gathering=gathered
    )
    for sequence in sequences:
        assert blocks.grow(sequence.block_ids, 12)
        sequence.slot = scheduler._slots.take()
        scheduler.running[sequence] = None
    return scheduler, gathered


def verified(scheduler: Scheduler) -> set[TargetSequence]:
    """Whose drafts the next step would verify."""
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
    # In flight: its next drafts are worth waiting for as well.
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
    others = [sequence for sequence in sequences if not sequence.num_in_flight]
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


def test_what_needs_no_draft_comes_along_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
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
