"""Which sequences take part in a step: budget, chunks, order, admission, preemption."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from engine.block_manager import BlockManager
from engine.step_costs import StepCosts
from kernels.penalties import TokenHistory
from outrider.protocol.sampling_parameters import SamplingParameters
from outrider.protocol.verification import Verification
from tests.services.sequences import LINK, NoModel, commit, propose, target_sequence
from verifier_service.row_budget import RowBudget
from verifier_service.scheduler import Scheduler
from verifier_service.sequence import TargetSequence
from verifier_service.speculation import WAITING, Speculation
from verifier_service.step import Scheduled

BLOCK = 4


def make_scheduler(
    num_blocks: int = 64,
    *,
    max_running: int = 8,
    budget: int = 40,
    can_chain: bool = False,
    costs: dict[tuple[int, int], float] | None = None,
) -> tuple[Scheduler, BlockManager]:
    blocks = BlockManager(num_blocks, BLOCK)
    executor = NoModel(can_chain=can_chain)
    row_budget = None if costs is None else RowBudget(StepCosts(costs))
    scheduler = Scheduler(
        blocks, executor, max_running=max_running, max_num_batched_tokens=budget, row_budget=row_budget
    )
    return scheduler, blocks


def run(scheduler: Scheduler, blocks: BlockManager) -> list[Scheduled]:
    """Schedule a step, check what must hold for any step, and count its tokens as computed."""
    parts, _ = scheduler.schedule()
    held = [*scheduler.running, *scheduler.queue]
    blocks.check(sequence.block_ids for sequence in held)
    assert len({id(part.sequence) for part in parts}) == len(parts)
    for part in parts:
        sequence = part.sequence
        assert sequence in scheduler.running
        assert part.num_new >= 1
        end = sequence.num_computed + part.num_new + part.num_drafts
        assert len(sequence.block_ids) >= blocks.blocks_for(end), "a part without blocks for its tokens"
        assert part.num_drafts == 0 or part.is_sampled
        assert part.is_sampled == (sequence.num_computed + part.num_new == sequence.length)
        assert not (part.is_sampled and sequence.speculation.state is WAITING), "sampled ahead of its drafts"
        sequence.num_computed += part.num_new
    return parts


def decoding(scheduler: Scheduler, blocks: BlockManager, length: int = 4, **fields: Any) -> TargetSequence:
    """A sequence whose prompt is computed and whose first token is committed."""
    sequence = target_sequence(length, **fields)
    scheduler.add(sequence)
    while not any(part.is_sampled for part in run(scheduler, blocks) if part.sequence is sequence):
        pass
    commit(sequence, [0], 0)
    return sequence


def test_a_prompt_is_computed_in_chunks_of_the_budget() -> None:
    scheduler, blocks = make_scheduler(budget=40)
    sequence = target_sequence(100, length_limit=200)
    scheduler.add(sequence)
    steps = [run(scheduler, blocks) for _ in range(3)]
    assert [(part.num_new, part.is_sampled) for (part,) in steps] == [(40, False), (40, False), (20, True)]


def test_decoding_goes_on_beside_a_long_prompt() -> None:
    """Catches a prompt that stops everybody else for as long as it takes."""
    scheduler, blocks = make_scheduler(budget=40)
    old = decoding(scheduler, blocks, drafter=None)
    scheduler.add(target_sequence(100, length_limit=200))
    for _ in range(3):
        parts = {part.sequence: part for part in run(scheduler, blocks)}
        assert parts[old].is_sampled
        assert sum(part.num_tokens for part in parts.values()) <= 40
        commit(old, [1], 0)


def test_what_is_in_flight_goes_on_beside_a_prompt() -> None:
    """Catches sequences that stand still for as long as prompts come, as their steps are always in flight then."""
    scheduler, blocks = make_scheduler(budget=40, can_chain=True)
    old = decoding(scheduler, blocks, drafter=None)
    penalized = decoding(scheduler, blocks, drafter=None, history=TokenHistory([0]))
    for sequence in (old, penalized):
        sequence.num_computed += 1
        sequence.num_in_flight = sequence.num_unknown = 1
    scheduler.add(new := target_sequence(30))
    parts, admitted = scheduler.schedule()
    assert admitted == [new]
    assert [(part.sequence, part.row.is_chained, part.num_tokens) for part in parts] == [
        (old, True, 1),
        (new, False, 30),
    ]


def test_a_budget_too_small_for_all_starves_nobody() -> None:
    scheduler, blocks = make_scheduler(num_blocks=200, max_running=20, budget=33)
    sequences = [decoding(scheduler, blocks, length_limit=10_000) for _ in range(20)]
    turns: Counter[TargetSequence] = Counter()
    for _ in range(60):
        for sequence in sequences:
            if not sequence.speculation.num_drafts:
                propose(sequence, [1, 2, 3, 4])
        parts = run(scheduler, blocks)
        assert sum(part.num_tokens for part in parts) <= 33
        for part in parts:
            # A chain is verified whole: what a seed gives must not depend on who else is there.
            assert part.num_drafts == 4
            turns[part.sequence] += 1
            commit(part.sequence, [9], 0)
    assert max(turns.values()) - min(turns.values()) <= 1


def test_prompts_get_their_turn_although_decoding_takes_the_whole_budget() -> None:
    scheduler, blocks = make_scheduler(num_blocks=200, max_running=20, budget=35)
    sequences = [decoding(scheduler, blocks, length_limit=10_000) for _ in range(8)]
    prompt = target_sequence(70, length_limit=100)
    scheduler.add(prompt)
    run(scheduler, blocks)
    assert prompt.num_computed == 35
    for _ in range(6):
        for sequence in sequences:
            if not sequence.speculation.num_drafts:
                propose(sequence, [1, 2, 3, 4])
        for part in run(scheduler, blocks):
            if part.sequence is not prompt:
                commit(part.sequence, [9], 0)
    assert prompt.num_computed == 70


def test_a_last_chunk_leaves_the_chain_to_a_step_that_has_room() -> None:
    """Catches a preempted sequence that verifies a part of its drafts only, and one that never gets to it."""
    scheduler, blocks = make_scheduler(budget=40)
    sequence = decoding(scheduler, blocks, length=38, length_limit=100)
    propose(sequence, [1, 2, 3, 4])
    scheduler._preempt(sequence)
    (first,) = run(scheduler, blocks)
    assert (first.num_new, first.num_drafts, first.is_sampled) == (38, 0, False)
    (second,) = run(scheduler, blocks)
    assert (second.num_new, second.num_drafts, second.is_sampled) == (1, 4, True)


def test_a_readmitted_sequence_has_blocks_for_its_drafts() -> None:
    """Catches a step that fails for everybody, because one sequence's draft tokens had no block to go to."""
    scheduler, blocks = make_scheduler(num_blocks=16, budget=40)
    sequence = decoding(scheduler, blocks, length=BLOCK * 2 - 1)
    assert sequence.length == 2 * BLOCK
    propose(sequence, [1, 2, 3, 4])
    scheduler._preempt(sequence)
    (part,) = run(scheduler, blocks)
    assert (part.num_new, part.num_drafts) == (2 * BLOCK, 4)


