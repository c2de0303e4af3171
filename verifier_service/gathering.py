"""Keeping the sequences of a drafter together in as few steps as possible.

A step over a few sequences takes nearly as long as one over a single sequence, as reading the weights is most of it.
With few sequences all should be verified at once; with many of them in two halves, each verified while the other is
drafted. Left alone they fall apart into smaller and smaller groups. A sequence that could take part in a step therefore
waits for others of the same drafter that are still on their way, though not much longer than their way usually takes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from verifier_service.sequence import TargetSequence
from verifier_service.speculation import LinkKey

# In units of the usual time from a step's beginning to the drafts that answer it.
PATIENCE = 1.5
MAX_PATIENCE_SECONDS = 0.05
# The part of an equal share that makes a half. Halves are seldom equal, as sequences end: the smaller one must not wait
# for the other, or the device would wait with it.
_HALF_FROM = 0.75
# The weight of the newest measurement in the mean.
_WEIGHT = 0.1


class Gathering:
    """Holds sequences back until enough of their drafter's can take part in a step. Times are monotonic, in seconds."""

    def __init__(self) -> None:
        self._usual_seconds = MAX_PATIENCE_SECONDS / PATIENCE
        self._since: dict[LinkKey, float] = {}
        self._held: set[LinkKey] = set()  # as `waiting` said last

    def began(self, sequences: Iterable[TargetSequence]) -> None:
        """A step over these sequences was begun."""
        now = time.monotonic()
        for sequence in sequences:
            sequence.step_began = now
            # A step of those who wait for nobody would let the others wait anew.
            if (drafter := sequence.gathers_with) is not None:
                self._since.pop(drafter, None)

    def answered(self, sequence: TargetSequence, now: float) -> None:
        """Drafts for the sequence have come."""
        if sequence.step_began is not None:
            self._usual_seconds += _WEIGHT * (now - sequence.step_began - self._usual_seconds)
            sequence.step_began = None

    def waiting(
        self, num_ready: Mapping[LinkKey, int], num_missing: Mapping[LinkKey, int], *, num_groups: int
    ) -> set[LinkKey]:
        """The drafters whose sequences should wait with the drafts that they have.

        By drafter: how many sequences could take part in a step, and how many others may soon. Of one group all come
        together; of `num_groups` nobody waits once most of an equal share is there.
        """
        now = time.monotonic()
        part = _HALF_FROM / num_groups if num_groups > 1 else 1.0
        waiting = set()
        self._since = {drafter: since for drafter, since in self._since.items() if drafter in num_ready}
        for drafter, number in num_ready.items():
            enough = part * (number + num_missing.get(drafter, 0))
            if number < enough and now - self._since.setdefault(drafter, now) < self._patience:
                waiting.add(drafter)
        self._held = waiting
        return waiting

    def time_left(self) -> float | None:
        """Seconds until those that were held back last have waited long enough; None where nothing was."""
        since = [self._since[drafter] for drafter in self._held if drafter in self._since]
        if not since:
            return None
        # A clock's tick above zero: the time may have come since they were held back.
        return max(min(since) + self._patience - time.monotonic(), 0.001)

    @property
    def _patience(self) -> float:
        return min(PATIENCE * self._usual_seconds, MAX_PATIENCE_SECONDS)
