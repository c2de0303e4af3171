"""Verifiers whose steps are in flight as on a GPU, whatever they run on, and come back when a test lets them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.step import Pass, PassKind, Row, Sampled
from verifier_service.executor import TargetExecutor


@dataclass
class Flights:
    """What is in flight, and what may come back; prompts do at once."""

    is_held: bool = False
    # Asked each time that somebody looks whether a pass has come back.
    may_land: Callable[[], bool] = lambda: True
    max_in_flight: int | None = None  # instead of what the executor can do
    # Called with the rows of each step, before it is submitted.
    on_submit: Callable[[Sequence[Row]], None] = lambda rows: None
    depths: list[int] = field(default_factory=list)  # passes in flight, after each submission

    def executor(self, inner: TargetExecutor) -> HeldExecutor:
        return HeldExecutor(inner, self)


class HeldPass:
    def __init__(self, inner: Pass[Sampled], executor: HeldExecutor) -> None:
        self._inner = inner
        self._executor = executor
        self.rows: Sequence[int] = inner.rows
        self.kind: PassKind = inner.kind

    @property
    def is_done(self) -> bool:
        if self.kind is not PassKind.GRAPH:
            return self._inner.is_done
        flights = self._executor.flights
        return not flights.is_held and flights.may_land() and self._inner.is_done

    def collect(self) -> Sequence[Sampled | None]:
        self._executor.num_in_flight -= 1
        return self._inner.collect()


class HeldExecutor:
    """An executor with graphs, recorded or not, whose passes come back when the test says so."""

    def __init__(self, inner: TargetExecutor, flights: Flights) -> None:
        self.inner = inner
        self.flights = flights
        self.num_in_flight = 0

    @property
    def max_in_flight(self) -> int:
        return self.flights.max_in_flight or self.inner.max_in_flight

    def can_overlap(self, row: Row) -> bool:
        return self.inner.can_overlap(row)

    def submit(self, rows: Sequence[Row]) -> Sequence[Pass[Sampled]]:
        self.flights.on_submit(rows)
        passes = [HeldPass(one, self) for one in self.inner.submit(rows)]
        self.num_in_flight += len(passes)
        self.flights.depths.append(self.num_in_flight)
        return passes