def test_a_sequence_waits_for_its_drafts_but_not_for_its_first_token() -> None:
    scheduler, blocks = make_scheduler()
    sequence = decoding(scheduler, blocks)
    assert run(scheduler, blocks) == []
    propose(sequence, [1, 2])
    (part,) = run(scheduler, blocks)
    assert (part.num_new, part.num_drafts, part.is_sampled) == (1, 2, True)


def test_a_preempted_sequence_is_computed_while_its_drafter_works() -> None:
    scheduler, blocks = make_scheduler()
    sequence = decoding(scheduler, blocks)
    scheduler._preempt(sequence)
    (part,) = run(scheduler, blocks)
    assert (part.num_new, part.is_sampled) == (4, False)
    assert run(scheduler, blocks) == []


def test_drafts_beyond_the_length_limit_are_left_out() -> None:
    """Catches tokens behind max_tokens, and positions behind the model's last one."""
    scheduler, blocks = make_scheduler()
    sequence = decoding(scheduler, blocks, length=4, length_limit=8)
    propose(sequence, [1, 2, 3, 4])
    (part,) = run(scheduler, blocks)
    assert part.num_drafts == 2
    commit(sequence, [1, 2], 1)
    (part,) = run(scheduler, blocks)
    assert part.num_drafts == 0


@pytest.mark.parametrize(
    ("verification", "num_verified"),
    # Coupled: a short chain is not worth a long step. By rejection: it is all the same how long it is.
    [(Verification.COUPLED, [0, 0, 0, 4]), (Verification.REJECTION, [0, 1, 2, 4])],
)
def test_how_far_a_chain_reaches_does_not_decide_whether_its_first_tokens_are_tested(
    verification: Verification, num_verified: list[int]
) -> None:
    """Catches a bias: what is likely is expanded first, so that a first token would be tested for being likely."""
    seen = []
    for length in (0, 1, 2, 4):
        scheduler, blocks = make_scheduler(costs={(8, 1): 0.004, (8, 8): 0.01})
        sequence = decoding(
            scheduler,
            blocks,
            takes_turns=False,
            verification=verification,
            sampling=SamplingParameters(temperature=1.0),
        )
        if length:
            propose(sequence, range(length))
        (part,) = run(scheduler, blocks)
        seen.append(part.num_drafts)
    assert seen == num_verified


def test_admission_is_in_order_and_within_the_limit() -> None:
    scheduler, blocks = make_scheduler(max_running=2)
    sequences = [target_sequence() for _ in range(3)]
    for sequence in sequences:
        scheduler.add(sequence)
    assert [part.sequence for part in run(scheduler, blocks)] == sequences[:2]
    scheduler.remove(sequences[0])
    assert sequences[2] in [part.sequence for part in run(scheduler, blocks)]


def test_nobody_is_admitted_without_blocks_for_all_of_the_prompt() -> None:
    scheduler, blocks = make_scheduler(num_blocks=8, budget=40)
    first, second = target_sequence(20), target_sequence(20)
    scheduler.add(first)
    scheduler.add(second)
    assert [part.sequence for part in run(scheduler, blocks)] == [first]
    assert list(scheduler.queue) == [second]
    scheduler.remove(first)
    assert [part.sequence for part in run(scheduler, blocks)] == [second]


