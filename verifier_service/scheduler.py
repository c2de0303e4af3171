"""Which sequences take part in a step, and with how many tokens: continuous batching with chunked prefill.

Sources: Orca (Yu et al., OSDI 2022) for iteration-level scheduling, Sarathi (Agrawal et al., arXiv 2308.16369) for
chunks of prompts beside decoding, PagedAttention (Kwon et al., arXiv 2309.06180) for preemption by recomputing.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from engine.block_manager import BlockManager
from engine.slots import SlotPool
from engine.step import Executor, Row, Sampled, Wanted
from kernels.limits import MAX_DRAFT_TOKENS
from verifier_service.gathering import Gathering
from verifier_service.row_budget import RowBudget
from verifier_service.sequence import TargetSequence
from verifier_service.speculation import AHEAD, ALONE, JOINING, LATE, WAITING, LinkKey
from verifier_service.step import Scheduled

# A prompt that got nothing for so many steps no longer stands behind those that decode.
MAX_STEPS_LEFT_OUT = 4


# A sequence that could take part in a step, and the draft tokens that the step would verify. A plain tuple, as one is
# made for each sequence of a step; whoever compares less goes first:
_Ready = tuple[
    bool,  # is_last: prompts fill what decoding leaves, unless they were left out for long
    tuple[int, int],  # last_turn: whoever has waited longest, so that a budget that is too small for all starves nobody
    int,  # place by admission: no two have the same, so that sequences themselves are never compared
    TargetSequence,
    int,  # num_drafts
    LinkKey | None,  # gathers_with
]


@dataclass(frozen=True)
class _Candidates:
    ready: list[_Ready]
    chained: dict[TargetSequence, Scheduled]  # parts of those whose step is in flight
    num_speculating: int
    num_groups: int
    held_back: set[LinkKey]  # drafters whose sequences shall wait for more of them


class Scheduler:
    """Sequences that are queued and that run. Belongs to the engine's thread."""

    def __init__(
        self,
        blocks: BlockManager,
        executor: Executor[Row, Sampled],
        *,
        max_running: int,
        max_num_batched_tokens: int,
        split_from: int = 1 << 30,
        gathering: Gathering | None = None,
        row_budget: RowBudget | None = None,
    ) -> None:
        if max_num_batched_tokens <= MAX_DRAFT_TOKENS:
            raise ValueError(f"max_num_batched_tokens must be above {MAX_DRAFT_TOKENS}, the longest chain")
        self.blocks = blocks
        self._executor = executor
        self._slots = SlotPool(max_running)
        self._max_running = max_running
        self._split_from = split_from
        self._max_num_batched_tokens = max_num_batched_tokens
        self.queue: deque[TargetSequence] = deque()
        # In order of admission, which decides who is preempted: the last one in.
        self.running: dict[TargetSequence, None] = {}
        self.num_preemptions = 0
        self._step = 0
        self._gathering = gathering
        # None where nobody has measured what steps cost: all draft tokens at hand are verified.
        self._row_budget = row_budget
        # Blocks ran out while steps were in flight, whose sequences cannot be preempted: begin nothing until they are
        # back.
        self.is_short = False
        # Whether drafters run ahead of some sequences: what they send is taken in while a step is in flight.
        self.has_ahead = False

    def add(self, sequence: TargetSequence) -> None:
        """Queue a new sequence."""
        self.queue.append(sequence)

    def remove(self, sequence: TargetSequence) -> None:
        """Forget a sequence and free what it holds."""
        if sequence in self.running:
            self._stop_running(sequence)
        else:
            self.queue.remove(sequence)

    def schedule(self) -> tuple[list[Scheduled], list[TargetSequence]]:
        """The next step: (its parts, the sequences in it that run for the first time).

        It is to be submitted as it is, before anything else happens to its sequences. Those of steps in flight are left
        out, unless nobody speculates: then they go on from the token that is still being sampled, where the executor
        can do that.
        """
        self._step += 1
        self.is_short = False
        scheduled: dict[TargetSequence, Scheduled] = {}
        budget = self._continue_running(scheduled, self._max_num_batched_tokens)
        admitted = [] if self.is_short else self._admit_queued(scheduled, budget)
        for place, sequence in enumerate(scheduled):
            sequence.last_turn = (self._step, place)
        return list(scheduled.values()), admitted

    def _continue_running(self, scheduled: dict[TargetSequence, Scheduled], budget: int) -> int:
        candidates = self._candidates()
        num_verified_left = -(-candidates.num_speculating // candidates.num_groups)
        most_drafts = self._most_drafts(candidates.ready)
        for _, _, _, sequence, num_drafts, gathers_with in sorted(candidates.ready):
            if gathers_with in candidates.held_back:
                continue
            if num_drafts and gathers_with is not None:
                if num_verified_left == 0:
                    continue
                num_verified_left -= 1
            # A sequence that came before may have preempted this one to make room.
            if sequence not in self.running:
                continue
            if (part := candidates.chained.get(sequence)) is None:
                part = self._fit(sequence, budget, min(num_drafts or _num_drafts(sequence), most_drafts))
            if part is None or (num_tokens := part.num_tokens) > budget:
                continue
            # What the cache must have room for: a step in flight may commit all of its drafts.
            reach = (
                sequence.length + sequence.num_unknown if part.row.is_chained else sequence.num_computed + num_tokens
            )
            if not self.blocks.grow(sequence.block_ids, reach):
                victims = self._make_room(sequence, reach)
                if victims is None:
                    break
                for victim in victims:
                    if victim in scheduled:
                        budget += scheduled.pop(victim).num_tokens
                if sequence in victims:
                    continue
            scheduled[sequence] = part
            budget -= num_tokens
        return budget

    def _candidates(self) -> _Candidates:
        """Who could take part in a step. One pass that looks at everything once: it stands between two steps."""
        ready: list[_Ready] = []
        in_flight: list[tuple[int, TargetSequence]] = []  # and their places
        chained: dict[TargetSequence, Scheduled] = {}
        num_speculating = 0
        ready_drafters: list[LinkKey] = []  # for each sequence that could take part
        missing_drafters: list[LinkKey] = []  # for each that should wait for an answer, or whose step is in flight
        # Those that wait for no drafter, beside drafters that run ahead: whether there are any, whether some decode in
        # a step in flight, and those that could decode in the next.
        is_ahead = is_decoding = False
        free: list[_Ready] = []
        for place, sequence in enumerate(self.running):
            length = len(sequence.token_ids)
            speculation = sequence.speculation
            state = speculation.state
            is_free = state is AHEAD or state is ALONE
            is_ahead = is_ahead or state is AHEAD
            # A drafter that cannot help any more counts for none, nor does one for the first token.
            can_speculate = state is not JOINING and length + 1 < sequence.length_limit
            drafter = speculation.drafter if can_speculate and not is_free else None
            num_speculating += drafter is not None
            if sequence.num_in_flight:
                in_flight.append((place, sequence))
                is_decoding = is_decoding or (is_free and sequence.num_unknown > 0 and sequence.num_committed_here > 0)
                # Who goes on without a late drafter is not waited for either.
                if drafter is not None and state is not LATE:
                    missing_drafters.append(drafter)
                continue
            num_drafts, is_prompt = 0, length - sequence.num_computed > 1
            if not is_prompt:
                if num_drafts := speculation.num_drafts:
                    if num_drafts > (most := sequence.num_wanted_drafts):
                        num_drafts = most
                elif drafter is not None and state is WAITING:
                    missing_drafters.append(drafter)
                    continue
            if (gathers_with := sequence.gathers_with) is not None:
                ready_drafters.append(gathers_with)
            is_last = is_prompt and self._step - sequence.last_turn[0] <= MAX_STEPS_LEFT_OUT
            candidate = (is_last, sequence.last_turn, place, sequence, num_drafts, gathers_with)
            (free if is_free and not is_prompt else ready).append(candidate)
        self.has_ahead = is_ahead
        # In two steps that follow each other, each over some of them, the device would read all weights twice as often.
        if not (is_ahead and is_decoding):
            ready += free
        if not num_speculating and not is_ahead:
            for place, sequence in in_flight:
                if (part := self._chain(sequence)) is not None:
                    chained[sequence] = part
                    ready.append((False, sequence.last_turn, place, sequence, 0, None))
        # With many of them, two halves: while the target verifies one, the drafter works for the other.
        num_groups = 1 if num_speculating < self._split_from else 2
        held_back: set[LinkKey] = set()
        if self._gathering is not None:
            held_back = self._gathering.waiting(
                Counter(ready_drafters), Counter(missing_drafters), num_groups=num_groups
            )
        return _Candidates(ready, chained, num_speculating, num_groups, held_back)

    def _most_drafts(self, ready: list[_Ready]) -> int:
        """How many draft tokens of a sequence a step over these should verify. In turns, all that were waited for.

        How far a chain reaches tells of its tokens: what is likely is expanded first. A token tested by p and q must
        not be tested for that reason, so of these sequences it counts only whether there is a chain.
        """
        if self._row_budget is None or not any(sequence.speculation.state is AHEAD for _, _, _, sequence, *_ in ready):
            return MAX_DRAFT_TOKENS
        return self._row_budget.choose(
            [
                (
                    sequence.num_wanted_drafts if num_drafts and sequence.is_rejecting else num_drafts,
                    sequence.acceptance.value,
                )
                for _, _, _, sequence, num_drafts, _ in ready
                if len(sequence.token_ids) - sequence.num_computed == 1
            ]
        )

    def _chain(self, sequence: TargetSequence) -> Scheduled | None:
        """The part behind the sequence's step in flight, where that is certain to be wanted, but for a stop token."""
        if (
            not sequence.num_unknown  # what is in flight does not sample
            or sequence.speculation.drafter is not None
            or len(sequence.token_ids) + sequence.num_unknown >= sequence.length_limit
        ):
            return None
        assert sequence.slot is not None
        row = Row(sequence.slot, sequence.sampling, sequence.block_ids, -1, ())
        row.is_coupled = sequence.is_coupled
        row.num_logprobs, row.history = sequence.num_logprobs, sequence.history
        return Scheduled(sequence, row, 1, 0, True) if self._executor.can_overlap(row) else None

    def _admit_queued(self, scheduled: dict[TargetSequence, Scheduled], budget: int) -> list[TargetSequence]:
        admitted = []
        while self.queue and len(self.running) < self._max_running:
            sequence = self.queue[0]
            num_tokens = self._fitting(sequence, budget, num_drafts := _num_drafts(sequence))
            # All of it must fit: a sequence that is admitted only to be preempted helps nobody.
            if num_tokens is None or not self.blocks.grow(sequence.block_ids, sequence.length + num_drafts):
                break
            self.queue.popleft()
            self.running[sequence] = None
            sequence.slot = self._slots.take()
            part = _part(sequence, *num_tokens)
            scheduled[sequence] = part
            budget -= part.num_tokens
            if sequence.num_preemptions == 0:
                admitted.append(sequence)
            elif sequence.trace is not None:
                sequence.trace.resumed()
        return admitted

    def _fit(self, sequence: TargetSequence, budget: int, num_drafts: int) -> Scheduled | None:
        """The sequence's part of a step with `budget` tokens left; None when there is no room for any."""
        fitting = self._fitting(sequence, budget, num_drafts)
        return None if fitting is None else _part(sequence, *fitting)

    def _fitting(self, sequence: TargetSequence, budget: int, num_drafts: int) -> tuple[int, int, bool] | None:
        """How many new tokens, how many drafts, and whether the part samples; None when there is no room for any."""
        num_missing = len(sequence.token_ids) - sequence.num_computed
        is_waiting = sequence.speculation.state is WAITING
        if num_missing == 1 and num_drafts < budget and not is_waiting:
            return 1, num_drafts, True
        # A preempted sequence may be computed anew while its drafter works, but not past the point where it would
        # sample without the answer that it is waiting for.
        num_ready = num_missing - 1 if is_waiting else num_missing
        num_new = min(num_ready, budget)
        is_sampled = num_new == num_missing
        if is_sampled and num_new + num_drafts > budget:
            # A chain is verified whole, if need be in the next step, where this sequence goes first: which tokens a
            # seed gives must not depend on the company.
            num_new -= 1
            is_sampled = False
        if num_new == 0:
            return None
        return num_new, num_drafts if is_sampled else 0, is_sampled

    def _make_room(self, sequence: TargetSequence, num_tokens: int) -> list[TargetSequence] | None:
        """Give the sequence blocks for so many tokens, preempting those that came last for it; returns them.

        The sequence itself is among them when the older ones hold what is missing. The oldest of all always gets its
        blocks, as the whole cache is enough for one sequence of the greatest length: it ends, and then the next oldest.
        None, and `is_short`, where steps in flight have to come back first.
        """
        victims: list[TargetSequence] = []
        while not self.blocks.grow(sequence.block_ids, num_tokens):
            if any(running.num_in_flight for running in self.running):
                self.is_short = True
                return None
            victim = next(reversed(self.running))
            self._preempt(victim)
            victims.append(victim)
            if victim is sequence:
                break
        return victims

    def _preempt(self, sequence: TargetSequence) -> None:
        self.num_preemptions += 1
        sequence.num_preemptions += 1
        self._stop_running(sequence)
        if sequence.trace is not None:
            sequence.trace.preempted(sequence.num_computed, sequence.length)
        sequence.num_computed = 0
        self.queue.appendleft(sequence)

    def _stop_running(self, sequence: TargetSequence) -> None:
        del self.running[sequence]
        self.blocks.free(sequence.block_ids)
        assert sequence.slot is not None
        self._slots.give_back(sequence.slot)
        sequence.slot = None


def _num_drafts(sequence: TargetSequence) -> int:
    """Draft tokens at hand that a step could verify."""
    return min(sequence.speculation.num_drafts, sequence.num_wanted_drafts)


def _part(sequence: TargetSequence, num_new: int, num_drafts: int, is_sampled: bool) -> Scheduled:
    assert sequence.slot is not None
    start, token_ids = sequence.num_computed, sequence.token_ids
    row = Row(
        sequence.slot,
        sequence.sampling,
        sequence.block_ids,
        start,
        token_ids[-1:] if is_sampled and num_new == 1 else token_ids[start : start + num_new],
    )
    row.is_coupled = sequence.is_coupled
    if is_sampled:
        row.num_logprobs, row.history = sequence.num_logprobs, sequence.history
        if num_drafts:
            row.drafts = sequence.speculation.chain(num_drafts)
    else:
        row.wanted = Wanted.NOTHING
    return Scheduled(sequence, row, num_new, num_drafts, is_sampled, sequence.speculation.num_drafts)
