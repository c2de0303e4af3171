"""Which sequences take part in a step, and with how many tokens: continuous batching with chunked prefill.

Sources: Orca (Yu et al., OSDI 2022) for iteration-level scheduling, Sarathi (Agrawal et al., arXiv 2308.16369) for
chunks of prompts beside decoding, PagedAttention (Kwon et al., arXiv 2309.06180) for preemption by recomputing.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from engine.block_manager import BlockManager
from kernels.limits import MAX_DRAFT_TOKENS
from verifier_service.gathering import Gathering
from verifier_service.sequence import TargetSequence
from verifier_service.speculation import JOINING, LATE, READY, WAITING, LinkKey

# A prompt that got nothing for so many steps no longer stands behind those that decode.
MAX_STEPS_LEFT_OUT = 4


@dataclass(slots=True)  # not frozen: one for each sequence of a step
class Scheduled:
    """A sequence's part of a step: `num_new` tokens that are committed but not computed, then `num_drafts` drafts.

    A step that reaches the sequence's end samples there and commits tokens; an inner chunk of a prompt does not.
    """

    sequence: TargetSequence
    num_new: int
    num_drafts: int
    is_sampled: bool
    # The new token is the one that the step in flight samples; the host does not know it yet.
    is_chained: bool = False

    @property
    def num_tokens(self) -> int:
        """What the part takes of the step's budget."""
        return self.num_new + self.num_drafts


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
    num_speculating: int
    num_groups: int
    waiting: set[LinkKey]  # drafters whose sequences shall wait for more of them


