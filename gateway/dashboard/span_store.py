"""The spans of the last traces, in memory, as the services send them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_TRACES = 64
# Of one trace; what comes on top is counted and dropped.
MAX_SPANS = 2048


@dataclass(frozen=True)
class SpanEvent:
    """A moment of a span; seconds since the epoch."""

    name: str
    time: float
    attributes: Mapping[str, Any]


@dataclass(frozen=True)
class Span:
    """One span; times in seconds since the epoch."""

    service: str
    name: str
    span_id: str
    parent_id: str
    start: float
    end: float
    attributes: Mapping[str, Any]
    events: tuple[SpanEvent, ...] = ()
    error: str = ""


@dataclass
class Trace:
    """Spans of one trace, in the order in which they arrived."""

    trace_id: str
    spans: list[Span] = field(default_factory=list)
    num_dropped: int = 0

    @property
    def root(self) -> Span | None:
        """The gateway's span of the request; None as long as it has not ended."""
        return next((span for span in self.spans if "gen_ai.operation.name" in span.attributes), None)


class SpanStore:
    """The last traces; the one that heard least lately is the first to go."""

    def __init__(self, max_traces: int = MAX_TRACES, max_spans: int = MAX_SPANS) -> None:
        self._max_traces = max_traces
        self._max_spans = max_spans
        self._traces: OrderedDict[str, Trace] = OrderedDict()

    def add(self, resource_spans: Iterable[Any]) -> None:
        """Take in the `resource_spans` of an OTLP request."""
        for resource in resource_spans:
            service = _attributes(resource.resource.attributes).get("service.name", "")
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self._add(span.trace_id.hex(), str(service), span)

    def traces(self) -> list[Trace]:
        """All traces, the newest first."""
        return list(reversed(self._traces.values()))

    def get(self, trace_id: str) -> Trace | None:
        """One trace, if it is still here."""
        return self._traces.get(trace_id)

    def of_request(self, request_id: str) -> Trace | None:
        """The trace of a request, once the request has ended and its span has arrived."""
        for trace in self.traces():
            if trace.root is not None and trace.root.attributes.get("gen_ai.response.id") == request_id:
                return trace
        return None

    def _add(self, trace_id: str, service: str, span: Any) -> None:
        trace = self._traces.setdefault(trace_id, Trace(trace_id))
        self._traces.move_to_end(trace_id)
        if len(trace.spans) >= self._max_spans:
            trace.num_dropped += 1
        else:
            trace.spans.append(_span(service, span))
        while len(self._traces) > self._max_traces:
            self._traces.popitem(last=False)


def _span(service: str, span: Any) -> Span:
    return Span(
        service=service,
        name=span.name,
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start=span.start_time_unix_nano * 1e-9,
        end=span.end_time_unix_nano * 1e-9,
        attributes=_attributes(span.attributes),
        events=tuple(
            SpanEvent(event.name, event.time_unix_nano * 1e-9, _attributes(event.attributes)) for event in span.events
        ),
        error=(span.status.message or "error") if span.status.code == span.status.STATUS_CODE_ERROR else "",
    )


def _attributes(items: Iterable[Any]) -> dict[str, Any]:
    return {item.key: _value(item.value) for item in items}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind) if kind in ("string_value", "bool_value", "int_value", "double_value") else None
