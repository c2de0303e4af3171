"""How many requests begin a trace of their own."""

from __future__ import annotations

from opentelemetry.context import Context
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, DEFAULT_ON, Sampler
from opentelemetry.util.types import Attributes

from gateway.trace_sampler import WATCHED, RateLimitedSampler, limited
from outrider.service.telemetry import context_of

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def samples(sampler: Sampler, context: Context | None = None, attributes: Attributes = None) -> bool:
    decision = sampler.should_sample(context, 1, "x", attributes=attributes).decision
    return bool(decision.is_sampled())  # type: ignore[no-untyped-call]


def test_no_more_than_the_rate() -> None:
    clock = Clock()
    sampler = RateLimitedSampler(ALWAYS_ON, 2.0, clock)
    assert [samples(sampler) for _ in range(4)] == [True, True, False, False]
    clock.now = 0.5
    assert [samples(sampler) for _ in range(2)] == [True, False]
    clock.now = 100.0
    assert [samples(sampler) for _ in range(3)] == [True, True, False]


def test_a_rate_below_one() -> None:
    clock = Clock()
    sampler = RateLimitedSampler(ALWAYS_ON, 0.1, clock)
    assert [samples(sampler) for _ in range(2)] == [True, False]
    clock.now = 9.0
    assert not samples(sampler)
    clock.now = 10.5
    assert samples(sampler)


def test_callers_and_watchers_have_decided_already() -> None:
    sampler = RateLimitedSampler(DEFAULT_ON, 0.001, Clock())
    assert samples(sampler)
    assert not samples(sampler)
    assert samples(sampler, context_of(PARENT + "01"))
    assert not samples(sampler, context_of(PARENT + "00"))
    assert samples(sampler, attributes={WATCHED: True})
    assert not samples(RateLimitedSampler(ALWAYS_OFF, 5, Clock()))


def test_no_limit_changes_nothing() -> None:
    assert limited(None)(ALWAYS_OFF) is ALWAYS_OFF
