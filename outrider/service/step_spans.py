"""Spans of a request's steps, kept affordable: the first ones each on its own, later ones folded together.

A span is a record of plain values until the event loop hands it to OpenTelemetry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Value = str | bool | int | float


@dataclass(frozen=True)
class SpanRecord:
    """A part of a request's work that is over; times in nanoseconds since the epoch."""

    name: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True)
class EventRecord:
    """Something that happened to a request at one moment, nanoseconds since the epoch."""

    name: str
    time_ns: int
    attributes: Mapping[str, Value] = field(default_factory=dict)


class StepSpans:
    """The steps of one request: a span each for the first `limit`, then one for every `limit` steps.

    A folded span reaches from the start of its first step to the end of its last. It has the sums of what its steps
    counted, and tells which of them was the slowest.
    """

    def __init__(self, name: str, folded_name: str, limit: int) -> None:
        self._name = name
        self._folded_name = folded_name
        self._limit = limit
        self._num_steps = 0
        self._fold: _Fold | None = None

    def add(
        self,
        start_ns: int,
        end_ns: int,
        *,
        position: int,
        sums: Mapping[str, int | float],
        alone: Mapping[str, Value] | None = None,
    ) -> SpanRecord | None:
        """Take in a step; the span that it completes, if any.

        `sums` are added up where steps are folded; `alone` says what only makes sense for a single step.
        """
        self._num_steps += 1
        if self._num_steps <= self._limit:
            attributes = {"outrider.position": position, **sums, **(alone or {})}
            return SpanRecord(self._name, start_ns, end_ns, attributes)
        if self._fold is None:
            self._fold = _Fold(start_ns, position)
        self._fold.add(start_ns, end_ns, position, sums)
        return self.flush() if self._fold.num_steps >= self._limit else None

    def flush(self) -> SpanRecord | None:
        """The span of the steps that are folded so far: the request is over."""
        fold, self._fold = self._fold, None
        return None if fold is None else fold.record(self._folded_name)


@dataclass
class _Fold:
    start_ns: int
    position: int
    end_ns: int = 0
    num_steps: int = 0
    busy_ns: int = 0
    slowest_ns: int = -1
    slowest_position: int = 0
    sums: dict[str, int | float] = field(default_factory=dict)

    def add(self, start_ns: int, end_ns: int, position: int, sums: Mapping[str, int | float]) -> None:
        self.end_ns = end_ns
        self.num_steps += 1
        self.busy_ns += end_ns - start_ns
        if end_ns - start_ns > self.slowest_ns:
            self.slowest_ns, self.slowest_position = end_ns - start_ns, position
        for key, value in sums.items():
            self.sums[key] = self.sums.get(key, 0) + value

    def record(self, name: str) -> SpanRecord:
        attributes = {
            "outrider.position": self.position,
            "outrider.num_steps": self.num_steps,
            "outrider.busy_seconds": self.busy_ns * 1e-9,
            "outrider.slowest_step_seconds": self.slowest_ns * 1e-9,
            "outrider.slowest_step_position": self.slowest_position,
            **self.sums,
        }
        return SpanRecord(name, self.start_ns, self.end_ns, attributes)
