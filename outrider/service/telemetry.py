"""Tracing: set-up from the standard OTEL_* variables, and trace context on long-lived streams."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_NAMESPACE, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter
from opentelemetry.sdk.trace.sampling import Sampler
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from outrider.service.exporter_choice import chosen_exporter

_PROPAGATOR = TraceContextTextMapPropagator()
_SAMPLERS = {
    "always_on",
    "always_off",
    "traceidratio",
    "parentbased_always_on",
    "parentbased_always_off",
    "parentbased_traceidratio",
}


@dataclass(frozen=True)
class Telemetry:
    """A service's tracer. `is_enabled` is false when nothing listens: callers then skip the making of spans."""

    tracer: trace.Tracer = field(default_factory=trace.NoOpTracer)
    is_enabled: bool = False
    _provider: TracerProvider | None = None

    @classmethod
    def from_environment(
        cls,
        service: str,
        environment: Mapping[str, str] | None = None,
        *,
        wrap_sampler: Callable[[Sampler], Sampler] | None = None,
    ) -> Telemetry:
        """The telemetry that OTEL_* variables ask for: none unless OTEL_TRACES_EXPORTER or an OTLP endpoint is set.

        Raises ValueError for an exporter, protocol or sampler that is not supported.
        """
        environment = os.environ if environment is None else environment
        exporter = _exporter(environment)
        if exporter is None:
            return cls()
        _check_sampler(environment)
        provider = TracerProvider(resource=service_resource(service))
        if wrap_sampler is not None:
            provider.sampler = wrap_sampler(provider.sampler)
        provider.add_span_processor(BatchSpanProcessor(exporter))
        return cls.from_provider(provider)

    @classmethod
    def from_provider(cls, provider: TracerProvider) -> Telemetry:
        """Telemetry over a provider of the caller's own making."""
        return cls(tracer=provider.get_tracer("outrider"), is_enabled=True, _provider=provider)

    def shutdown(self) -> None:
        """Export what is still buffered and stop."""
        if self._provider is not None:
            self._provider.shutdown()


def traceparent_of(span: trace.Span) -> str:
    """The W3C `traceparent` of a span, empty when the span is not part of a trace."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, context=trace.set_span_in_context(span))
    return carrier.get("traceparent", "")


def context_of(traceparent: str) -> Context | None:
    """The trace context that a `traceparent` names; None when it is empty or malformed."""
    if not traceparent:
        return None
    context = _PROPAGATOR.extract({"traceparent": traceparent}, context=Context())
    return context if trace.get_current_span(context).get_span_context().is_valid else None


def is_sampled(traceparent: str) -> bool:
    """Whether a `traceparent` says that its trace is recorded: nothing is made for any other, not even a context."""
    flags = traceparent[53:55]
    try:
        return len(traceparent) >= 55 and bool(int(flags, 16) & 1) and context_of(traceparent) is not None
    except ValueError:
        return False


def service_resource(service: str) -> Resource:
    """What all signals of a service say about where they come from."""
    defaults = {SERVICE_NAME: f"outrider-{service}", SERVICE_NAMESPACE: "outrider"}
    # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES are the operator's word and win over ours.
    detected = {
        key: value
        for key, value in Resource.create().attributes.items()
        # What the SDK puts where nobody said anything: the prefix, and the program's name.
        if key != SERVICE_NAME or not str(value).startswith("unknown_service")
    }
    return Resource({**defaults, **detected})


def _check_sampler(environment: Mapping[str, str]) -> None:
    # The SDK traces everything where it does not understand what the operator wrote.
    name = environment.get("OTEL_TRACES_SAMPLER", "parentbased_always_on").strip().lower()
    if name not in _SAMPLERS:
        raise ValueError(f"OTEL_TRACES_SAMPLER: {name!r} is none of {', '.join(sorted(_SAMPLERS))}")
    ratio = environment.get("OTEL_TRACES_SAMPLER_ARG", "")
    if ratio and name.endswith("ratio"):
        try:
            is_ratio = 0 <= float(ratio) <= 1
        except ValueError:
            is_ratio = False
        if not is_ratio:
            raise ValueError(f"OTEL_TRACES_SAMPLER_ARG: {ratio!r} is no ratio from 0 to 1")


def _exporter(environment: Mapping[str, str]) -> SpanExporter | None:
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    match chosen_exporter(environment, "TRACES"):
        case "none":
            return None
        case "console":
            return ConsoleSpanExporter()
        case "otlp":
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

            return OTLPSpanExporter()
