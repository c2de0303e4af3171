"""The cost of tracing is measured over engines that speculate, and over spans that are made."""

from __future__ import annotations

import statistics

from benchmarks import tracing_host
from benchmarks.tracing_host import BATCH, Cost, Pair


def _measured(ratio: float | None) -> Cost:
    return tracing_host.measure(ratio, num_cycles=20, step_spans=32)


def test_spans_are_made_where_requests_are_traced_and_only_there() -> None:
    untraced, traced = _measured(None), _measured(1.0)
    assert untraced.microseconds > 0
    assert untraced.num_spans == 0
    # A verifier's and a drafter's for each sequence and step.
    assert traced.num_spans > 2 * BATCH
    assert traced.num_bytes > 0


def test_the_engines_speculate() -> None:
    """Catches a pair that decodes plainly, as whose cost that of plain decoding would be reported."""
    pair = Pair(None, step_spans=32)
    for _ in range(10):
        pair.cycle()
    committed = [sequence.num_committed_here for sequence in pair._verifier._scheduler.running]
    # The first cycle samples the first token, each one after it two accepted and a recovered one; the shortest
    # sequences have ended and been replaced.
    assert statistics.mode(committed) == 1 + 9 * 3
    assert all(number % 3 == 1 for number in committed if number)
