"""Tracing as the standard variables say, and trace context as a string."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import get_current_span

from outrider.service.telemetry import Telemetry, context_of, is_sampled, traceparent_of

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4317"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4317", "OTEL_SDK_DISABLED": "true"},
    ],
)
def test_nothing_unless_asked_for(environment: dict[str, str]) -> None:
    telemetry = Telemetry.from_environment("verifier", environment)
    assert not telemetry.is_enabled
    with telemetry.tracer.start_as_current_span("x") as span:
        assert not span.is_recording()
    telemetry.shutdown()


@pytest.mark.parametrize(
    "environment",
    [
        {"OTEL_TRACES_EXPORTER": "console"},
        {"OTEL_TRACES_EXPORTER": "otlp"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4317"},
        {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://localhost:4317"},
    ],
)
def test_spans_where_somebody_listens(environment: dict[str, str]) -> None:
    telemetry = Telemetry.from_environment("verifier", environment)
    assert telemetry.is_enabled
    assert telemetry.tracer.start_span("x").is_recording()
    telemetry.shutdown()


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER"),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, "OTEL_EXPORTER_OTLP_PROTOCOL"),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_TRACES_SAMPLER": "sometimes"}, "OTEL_TRACES_SAMPLER"),
        (
            {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "1%"},
            "OTEL_TRACES_SAMPLER_ARG",
        ),
    ],
)
def test_what_is_not_supported_is_refused(environment: dict[str, str], name: str) -> None:
    """Catches an operator who waits for traces that nobody sends."""
    with pytest.raises(ValueError, match=name):
        Telemetry.from_environment("verifier", environment)


def test_the_service_name_is_ours_unless_the_operator_has_another(monkeypatch: pytest.MonkeyPatch) -> None:
    console = {"OTEL_TRACES_EXPORTER": "console"}
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    for expected in ("outrider-drafter", "theirs"):
        telemetry = Telemetry.from_environment("drafter", console)
        assert telemetry._provider is not None
        assert telemetry._provider.resource.attributes["service.name"] == expected
        assert telemetry._provider.resource.attributes["service.namespace"] == "outrider"
        telemetry.shutdown()
        monkeypatch.setenv("OTEL_SERVICE_NAME", "theirs")


def test_trace_context_there_and_back() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    telemetry = Telemetry.from_provider(provider)
    span = telemetry.tracer.start_span("outer", context=context_of(PARENT))
    inner = telemetry.tracer.start_span("inner", context=context_of(traceparent_of(span)))
    inner.end()
    span.end()
    telemetry.shutdown()
    found_inner, found_outer = exporter.get_finished_spans()
    assert found_inner.context is not None
    assert found_outer.context is not None
    assert found_inner.parent is not None
    assert found_inner.parent.span_id == found_outer.context.span_id
    assert f"{found_inner.context.trace_id:032x}" == PARENT.split("-")[1]


@pytest.mark.parametrize(
    "bad", ["", "nonsense", PARENT.replace("0af7", "0AG7"), PARENT[:-4], "00-" + "0" * 32 + "-1-1"]
)
def test_what_is_no_trace_context(bad: str) -> None:
    assert context_of(bad) is None


@pytest.mark.parametrize(
    ("traceparent", "expected"),
    [(PARENT, True), (PARENT[:-2] + "00", False), (PARENT[:-2] + "03", True), (PARENT[:-2] + "zz", False), ("", False),
     ("x" * 53 + "01", False)],
)  # fmt: skip
def test_sampled_or_not(traceparent: str, expected: bool) -> None:
    assert is_sampled(traceparent) is expected


def test_a_span_outside_a_trace_has_no_traceparent() -> None:
    assert traceparent_of(get_current_span()) == ""
