"""The life of a service process: bind, load, serve, drain, stop. The same for gateway, verifier and drafter."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Protocol

import grpc
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from outrider.protocol.errors import UnavailableError
from outrider.service.busy_poll import new_event_loop
from outrider.service.collector import spare_collector
from outrider.service.health import Health
from outrider.service.interceptor import ErrorInterceptor
from outrider.service.metrics import ServiceMetrics
from outrider.service.security import ServerSecurity
from outrider.service.settings import ServiceSettings
from outrider.service.wire_bytes import WireInterceptor

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Keepalive:
    """How an end of a connection finds out that the other one is gone without a word: it pings after so much silence
    and gives the connection up when no answer comes in time."""

    interval_seconds: float
    timeout_seconds: float


# Between our own services: who vanished is missed within 5 s, whether or not anything was on its way. Pings are
# answered by gRPC's own threads, so that a busy event loop or interpreter does not look dead.
LINK_KEEPALIVE = Keepalive(2.0, 3.0)
# Towards clients, which may be on slow networks: within 40 s.
CLIENT_KEEPALIVE = Keepalive(30.0, 10.0)


class Phase(Enum):
    """Where a service is in its life."""

    LOADING = auto()
    SERVING = auto()
    DRAINING = auto()


class Component(Protocol):
    """What a service brings to its server. All methods run on the event loop."""

    async def start(self) -> None:
        """Load and warm up; the service reports SERVING when this returns."""

    async def drain(self) -> None:
        """Take nothing new and return when the accepted work is done."""

    async def stop(self) -> None:
        """Free everything, finished or not."""


@dataclass(frozen=True)
class Registration:
    """One gRPC service: its full name and the call that adds its servicer to a server."""

    full_name: str
    add_to_server: Callable[[Any], None]


class Server:
    """A grpc.aio server with health, reflection, error mapping and an orderly end.

    Health is NOT_SERVING until the component has started and again from the moment of draining; only the name
    `liveness` is SERVING all the time.
    """

    def __init__(
        self,
        settings: ServiceSettings,
        component: Component,
        registrations: Sequence[Registration],
        *,
        keepalive: Keepalive = LINK_KEEPALIVE,
        metrics: ServiceMetrics | None = None,
    ) -> None:
        """Raises BadSettingsError for TLS files that are not usable."""
        self._settings = settings
        self._security = ServerSecurity(settings)
        self._metrics = metrics
        self._component = component
        self.phase = Phase.LOADING
        names = [registration.full_name for registration in registrations]
        self._health = Health(names)
        self._server = grpc.aio.server(
            interceptors=[
                ErrorInterceptor(self._gate),
                *([WireInterceptor(metrics.wire_bytes, metrics.peers[0])] if metrics and metrics.is_enabled else []),
            ],
            options=channel_options(settings.max_message_bytes, server=True, keepalive=keepalive),
        )
        for registration in registrations:
            registration.add_to_server(self._server)
        self._health.add_to_server(self._server)
        reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server)
        self.address = ""

    @property
    def metrics_address(self) -> str:
        """host:port of the metrics, empty where there are none."""
        return self._metrics.address if self._metrics is not None else ""

    @property
    def health_address(self) -> str:
        """host:port of the port with health checks alone, empty where there is none."""
        return self._health.address

    async def start(self, *, owns_process: bool = False) -> None:
        """Bind, then start the component. Raises OSError when the address is taken.

        `owns_process`: nothing else lives in this process, whose garbage collector may be told what to pass over.
        """
        await self._health.start(self._settings.health_listen)
        if self._metrics is not None:
            loop = asyncio.get_running_loop()
            self._metrics.tasks.follow(lambda: {(): len(asyncio.all_tasks(loop))})
            self._metrics.start(self._settings.metrics_listen)
        host = self._settings.listen.rpartition(":")[0]
        try:
            port = self._security.add_port(self._server, self._settings.listen)
        except RuntimeError as error:
            raise OSError(f"listen: cannot bind {self._settings.listen}") from error
        self.address = f"{host}:{port}"
        await self._server.start()
        logger.info("listening on %s%s, loading", self.address, " by TLS" if self._security.is_encrypted else "")
        await self._component.start()
        if owns_process:
            spare_collector()
        self.phase = Phase.SERVING
        await self._health.set_ready(True)
        logger.info("serving on %s", self.address)

    async def stop(self) -> None:
        """Report NOT_SERVING, drain for at most `drain_seconds`, then stop."""
        self.phase = Phase.DRAINING
        await self._health.set_ready(False)
        logger.info("draining")
        try:
            await asyncio.wait_for(self._component.drain(), self._settings.drain_seconds)
        except TimeoutError:
            logger.warning("still busy after %.0f s of draining; ending what runs", self._settings.drain_seconds)
        await self._component.stop()
        await self._server.stop(grace=1.0)
        await self._health.stop()
        await self._stop_metrics()
        logger.info("stopped")

    async def abandon(self) -> None:
        """Stop serving a component that never came to start; a gRPC server that nobody stops can hang the process."""
        await self._server.stop(grace=None)
        await self._health.stop()
        await self._stop_metrics()

    async def _stop_metrics(self) -> None:
        if self._metrics is not None:
            # What is left is exported, to somebody who may not answer.
            await asyncio.to_thread(self._metrics.stop)

    def _gate(self, context: Any) -> None:
        self._security.check_caller(context)
        # While draining, each component decides for itself: what runs goes on, what is new is refused.
        if self.phase is Phase.LOADING:
            raise UnavailableError("the service is still loading", retry_delay_seconds=1.0)


def channel_options(
    max_message_bytes: int, *, server: bool = False, keepalive: Keepalive = LINK_KEEPALIVE, server_name: str = ""
) -> list[tuple[str, int | str]]:
    """gRPC options for either end of our connections.

    `server_name` is the name that a client expects its peer to prove, where that is not the host that it dials: what
    DNS was asked for.
    """
    interval_ms, timeout_ms = round(keepalive.interval_seconds * 1e3), round(keepalive.timeout_seconds * 1e3)
    options: list[tuple[str, int | str]] = [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", interval_ms),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        # What counts in fact: gRPC's core never starts the timer of the option above (grpc/grpc#39239), and waits a
        # minute without this one.
        ("grpc.http2.ping_timeout_ms", timeout_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    if server:
        # Without SO_REUSEPORT a second service on the same port fails at once instead of sharing its traffic.
        options += [("grpc.so_reuseport", 0), ("grpc.http2.min_ping_interval_without_data_ms", interval_ms // 2)]
    else:
        # A peer that returns is found again quickly; gRPC's own default backs off for up to two minutes. And our peers
        # are never behind the proxy that a machine's environment may name for the world outside.
        options += [
            ("grpc.initial_reconnect_backoff_ms", 200),
            ("grpc.max_reconnect_backoff_ms", 2_000),
            ("grpc.enable_http_proxy", 0),
        ]
        if server_name:
            options += [("grpc.default_authority", server_name), ("grpc.ssl_target_name_override", server_name)]
    return options


def run(make_server: Callable[[], Server], *, busy_poll_seconds: float = 0.0) -> int:
    """Run a service until SIGTERM or SIGINT; the process's exit status. A second signal ends it at once.

    The event loop polls for `busy_poll_seconds` before it sleeps; see `outrider.service.busy_poll`.
    """
    # The engine's thread and the event loop hand frames to each other many times a step; at the interpreter's own 5 ms
    # one would often wait for the other.
    sys.setswitchinterval(0.0002)
    with asyncio.Runner(loop_factory=lambda: new_event_loop(busy_poll_seconds)) as runner:
        return runner.run(_run(make_server))


async def _run(make_server: Callable[[], Server]) -> int:
    server = make_server()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set():
            # The operator asked twice: leave without draining.
            sys.stderr.flush()
            signal.raise_signal(signal.SIGKILL)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    starting = asyncio.create_task(server.start(owns_process=True))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if stop.is_set() and not starting.done():
        # A signal during loading: there is nothing to drain.
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await starting
        await server.abandon()
        return 0
    try:
        await starting
    except Exception as error:
        logger.error("cannot start: %s", error)
        logger.debug("cannot start", exc_info=True)
        stopping.cancel()
        await server.abandon()
        return 1
    await stopping
    await server.stop()
    return 0
