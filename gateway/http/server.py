"""Runs the HTTP front on the gateway's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

logger = logging.getLogger(__name__)

# A connection that has not sent a whole request head by then is closed.
HEAD_SECONDS = 30.0
# A client that takes nothing of its answer for so long is cut off; what it holds up others may need.
WRITE_SECONDS = 60.0
# How long responses may take to end once everything behind them has stopped.
GRACE_SECONDS = 1


class HttpServer:
    """An ASGI server as a part of another program: no signal handlers, no logging set-up, no exit of its own."""

    def __init__(self, app: ASGIApp, listen: str, *, tls: ssl.SSLContext | None = None) -> None:
        """`tls` is used for each new connection as it then is, so that its certificates may be renewed in place."""
        self._listen = listen
        self._server = _Server(
            uvicorn.Config(
                app,
                http=_Protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level=logging.WARNING,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=GRACE_SECONDS,
                ssl_context_factory=None if tls is None else lambda config, default: tls,
            )
        )
        self._scheme = "http" if tls is None else "https"
        self._serving: asyncio.Task[None] | None = None
        self.address = ""

    async def start(self) -> None:
        """Bind and serve. Raises OSError, naming the setting, when that cannot be."""
        bound = await _bind(self._listen)
        self.address = f"{self._listen.rpartition(':')[0]}:{bound.getsockname()[1]}"
        self._serving = asyncio.create_task(self._server.serve(sockets=[bound]))
        logger.info("listening on %s://%s", self._scheme, self.address)

    async def stop(self) -> None:
        """Take no more connections, let responses end for a moment, then cut them off."""
        if self._serving is None:
            return
        self._server.should_exit = True
        await self._serving
        self._serving = None


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # Signals belong to the service's own life cycle.
        yield


class _Protocol(H11Protocol):
    """HTTP/1.1, with limits on how long a client may take over its first request's head and over its answer."""

    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # asyncio sees to this for the sockets of its own making alone. Without, a piece of an answer waits up to 40 ms
        # for the client to acknowledge the one before it.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self._close_without_request)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        # Closing would wait for what is not read; the handler hears of the end as of any other.
        self._write_timer = self.loop.call_later(WRITE_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()

    def _close_without_request(self) -> None:
        # Later requests on the connection are under the keep-alive timer.
        if self.scope is None and not self.transport.is_closing():
            self.transport.close()


async def _bind(listen: str) -> socket.socket:
    host, _, port = listen.rpartition(":")
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, _, _, _, address = found[0]
        return socket.create_server((str(address[0]), int(address[1])), family=family)
    except OSError as error:
        raise OSError(f"http_listen: cannot bind {listen}: {error.strerror}") from error
