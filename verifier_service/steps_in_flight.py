"""Steps that were submitted and have not come back: while the device works on one, the next is prepared behind it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from engine.step import Executor, Pass, Row, Sampled
from verifier_service.step import Scheduled, Step


@dataclass(frozen=True)
class Collected:
    """A pass that has come back: with what it sampled for each of its parts, or with what went wrong."""

    step: Step
    sampled: Sequence[Sampled | None]
    error: Exception | None = None


@dataclass(frozen=True)
class _InFlight:
    batch: Sequence[Scheduled]  # of the pass
    device_pass: Pass[Sampled]
    start_ns: int
    schedule_seconds: float


class StepsInFlight:
    """Belongs to the engine's thread.

    The device takes steps in the order of their submission, so a block that one step's sequence gives back may be given
    to the next step's at once, and a sequence may be in several: what the first samples is the second's input.
    """

    def __init__(self, executor: Executor[Row, Sampled]) -> None:
        self._executor = executor
        self._steps: deque[deque[_InFlight]] = deque()  # each with those of its passes that have not come back
        self._last_end_ns = 0
        self._num_prefill_tokens_ahead = 0

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def is_full(self) -> bool:
        """Whether a step has to be collected before the next can be submitted."""
        return len(self._steps) >= self._executor.max_in_flight

    @property
    def num_sequences(self) -> int:
        """Sequences in flight."""
        return len({part.sequence for passes in self._steps for one in passes for part in one.batch})

    @property
    def is_next_done(self) -> bool:
        """Whether `collect` would not wait."""
        return self._steps[0][0].device_pass.is_done

    def submit(self, batch: Sequence[Scheduled], *, schedule_seconds: float) -> None:
        """Begin a step that took so long to choose."""
        start_ns = time.time_ns()
        for part in batch:
            sequence = part.sequence
            sequence.num_in_flight += 1
            sequence.num_computed += part.num_new
            if part.is_sampled:
                sequence.num_unknown += part.num_drafts + 1
        passes = self._executor.submit([part.row for part in batch])
        self._steps.append(
            deque(_InFlight([batch[row] for row in one.rows], one, start_ns, schedule_seconds) for one in passes)
        )

    def collect(self) -> Collected:
        """Wait for the next pass."""
        flight = self._steps[0].popleft()
        if not self._steps[0]:
            self._steps.popleft()
        for part in flight.batch:
            part.sequence.num_in_flight -= 1
            if part.is_sampled:
                part.sequence.num_unknown -= part.num_drafts + 1
        sampled: Sequence[Sampled | None] = ()
        found_error = None
        try:
            sampled = flight.device_pass.collect()
        except Exception as error:
            found_error = error
        # What stood behind another pass began when that one ended.
        start_ns, end_ns = max(flight.start_ns, self._last_end_ns), time.time_ns()
        step = Step(
            flight.batch,
            flight.device_pass.kind,
            start_ns,
            end_ns,
            schedule_seconds=flight.schedule_seconds,
            num_prefill_tokens_ahead=self._num_prefill_tokens_ahead,
        )
        self._last_end_ns, self._num_prefill_tokens_ahead = end_ns, step.num_prefill_tokens
        return Collected(step, sampled, found_error)
