"""Takes in traces over gRPC as an OpenTelemetry collector does, and keeps the last ones."""

from __future__ import annotations

from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from gateway.dashboard.span_store import SpanStore

MAX_MESSAGE_BYTES = 16 << 20


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """OTLP on an address of this machine alone: whoever can send spans can make the page show anything."""

    def __init__(self, store: SpanStore, listen: str) -> None:
        self._store = store
        self._listen = listen
        self._server: grpc.aio.Server | None = None
        self.address = ""

    async def start(self) -> None:
        """Bind and serve. Raises OSError, naming the setting, when that cannot be."""
        self._server = grpc.aio.server(
            options=[("grpc.max_receive_message_length", MAX_MESSAGE_BYTES), ("grpc.so_reuseport", 0)]
        )
        add_to_server: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server  # untyped
        add_to_server(self, self._server)
        try:
            port = self._server.add_insecure_port(self._listen)
        except RuntimeError as error:
            raise OSError(f"dashboard_otlp_listen: cannot bind {self._listen}") from error
        self.address = f"{self._listen.rpartition(':')[0]}:{port}"
        await self._server.start()

    async def stop(self) -> None:
        """Stop serving; what arrives later is refused."""
        if self._server is not None:
            await self._server.stop(grace=None)
            self._server = None

    async def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: Any
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        """Keep some spans."""
        self._store.add(request.resource_spans)
        return trace_service_pb2.ExportTraceServiceResponse()
