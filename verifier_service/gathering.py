"""Keeping the sequences of a drafter together while there are few of them.

A step over a few sequences takes as long as one over a single sequence: reading the weights is all that counts. So two
groups of sequences that take turns, each verified while the other is drafted, need two steps where one would do. A
sequence whose proposal has come therefore waits for those of the same drafter that are still on their way, though not
much longer than their way usually takes.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable

from verifier_service.sequence import LinkKey, TargetSequence

# In units of the usual time from a step's beginning to the proposals that answer it.
PATIENCE = 1.5
MAX_PATIENCE_SECONDS = 0.05
# The weight of the newest measurement in the mean.
_WEIGHT = 0.1


class Gathering:
    """Holds sequences back until all of their drafter can take part in a step. Times are monotonic, in seconds."""

    def __init__(self) -> None:
        self._usual_seconds = MAX_PATIENCE_SECONDS / PATIENCE
        self._since: dict[LinkKey, float] = {}

    def began(self, sequences: Iterable[TargetSequence]) -> None:
        """A step over these sequences was begun."""
        now = time.monotonic()
        for sequence in sequences:
            sequence.step_began = now
            if sequence.drafter is not None:
                self._since.pop(sequence.drafter, None)

    def answered(self, sequence: TargetSequence) -> None:
        """A proposal for the sequence has come."""
        if sequence.step_began is not None:
            self._usual_seconds += _WEIGHT * (time.monotonic() - sequence.step_began - self._usual_seconds)
            sequence.step_began = None

    def held_back(self, ready: Collection[TargetSequence], running: Iterable[TargetSequence]) -> set[TargetSequence]:
        """Of the sequences with proposals, those that should wait for others of the same drafter."""
        ready = set(ready)
        missing = {
            sequence.drafter
            for sequence in running
            if sequence.is_speculating
            and sequence not in ready
            and (sequence.is_in_flight or (sequence.is_waiting_for_proposal and sequence.num_missing == 1))
        }
        now = time.monotonic()
        held = set()
        for sequence in ready:
            if sequence.drafter is None or sequence.drafter not in missing:
                continue
            since = self._since.setdefault(sequence.drafter, now)
            if now - since < self._patience:
                held.add(sequence)
        return held

    def time_left(self) -> float | None:
        """Seconds until those that are held back have waited long enough; None where nothing is."""
        now = time.monotonic()
        left = [since + self._patience - now for since in self._since.values()]
        left = [seconds for seconds in left if seconds > 0]
        return min(left) if left else None

    @property
    def _patience(self) -> float:
        return min(PATIENCE * self._usual_seconds, MAX_PATIENCE_SECONDS)
