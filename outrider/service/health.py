"""What a service tells probes about itself: whether it lives and whether it is ready."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

# The health service's name for "the process lives": SERVING from binding to the end, while loading and draining too.
# What restarts a service must ask for this one, what sends it traffic for "" or one of its gRPC services.
LIVENESS = "liveness"


class Health:
    """One `grpc.health.v1` state, shown on the service's own port and, where asked for, on a port of its own.

    Probes such as the kubelet's can neither present a certificate nor check one, so that a service behind TLS needs
    the second port: plaintext, and with health checks alone.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = ("", *names)
        self._servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]  # defined only where grpc.aio is
        self._server: grpc.aio.Server | None = None
        self.address = ""

    def add_to_server(self, server: grpc.aio.Server) -> None:
        """Answer health checks on `server`."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def start(self, listen: str | None) -> None:
        """Alive but not ready; bind the port of its own, if any. Raises OSError when it is taken."""
        await self.set_ready(False)
        await self._servicer.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        if listen is None:
            return
        options: list[tuple[str, Any]] = [("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 1 << 10)]
        server = grpc.aio.server(options=options)
        self.add_to_server(server)
        try:
            port = server.add_insecure_port(listen)
        except RuntimeError as error:
            raise OSError(f"health_listen: cannot bind {listen}") from error
        self.address = f"{listen.rpartition(':')[0]}:{port}"
        await server.start()
        self._server = server

    async def set_ready(self, is_ready: bool) -> None:
        """Say whether new work is welcome."""
        status = health_pb2.HealthCheckResponse.SERVING if is_ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in self._names:
            await self._servicer.set(name, status)

    async def stop(self) -> None:
        """Close the port of its own."""
        if self._server is not None:
            await self._server.stop(grace=None)
