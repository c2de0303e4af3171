"""How many requests start a trace of their own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
from opentelemetry.trace import Link, SpanKind, get_current_span
from opentelemetry.trace.span import TraceState
from opentelemetry.util.types import Attributes

# An attribute that requests carry which somebody watches: they are traced whatever the rate.
WATCHED = "outrider.is_watched"


def limited(rate: float | None) -> Callable[[Sampler], Sampler]:
    """What puts the limit on a sampler; None: no limit."""
    return lambda inner: inner if rate is None else RateLimitedSampler(inner, rate)


class RateLimitedSampler(Sampler):
    """What another sampler would keep, but of requests that begin a trace no more than `rate` a second.

    A request that comes with a trace of its own is left to the other sampler: its caller has decided already.
    """

    def __init__(self, inner: Sampler, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._inner = inner
        self._rate = rate
        self._clock = clock
        # At least one, so that a rate below one a second lets a request through now and then.
        self._most = max(1.0, rate)
        self._left = self._most
        self._refilled = clock()

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        """The other sampler's decision, or to drop."""
        if attributes and attributes.get(WATCHED):
            return SamplingResult(Decision.RECORD_AND_SAMPLE, attributes, trace_state)
        result = self._inner.should_sample(parent_context, trace_id, name, kind, attributes, links, trace_state)
        has_parent = get_current_span(parent_context).get_span_context().is_valid
        if has_parent or result.decision is not Decision.RECORD_AND_SAMPLE or self._take():
            return result
        return SamplingResult(Decision.DROP, trace_state=trace_state)

    def get_description(self) -> str:
        """For the SDK's own logs."""
        return f"RateLimited{{{self._rate}/s, {self._inner.get_description()}}}"

    def _take(self) -> bool:
        now = self._clock()
        self._left = min(self._most, self._left + (now - self._refilled) * self._rate)
        self._refilled = now
        if self._left < 1:
            return False
        self._left -= 1
        return True
