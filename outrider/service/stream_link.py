"""One bidirectional stream to a peer, kept open: dial, handshake, first frames, and again when it breaks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import grpc

from outrider.protocol.errors import FailedPreconditionError, OutriderError, UnavailableError
from outrider.service.instruments import Counter
from outrider.service.security import Dial
from outrider.service.serving import channel_options
from outrider.service.wire_bytes import counted

logger = logging.getLogger(__name__)

Request = TypeVar("Request")
Response = TypeVar("Response")
_Message = TypeVar("_Message")

# The status of a broken stream may reach its reader a moment after its writer has stumbled over it.
STATUS_SECONDS = 1.0


@dataclass(frozen=True)
class LinkTimings:
    """How long a link waits."""

    handshake_seconds: float
    """For the answer to the handshake, and then for the first frame of the stream."""
    refused_backoff_seconds: float
    """Before a peer that does not fit is dialled again: it will not fit a moment later, but may be replaced."""
    first_backoff_seconds: float = 0.2
    """Before a peer is dialled again that was lost or not there; twice as long after each further failure."""
    last_backoff_seconds: float = 2.0
    jitter: float = 0.0
    """Share by which a back-off is longer or shorter, so that those that lost the same peer come back spread out."""


@dataclass(frozen=True)
class _Ending:
    """Why a stream ended, or did not come to be."""

    detail: str
    is_refused: bool = False


class StreamLink(ABC, Generic[Request, Response]):
    """Keeps one stream open to the peer at `address` for as long as `run` runs, on one event loop.

    An attempt goes through `_shake_hands`, `_first_request`, `_enter` with the peer's first frame, and `_take` with
    each further one, while what `_next_request` returns is sent. However it ends, `_leave` is told, unless `run` itself
    was cancelled; after a back-off the next attempt begins on a channel of its own. `peer` is what the other end is
    called in messages.
    """

    def __init__(
        self,
        peer: str,
        address: str,
        *,
        timings: LinkTimings,
        max_message_bytes: int,
        server_name: str = "",
        dial: Dial,
        wire_bytes: Counter | None = None,
    ) -> None:
        self.address = address
        self._peer = peer
        self._timings = timings
        self._options = channel_options(max_message_bytes, server_name=server_name)
        self._dial = dial
        self._wire_bytes = wire_bytes
        self._has_proved_itself = False
        # Why the stream in use is given up; None while there is none.
        self._given_up: asyncio.Future[str] | None = None

    @abstractmethod
    async def _shake_hands(self, channel: grpc.aio.Channel) -> grpc.aio.StreamStreamMultiCallable[Request, Response]:
        """Ask the peer who it is, within `handshake_seconds`, and return what opens the stream.

        Raises FailedPreconditionError for a peer that does not fit.
        """

    @abstractmethod
    def _first_request(self) -> Request:
        """What is sent first on a new stream, before the peer has said anything on it."""

    @abstractmethod
    def _enter(self, hello: Response) -> None:
        """The peer has taken the stream, which its first frame says. Raises OutriderError to leave it."""

    @abstractmethod
    async def _next_request(self) -> Request:
        """Wait for the next frame to send; called from `_enter` on, and never by two streams at once."""

    @abstractmethod
    def _take(self, frame: Response) -> None:
        """One frame of the peer's, after the first."""

    @abstractmethod
    def _leave(self, detail: str, *, is_refused: bool) -> None:
        """An attempt is over, whether or not it had come as far as `_enter`; `detail` says why, for a person.

        `is_refused`: one side found that the two do not fit.
        """

    async def run(self) -> None:
        """Keep the stream open until cancelled."""
        timings = self._timings
        backoff = timings.first_backoff_seconds
        while True:
            self._has_proved_itself = False
            ending = await self._attempt()
            self._leave(ending.detail, is_refused=ending.is_refused)
            if self._has_proved_itself:
                backoff = timings.first_backoff_seconds
            seconds = timings.refused_backoff_seconds if ending.is_refused else backoff
            await asyncio.sleep(seconds * random.uniform(1 - timings.jitter, 1 + timings.jitter))
            backoff = min(2 * backoff, timings.last_backoff_seconds)

    def _prove_itself(self) -> None:
        """The peer of this stream works: should it be lost, the back-off begins anew."""
        self._has_proved_itself = True

    def _give_up(self, detail: str) -> None:
        """End the stream that is in use, if there is one; dialling begins anew."""
        if self._given_up is not None and not self._given_up.done():
            self._given_up.set_result(detail)

    def _parsed(self, message: _Message | None) -> _Message:
        # What gRPC hands out in place of a message that does not parse.
        if message is None:
            raise UnavailableError(f"the {self._peer} sent bytes that are no message")
        return message

    async def _attempt(self) -> _Ending:
        try:
            # A channel of its own each time: one that has lost its peer may sit out a backoff of its own, or wait many
            # seconds for an answer to the packet that would have opened a connection. And a certificate may have been
            # renewed.
            async with self._dial(self.address, self._options) as channel:
                open_stream = await self._shake_hands(counted(channel, self._wire_bytes, self._peer))
                await self._serve(open_stream(None))
            return _Ending(f"the {self._peer} ended the stream")
        except OutriderError as error:
            return _Ending(error.message, is_refused=isinstance(error, FailedPreconditionError))
        except grpc.aio.AioRpcError as error:
            is_refused = error.code() == grpc.StatusCode.FAILED_PRECONDITION
            return _Ending(f"{error.code().name}: {error.details()}", is_refused=is_refused)
        except Exception as error:
            # Whatever a peer does, dialling goes on.
            logger.exception("the link to %s %s failed", self._peer, self.address)
            return _Ending(f"internal error: {type(error).__name__}")

    async def _serve(self, call: grpc.aio.StreamStreamCall[Request, Response]) -> None:
        """Return when the peer ends the stream; raise when it breaks, is refused or is given up."""
        self._given_up = given_up = asyncio.get_running_loop().create_future()
        tasks: list[asyncio.Task[None]] = []
        try:
            frames = aiter(call)
            self._enter(await self._hello(call, frames))
            tasks = [asyncio.create_task(self._read(frames)), asyncio.create_task(self._write(call))]
            reader, writer = tasks
            await asyncio.wait({reader, writer, given_up}, return_when=asyncio.FIRST_COMPLETED)
            if given_up.done():
                raise UnavailableError(given_up.result())
            if not reader.done():
                # The reader knows the status of a broken stream, the writer only that it is broken.
                await asyncio.wait({reader}, timeout=STATUS_SECONDS)
            await (reader if reader.done() else writer)
        finally:
            self._given_up = None
            call.cancel()
            for task in tasks:
                task.cancel()
            # Their ends are of no interest, but a cancellation of this task that comes meanwhile is.
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _hello(
        self, call: grpc.aio.StreamStreamCall[Request, Response], frames: AsyncIterator[Response]
    ) -> Response:
        """The frame with which the peer takes the stream. Raises what it refused it with, or UnavailableError."""
        try:
            async with asyncio.timeout(self._timings.handshake_seconds):
                # A stream that was refused at once cannot be written to; reading says why.
                with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    await call.write(self._first_request())
                return self._parsed(await anext(frames))
        except StopAsyncIteration:
            raise UnavailableError(f"the {self._peer} ended the stream") from None
        except TimeoutError:
            raise UnavailableError(f"the {self._peer} does not answer on its stream") from None

    async def _read(self, frames: AsyncIterator[Response]) -> None:
        async for frame in frames:
            self._take(self._parsed(frame))

    async def _write(self, call: grpc.aio.StreamStreamCall[Request, Response]) -> None:
        while True:
            await call.write(await self._next_request())
