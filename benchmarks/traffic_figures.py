"""What is reported of a run of traffic: latencies, throughput, goodput, and why a run says nothing if it does not."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.traffic_sender import FINISHED, REFUSED, UNFINISHED, Outcome, SenderRun

# A plain run's reason to do without a drafter.
_ASKED_FOR = "CLIENT_DISABLED"


@dataclass(frozen=True)
class Limits:
    """What a request has to keep to in order to count as good, and the sender to be believed; milliseconds."""

    first_token_ms: float = 1000.0
    token_ms: float = 25.0  # per output token behind the first
    lag_ms: float = 20.0  # of the sender, at the 99th percentile

    def is_good(self, one: Outcome) -> bool:
        """Whether a request has finished within both limits."""
        if one.status != FINISHED or one.first_token_seconds is None:
            return False
        is_in_time = 1e3 * one.first_token_seconds <= self.first_token_ms
        return is_in_time and 1e3 * (one.token_seconds or 0.0) <= self.token_ms


def figures_of(
    run: SenderRun, *, start: float, end: float, num_draft_tokens: int | None, limits: Limits
) -> dict[str, Any]:
    """The figures of the requests that were due between `start` and `end`, and of the tokens that came then; seconds.

    Latencies count from the moment at which a request was to be sent, so that a late sender cannot flatter them.
    """
    seconds = end - start
    outcomes = [one for one in run.outcomes if start <= one.due < end]
    finished = [one for one in outcomes if one.status == FINISHED]
    statuses = Counter(one.status for one in outcomes)
    failures = {name: count for name, count in statuses.items() if name not in (FINISHED, REFUSED, UNFINISHED)}
    # The first token falls to the prompt's own forward pass, which verifies no drafts.
    num_decode_steps = sum(one.num_steps - 1 for one in finished)
    num_drafted = sum(one.num_drafted for one in finished)
    result = {
        "window_seconds": seconds,
        "num_offered": len(outcomes),
        "num_finished": len(finished),
        "num_refused": statuses[REFUSED],
        "num_failed": sum(failures.values()),
        "num_unfinished": statuses[UNFINISHED],
        "failures": failures,
        "num_special": sum(bool(one.planned.special) for one in outcomes),
        "offered_per_second": len(outcomes) / seconds,
        "goodput_per_second": sum(map(limits.is_good, outcomes)) / seconds,
        "tokens_per_second": run.tokens_between(start, end) / seconds,
        **_percentiles("first_token", [one.first_token_seconds for one in outcomes]),
        **_percentiles("token", [one.token_seconds for one in finished]),
        "acceptance_length": sum(one.num_tokens - 1 for one in finished) / num_decode_steps
        if num_decode_steps
        else None,
        "acceptance_rate": sum(one.num_accepted for one in finished) / num_drafted if num_drafted else None,
        "num_drafted_tokens": num_drafted,
        "fallbacks": dict(Counter(reason for one in finished for reason in one.fallbacks if reason != _ASKED_FOR)),
        **_percentiles("send_lag", run.send_lags),
        **_percentiles("loop_lag", run.loop_lags),
    }
    return {**result, "void": why_void(result, num_draft_tokens, limits)}


def why_void(result: dict[str, Any], num_draft_tokens: int | None, limits: Limits) -> str | None:
    """Why a run says nothing about what it was to measure; None where it does."""
    for name in ("send_lag", "loop_lag"):
        lag = result[f"{name}_p99_ms"]
        if lag is not None and lag > limits.lag_ms:
            return f"the generator was late: {name} of {lag:.1f} ms at the 99th percentile"
    if not result["num_finished"]:
        return "no request was finished"
    if num_draft_tokens is None:
        return "there were drafts in a plain run" if result["num_drafted_tokens"] else None
    return None if result["num_drafted_tokens"] else f"nothing was drafted: {result['fallbacks'] or 'no reason given'}"


def _percentiles(name: str, seconds: Sequence[float | None]) -> dict[str, float | None]:
    """Median and 99th percentile in milliseconds; None where there is nothing to take them of."""
    known = [1e3 * value for value in seconds if value is not None]
    if not known:
        return {f"{name}_p50_ms": None, f"{name}_p99_ms": None}
    cuts = statistics.quantiles(known, n=100, method="inclusive") if len(known) > 1 else known * 99
    return {f"{name}_p50_ms": cuts[49], f"{name}_p99_ms": cuts[98]}