def test_the_last_one_in_is_preempted_even_when_it_came_first_in_the_step() -> None:
    """Catches an old sequence that is thrown out in favour of a younger one: two of them can do that for ever."""
    scheduler, blocks = make_scheduler(num_blocks=4, budget=40)
    old = decoding(scheduler, blocks, length=BLOCK * 2 - 1, length_limit=16)  # 8 tokens, 2 blocks, full
    young = decoding(scheduler, blocks, length=BLOCK - 1, length_limit=16, drafter=None)
    assert blocks.num_free == 1
    # It is the young one's turn, and it takes the last block.
    assert young.last_turn > old.last_turn
    old.last_turn = (young.last_turn[0], 1)
    young.num_computed = young.length
    commit(young, [5], 0)
    propose(old, [1, 2, 3, 4])
    parts = run(scheduler, blocks)
    assert [part.sequence for part in parts] == [old]
    assert (young.num_preemptions, old.num_preemptions) == (1, 0)
    assert list(scheduler.queue) == [young]
    assert young.block_ids == []


def test_of_many_speculating_sequences_a_step_verifies_half() -> None:
    """Catches a half that is never served, and halves where there are too few sequences for any."""
    blocks = BlockManager(200, BLOCK)
    scheduler = Scheduler(blocks, NoModel(), max_running=20, max_num_batched_tokens=200, split_from=6)
    sequences = [decoding(scheduler, blocks, length_limit=1000) for _ in range(7)]
    plain = decoding(scheduler, blocks, length_limit=1000, drafter=None)
    served: Counter[TargetSequence] = Counter()
    for _ in range(14):
        for sequence in sequences:
            if not sequence.speculation.num_drafts:
                propose(sequence, [1, 2, 3, 4])
        parts = run(scheduler, blocks)
        assert len(parts) == 5
        for part in parts:
            served[part.sequence] += 1
            commit(part.sequence, [9], 0)
    assert served[plain] == 14
    assert {served[sequence] for sequence in sequences} == {8}
    for sequence in sequences[:2]:
        scheduler.remove(sequence)
    for sequence in sequences[2:]:
        if not sequence.speculation.num_drafts:
            propose(sequence, [1, 2, 3, 4])
    assert len(run(scheduler, blocks)) == 6


def test_a_budget_that_no_chain_fits_is_refused() -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        make_scheduler(budget=32)


def simulate(seed: int) -> Counter[str]:
    """Random sequences through a cache that is far too small for all of them, until each has ended."""
    chance = random.Random(seed)
    num_blocks = chance.randint(8, 16)
    scheduler, blocks = make_scheduler(num_blocks, max_running=chance.randint(1, 6), budget=chance.randint(33, 60))
    unborn = [
        target_sequence(chance.randint(1, 20), length_limit=chance.randint(21, num_blocks * BLOCK))
        for _ in range(chance.randint(2, 8))
    ]
    for sequence in unborn:
        sequence.speculation = Speculation(LINK if chance.random() < 0.7 else None)
    expected = {sequence: list(sequence.token_ids) for sequence in unborn}
    living: list[TargetSequence] = []
    for _ in range(3000):
        if unborn and chance.random() < 0.3:
            living.append(unborn.pop())
            scheduler.add(living[-1])
        for sequence in living:
            if sequence.speculation.state is WAITING and chance.random() < 0.5:
                propose(sequence, [chance.randrange(64) for _ in range(chance.randint(1, 5))])
        oldest = next(iter(scheduler.running), None)
        parts = run(scheduler, blocks)
        assert oldest is None or oldest in scheduler.running, "the oldest was preempted: nobody need ever end"
        for part in parts:
            if not part.is_sampled:
                continue
            sequence = part.sequence
            drafts = sequence.speculation.chain(part.num_drafts).token_ids
            num_accepted = chance.randint(0, len(drafts))
            new = [*drafts[:num_accepted], chance.randrange(64)]
            commit(sequence, new, num_accepted)
            expected[sequence] += new
            if sequence.length >= sequence.length_limit or chance.random() < 0.01:
                scheduler.remove(sequence)
                living.remove(sequence)
            else:
                blocks.shrink(sequence.block_ids, sequence.length)
        if not unborn and not living:
            break
    assert not unborn
    assert not living, "a livelock: sequences remain after 3,000 steps"
    assert blocks.num_free == num_blocks
    assert all(sequence.token_ids == tokens for sequence, tokens in expected.items())
    assert all(len(tokens) <= sequence.length_limit for sequence, tokens in expected.items())
    return Counter(preempted=scheduler.num_preemptions, runs=1)


def test_nothing_is_lost_and_everything_ends_in_a_cache_that_is_too_small() -> None:
    """Catches lost or doubled blocks, a part without blocks, a sequence that is forgotten, and a livelock."""
    seen: Counter[str] = Counter()
    for seed in range(300):
        seen += simulate(seed)
    assert seen["preempted"] > 300
