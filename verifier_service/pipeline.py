"""Steps in flight: while the device works on one, the next is prepared and waits behind it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from verifier_service.decode_graph import MAX_STEPS_IN_FLIGHT
from verifier_service.scheduler import Scheduled
from verifier_service.sequence_trace import Step
from verifier_service.target import Target
from verifier_service.verify import Launched, Verified, launch


@dataclass(frozen=True)
class Finished:
    """A step that has come back: with its results, or with what went wrong."""

    step: Step
    results: Sequence[Verified | None]
    error: Exception | None = None


class Pipeline:
    """At most `MAX_STEPS_IN_FLIGHT` steps. Belongs to the engine's thread.

    The device takes them in the order of their launch, so a block that one step's sequence gives back may be given to
    the next step's at once, and a plain sequence may be in both: what the first samples is the second's input.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._launched: deque[tuple[Sequence[Scheduled], Launched, int, float]] = deque()
        self._last_end_ns = 0

    def __len__(self) -> int:
        return len(self._launched)

    @property
    def is_full(self) -> bool:
        """Whether a step has to be collected before the next can be launched."""
        return len(self._launched) >= MAX_STEPS_IN_FLIGHT

    @property
    def num_sequences(self) -> int:
        """Sequences in flight."""
        return len({part.sequence for batch, *_ in self._launched for part in batch})

    @property
    def is_oldest_done(self) -> bool:
        """Whether `collect` would not wait."""
        return self._launched[0][1].is_done

    def launch(self, batch: Sequence[Scheduled], *, schedule_seconds: float) -> bool:
        """Begin a step that took so long to choose; False, and nothing done, for one that no graph holds.

        Raises what the device raises.
        """
        start_ns = time.time_ns()
        launched = launch(self._target, batch)
        if launched is None:
            return False
        is_plain = not any(part.num_drafts for part in batch)
        for part in batch:
            part.sequence.num_in_flight += 1
            part.sequence.was_launched_plainly = is_plain
        self._launched.append((batch, launched, start_ns, schedule_seconds))
        return True

    def collect(self) -> Finished:
        """Wait for the oldest step."""
        batch, launched, start_ns, schedule_seconds = self._launched.popleft()
        for part in batch:
            part.sequence.num_in_flight -= 1
        # A step that stood behind another began when that one ended.
        start_ns = max(start_ns, self._last_end_ns)
        try:
            results = launched.collect()
        except Exception as error:
            return Finished(Step(batch, start_ns, time.time_ns()), (), error)
        self._last_end_ns = time.time_ns()
        return Finished(Step(batch, start_ns, self._last_end_ns, schedule_seconds=schedule_seconds), results)
