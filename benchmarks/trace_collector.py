"""A receiver of OpenTelemetry traces in this process: what the services report of themselves, without a backend."""

from __future__ import annotations

import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

_MAX_MESSAGE_BYTES = 256 << 20


@dataclass(frozen=True)
class Span:
    """One span; times in seconds since the epoch."""

    name: str
    start: float
    end: float
    attributes: dict[str, Any]

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


class TraceCollector(trace_service_pb2_grpc.TraceServiceServicer):
    """Serves OTLP over gRPC on a free port while entered, and keeps the spans by trace."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._traces: dict[bytes, list[Span]] = defaultdict(list)
        self._server = grpc.server(
            ThreadPoolExecutor(2), options=[("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES)]
        )
        add_to_server: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server  # untyped
        add_to_server(self, self._server)
        self._port = self._server.add_insecure_port("127.0.0.1:0")

    @property
    def environment(self) -> dict[str, str]:
        """What makes our services report here. Nothing is dropped or folded: the queue holds a whole wave."""
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self._port}",
            "OTEL_TRACES_EXPORTER": "otlp",
            "OTEL_BSP_MAX_QUEUE_SIZE": "200000",
            "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "4096",
            "OTEL_BSP_SCHEDULE_DELAY": "300",
            "OUTRIDER_VERIFIER_STEP_SPANS": "1000000",
            "OUTRIDER_DRAFTER_STEP_SPANS": "1000000",
        }

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        """Take in spans."""
        with self._lock:
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        self._traces[span.trace_id].append(_span(span))
        return trace_service_pb2.ExportTraceServiceResponse()

    def traces(self) -> list[list[Span]]:
        """The spans so far, a list for each trace."""
        with self._lock:
            return [list(spans) for spans in self._traces.values()]

    def clear(self) -> None:
        """Forget them."""
        with self._lock:
            self._traces.clear()

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stop(grace=None)


def _span(span: Any) -> Span:
    attributes = {item.key: getattr(item.value, item.value.WhichOneof("value") or "", None) for item in span.attributes}
    return Span(span.name, span.start_time_unix_nano * 1e-9, span.end_time_unix_nano * 1e-9, attributes)
