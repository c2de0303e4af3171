"""CPU time of the one thread that does everything, by the stage that it was spent in."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Stopwatch:
    """CPU time of the thread by stage, without what is excluded."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)
        self._excluded = 0.0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count what happens here."""
        start, excluded = time.thread_time(), self._excluded
        yield
        self.seconds[name].append(time.thread_time() - start - (self._excluded - excluded))

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Do not count it, whatever stage it belongs to."""
        start = time.thread_time()
        yield
        self._excluded += time.thread_time() - start

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, counted as a stage."""

        def call(*arguments: Any, **options: Any) -> Any:
            with self.stage(name):
                return function(*arguments, **options)

        return call

    def microseconds(self, name: str) -> float:
        """The median of a stage."""
        return 1e6 * statistics.median(self.seconds[name])
