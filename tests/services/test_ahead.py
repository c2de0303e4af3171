"""Sequences whose drafters run ahead: no step waits for drafts, and all of them take their steps together."""

from __future__ import annotations

from engine.block_manager import BlockManager
from tests.services.sequences import LINK, NoModel, commit, propose, target_sequence
from verifier_service.gathering import Gathering
from verifier_service.scheduler import Scheduler
from verifier_service.sequence import TargetSequence
from verifier_service.speculation import AHEAD, LinkKey


def decoding(drafter: LinkKey | None = LINK, *, takes_turns: bool = False, **fields: int) -> TargetSequence:
    """Its first token is committed, and nothing is drafted for it."""
    sequence = target_sequence(4, drafter=drafter, takes_turns=takes_turns, num_computed=4, **fields)
    commit(sequence, [0], 0)
    return sequence


def scheduler_over(*sequences: TargetSequence, split_from: int = 2) -> Scheduler:
    blocks = BlockManager(256, 4)
    scheduler = Scheduler(
        blocks, NoModel(), max_running=32, max_num_batched_tokens=200, split_from=split_from, gathering=Gathering()
    )
    for sequence in sequences:
        assert blocks.grow(sequence.block_ids, 12)
        sequence.slot = scheduler._slots.take()
        scheduler.running[sequence] = None
    return scheduler


def begin(scheduler: Scheduler) -> dict[TargetSequence, int]:
    """Submit the next step, as far as the scheduler can tell: its sequences, with the drafts of each."""
    parts, _ = scheduler.schedule()
    for part in parts:
        part.sequence.num_in_flight += 1
        part.sequence.num_computed += part.num_new
        part.sequence.num_unknown += (part.num_drafts + 1) * part.is_sampled
        assert len(part.row.drafts) == part.num_drafts <= part.chain_length
    return {part.sequence: part.num_drafts for part in parts}


def end(*sequences: TargetSequence) -> None:
    """The step has come back, and rejects whatever it verified."""
    for sequence in sequences:
        sequence.num_in_flight = sequence.num_unknown = 0
        commit(sequence, [63], 0)


def test_a_step_takes_what_is_there() -> None:
    """Catches a step that waits for drafts, for more of them, or for half of the sequences only."""
    sequences = [decoding() for _ in range(6)]
    scheduler = scheduler_over(*sequences)
    propose(sequences[1], [1, 2])
    propose(sequences[2], [1, 2, 3, 4, 5, 6])
    alone = decoding(None)
    scheduler.running[alone] = None
    alone.slot = scheduler._slots.take()
    assert begin(scheduler) == dict.fromkeys(sequences, 0) | {sequences[1]: 2, sequences[2]: 4, alone: 0}
    end(*sequences, alone)
    assert begin(scheduler) == dict.fromkeys([*sequences, alone], 0)
    assert all(sequence.speculation.state is AHEAD for sequence in sequences)


def test_the_last_token_needs_no_draft() -> None:
    sequence = decoding(length_limit=7)
    propose(sequence, [1, 2, 3])
    assert begin(scheduler_over(sequence)) == {sequence: 1}


def test_decoding_is_not_torn_apart() -> None:
    """Catches two groups of sequences that take steps in turn: each step reads all weights.

    A prompt that comes while others decode does not wait; once it decodes itself, it takes their steps.
    """
    old = [decoding() for _ in range(3)]
    scheduler = scheduler_over(*old)
    assert set(begin(scheduler)) == set(old)
    scheduler.add(new := target_sequence(4, takes_turns=False))
    assert set(begin(scheduler)) == {new}
    end(*old)
    # The new one's first token is on its way: who decodes does not wait for it.
    assert set(begin(scheduler)) == set(old)
    new.num_computed, new.num_in_flight, new.num_unknown = 4, 0, 0
    commit(new, [1], 0)
    assert begin(scheduler) == {}
    end(*old)
    assert set(begin(scheduler)) == {*old, new}


def test_those_who_take_turns_with_another_drafter_wait_for_it_alone() -> None:
    """Catches a drafter that holds up another's sequences."""
    ahead, waiting = decoding(), decoding(LinkKey("drafter:2", 1), takes_turns=True)
    scheduler = scheduler_over(ahead, waiting)
    assert set(begin(scheduler)) == {ahead}
    propose(waiting, [1, 2])
    assert begin(scheduler) == {waiting: 2}
    end(ahead)
    assert set(begin(scheduler)) == {ahead}