class Scheduler:
    """Sequences that wait and that run. Belongs to the engine's thread."""

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_running: int,
        max_num_batched_tokens: int,
        split_from: int = 1 << 30,
        gathering: Gathering | None = None,
    ) -> None:
        if max_num_batched_tokens <= MAX_DRAFT_TOKENS:
            raise ValueError(f"max_num_batched_tokens must be above {MAX_DRAFT_TOKENS}, the longest proposal")
        self.blocks = blocks
        self._max_running = max_running
        self._split_from = split_from
        self._max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[TargetSequence] = deque()
        # In order of admission, which decides who is preempted: the last one in.
        self.running: dict[TargetSequence, None] = {}
        self.num_preemptions = 0
        self._step = 0
        self._gathering = gathering
        # Blocks ran out while steps were in flight, whose sequences cannot be preempted: launch nothing until they are
        # back.
        self.is_short = False

    def add(self, sequence: TargetSequence) -> None:
        """Queue a new sequence."""
        self.waiting.append(sequence)

    def remove(self, sequence: TargetSequence) -> None:
        """Forget a sequence and free its blocks."""
        if sequence in self.running:
            del self.running[sequence]
        else:
            self.waiting.remove(sequence)
        self.blocks.free(sequence.block_ids)

    def schedule(self) -> tuple[list[Scheduled], list[TargetSequence]]:
        """The next step: (its parts, the sequences in it that run for the first time).

        Sequences of steps in flight are left out, but for plain ones where all are plain and no prompt waits: those go
        on from the token that is still being sampled.
        """
        self._step += 1
        self.is_short = False
        if self._can_chain():
            return self._schedule_chained(), []
        scheduled: dict[TargetSequence, Scheduled] = {}
        budget = self._continue_running(scheduled, self._max_num_batched_tokens)
        admitted = self._admit_waiting(scheduled, budget)
        for place, sequence in enumerate(scheduled):
            sequence.last_turn = (self._step, place)
        return list(scheduled.values()), admitted

    def _can_chain(self) -> bool:
        has_chains = False
        for sequence in self.running:
            if sequence.is_in_flight:
                has_chains = has_chains or sequence.can_chain
            if sequence.speculation.drafter is not None or (not sequence.is_in_flight and sequence.num_missing > 1):
                return False
        return has_chains and not (self.waiting and len(self.running) < self._max_running)

    def _schedule_chained(self) -> list[Scheduled]:
        scheduled = []
        for sequence in self.running:
            if sequence.is_in_flight and not sequence.can_chain:
                continue
            is_chained = sequence.is_in_flight
            if not self.blocks.grow(sequence.block_ids, sequence.length + is_chained):
                self.is_short = True
                return []
            scheduled.append(Scheduled(sequence, 1, 0, True, is_chained))
        return scheduled

    def _continue_running(self, scheduled: dict[TargetSequence, Scheduled], budget: int) -> int:
        candidates = self._candidates()
        num_verified_left = -(-candidates.num_speculating // candidates.num_groups)
        for _, _, _, sequence, num_drafts, gathers_with in sorted(candidates.ready):
            if gathers_with in candidates.waiting:
                continue
            if num_drafts:
                if num_verified_left == 0:
                    continue
                num_verified_left -= 1
            # A sequence that came before may have preempted this one to make room.
            if sequence not in self.running:
                continue
            part = self._fit(sequence, budget, num_drafts or _num_drafts(sequence))
            if part is None:
                continue
            num_tokens = part.num_new + part.num_drafts
            if not self.blocks.grow(sequence.block_ids, sequence.num_computed + num_tokens):
                victims = self._make_room(part)
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
        num_speculating = 0
        ready_drafters: list[LinkKey] = []  # for each sequence that could take part
        missing_drafters: list[LinkKey] = []  # for each that should wait for a proposal, or whose step is in flight
        for place, sequence in enumerate(self.running):
            length = len(sequence.token_ids)
            speculation = sequence.speculation
            state = speculation.state
            # A drafter that cannot help any more counts for none, nor does one for the first token.
            can_speculate = state is not JOINING and length + 1 < sequence.length_limit
            drafter = speculation.drafter if can_speculate else None
            num_speculating += drafter is not None
            if sequence.num_in_flight:
                # Who goes on without a late drafter is not waited for either.
                if drafter is not None and state is not LATE:
                    missing_drafters.append(drafter)
                continue
            num_drafts, is_prompt = 0, length - sequence.num_computed > 1
            if drafter is not None and not is_prompt:
                if state is READY:
                    num_drafts = len(speculation.drafts.token_ids)
                    if num_drafts > (most := sequence.num_wanted_drafts):
                        num_drafts = most
                elif state is WAITING:
                    missing_drafters.append(drafter)
                    continue
            if (gathers_with := sequence.gathers_with) is not None:
                ready_drafters.append(gathers_with)
            is_last = is_prompt and self._step - sequence.last_turn[0] <= MAX_STEPS_LEFT_OUT
            ready.append((is_last, sequence.last_turn, place, sequence, num_drafts, gathers_with))
        # With many of them, two halves: while the target verifies one, the drafter works for the other.
        num_groups = 1 if num_speculating < self._split_from else 2
        waiting: set[LinkKey] = set()
        if self._gathering is not None:
            waiting = self._gathering.waiting(Counter(ready_drafters), Counter(missing_drafters), num_groups=num_groups)
        return _Candidates(ready, num_speculating, num_groups, waiting)

    def _admit_waiting(self, scheduled: dict[TargetSequence, Scheduled], budget: int) -> list[TargetSequence]:
        admitted = []
        while self.waiting and len(self.running) < self._max_running:
            sequence = self.waiting[0]
            part = self._fit(sequence, budget, _num_drafts(sequence))
            # All of it must fit: a sequence that is admitted only to be preempted helps nobody.
            if part is None or not self.blocks.grow(sequence.block_ids, sequence.length + _num_drafts(sequence)):
                break
            self.waiting.popleft()
            self.running[sequence] = None
            scheduled[sequence] = part
            budget -= part.num_tokens
            if sequence.num_preemptions == 0:
                admitted.append(sequence)
            elif sequence.trace is not None:
                sequence.trace.resumed()
        return admitted

    def _fit(self, sequence: TargetSequence, budget: int, num_drafts: int) -> Scheduled | None:
        """The sequence's part of a step with `budget` tokens left; None when there is no room for any."""
        num_missing = len(sequence.token_ids) - sequence.num_computed
        is_waiting = sequence.speculation.state is WAITING
        if num_missing == 1 and num_drafts < budget and not is_waiting:
            return Scheduled(sequence, 1, num_drafts, True)
        # A preempted sequence may be computed anew while its drafter works, but not past the point where it would
        # sample without the proposal that it is waiting for.
        num_ready = num_missing - 1 if is_waiting else num_missing
        num_new = min(num_ready, budget)
        is_sampled = num_new == num_missing
        if is_sampled and num_new + num_drafts > budget:
            # A proposal is verified whole, if need be in the next step, where this sequence goes first: which tokens a
            # seed gives must not depend on the company.
            num_new -= 1
            is_sampled = False
        if num_new == 0:
            return None
        return Scheduled(sequence, num_new, num_drafts if is_sampled else 0, is_sampled)

    def _make_room(self, part: Scheduled) -> list[TargetSequence] | None:
        """Give the part its blocks, preempting those that came last for it; returns them.

        The sequence itself is among them when the older ones hold what is missing. The oldest of all always gets its
        blocks, as the whole cache is enough for one sequence of the greatest length: it ends, and then the next oldest.
        None, and `is_short`, where steps in flight have to come back first.
        """
        sequence = part.sequence
        victims: list[TargetSequence] = []
        while not self.blocks.grow(sequence.block_ids, sequence.num_computed + part.num_tokens):
            if any(running.is_in_flight for running in self.running):
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
        del self.running[sequence]
        self.blocks.free(sequence.block_ids)
        if sequence.trace is not None:
            sequence.trace.preempted(sequence.num_computed, sequence.length)
        sequence.num_computed = 0
        self.waiting.appendleft(sequence)


def _num_drafts(sequence: TargetSequence) -> int:
    """Draft tokens at hand that a step could verify."""
    speculation = sequence.speculation
    return min(len(speculation.drafts.token_ids), sequence.num_wanted_drafts) if speculation.state is READY else 0
