"""Which sequences take part in a step, and with how many tokens: continuous batching with chunked prefill.

Sources: Orca (Yu et al., OSDI 2022) for iteration-level scheduling, Sarathi (Agrawal et al., arXiv 2308.16369) for
chunks of prompts beside decoding, PagedAttention (Kwon et al., arXiv 2309.06180) for preemption by recomputing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from engine.block_manager import BlockManager
from verifier_service.sequence import TargetSequence


@dataclass(frozen=True)
class Scheduled:
    """A sequence's part of a step: `num_new` tokens that are committed but not computed, then `num_drafts` drafts.

    A step that reaches the sequence's end samples there and commits tokens; an inner chunk of a prompt does not.
    """

    sequence: TargetSequence
    num_new: int
    num_drafts: int
    is_sampled: bool


class Scheduler:
    """Sequences that wait and that run. Belongs to the engine's thread."""

    def __init__(self, blocks: BlockManager, *, max_running: int, max_num_batched_tokens: int) -> None:
        self._blocks = blocks
        self._max_running = max_running
        self._max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[TargetSequence] = deque()
        # In order of admission, which decides who is preempted: the last one in.
        self.running: dict[TargetSequence, None] = {}
        self.num_preemptions = 0
        self._step = 0

    def add(self, sequence: TargetSequence) -> None:
        """Queue a new sequence."""
        self.waiting.append(sequence)

    def remove(self, sequence: TargetSequence) -> None:
        """Forget a sequence and free its blocks."""
        if sequence in self.running:
            del self.running[sequence]
        else:
            self.waiting.remove(sequence)
        self._blocks.free(sequence.block_ids)

    def schedule(self) -> tuple[list[Scheduled], list[TargetSequence]]:
        """The next step: (its parts, the sequences in it that run for the first time)."""
        self._step += 1
        budget = self._max_num_batched_tokens
        scheduled: dict[TargetSequence, Scheduled] = {}
        # Whoever has waited longest goes first, so that a budget that is too small for all starves nobody.
        ready = sorted(
            (s for s in self.running if s.num_missing > 1 or not s.is_waiting_for_proposal), key=lambda s: s.last_step
        )
        for sequence in ready:
            # A sequence that came before may have preempted this one to make room.
            if budget == 0 or sequence not in self.running:
                continue
            part = self._fit(sequence, budget)
            if self._make_room(part, scheduled):
                scheduled[sequence] = part
                budget -= part.num_new + part.num_drafts
        admitted = []
        while self.waiting and len(self.running) < self._max_running and budget > 0:
            sequence = self.waiting[0]
            # All of it must fit: a sequence that is admitted only to be preempted helps nobody.
            if not self._blocks.grow(sequence.block_ids, sequence.length):
                break
            self.waiting.popleft()
            self.running[sequence] = None
            scheduled[sequence] = part = self._fit(sequence, budget)
            budget -= part.num_new + part.num_drafts
            if sequence.num_preemptions == 0:
                admitted.append(sequence)
        for sequence in scheduled:
            sequence.last_step = self._step
        return list(scheduled.values()), admitted

    def _fit(self, sequence: TargetSequence, budget: int) -> Scheduled:
        # A preempted sequence may be computed anew while its drafter works, but not past the point where it would
        # sample without the proposal that it is waiting for.
        num_ready = sequence.num_missing - 1 if sequence.is_waiting_for_proposal else sequence.num_missing
        num_new = min(num_ready, budget)
        is_sampled = num_new == sequence.num_missing
        num_drafts = 0
        if is_sampled and sequence.is_speculating:
            num_drafts = min(len(sequence.proposals), sequence.num_wanted_drafts, budget - num_new)
        return Scheduled(sequence, num_new, num_drafts, is_sampled)

    def _make_room(self, part: Scheduled, scheduled: dict[TargetSequence, Scheduled]) -> bool:
        sequence = part.sequence
        needed = sequence.num_computed + part.num_new + part.num_drafts
        while not self._blocks.grow(sequence.block_ids, needed):
            victim = next(s for s in reversed(self.running) if s not in scheduled)
            self._preempt(victim)
            if victim is sequence:
                # Older sequences hold what is missing. The oldest of all is never here: the whole cache is enough for
                # one sequence of the greatest length.
                return False
        return True

    def _preempt(self, sequence: TargetSequence) -> None:
        self.num_preemptions += 1
        sequence.num_preemptions += 1
        del self.running[sequence]
        self._blocks.free(sequence.block_ids)
        sequence.num_computed = 0
        self.waiting.appendleft(sequence)
