"""The event loop's side of a link to a drafter: dial, handshake, stream, and again when it breaks."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

import grpc

from outrider.protocol.errors import FailedPreconditionError
from outrider.protocol.handshake import check_compatible
from outrider.service.instruments import Counter
from outrider.service.security import Dial, dial_plaintext
from outrider.service.serving import channel_options
from outrider.service.wire_bytes import counted
from outrider.v1 import common_pb2, drafter_pb2, drafter_pb2_grpc, verifier_pb2
from verifier_service.events import Event, LinkDown, LinkUp, ProposalsArrived
from verifier_service.proposals import parse_proposals
from verifier_service.speculation import LinkKey

logger = logging.getLogger(__name__)

FIRST_BACKOFF_SECONDS = 0.2
MAX_BACKOFF_SECONDS = 2.0
# What does not fit will not fit a moment later, but a drafter may be replaced by one that does.
INCOMPATIBLE_BACKOFF_SECONDS = 10.0
HANDSHAKE_TIMEOUT_SECONDS = 2.0

# Never used twice in a process, so that what is left of an old connection cannot pass for a new one's.
_incarnations = itertools.count(1)


class _BadStreamError(Exception):
    """The drafter does not keep to the protocol of the stream itself."""


class DrafterLink:
    """Keeps one stream open to the drafter at `address` for as long as it runs.

    `server_name` is what the drafter's certificate must be for, where that is not the address's host. `post` hands
    events to the engine; `on_change` is called whenever `status` has changed.
    """

    def __init__(
        self,
        address: str,
        identity: common_pb2.ModelIdentity,
        *,
        server_name: str = "",
        max_message_bytes: int,
        dial: Dial = dial_plaintext,
        wire_bytes: Counter | None = None,
        post: Callable[[Event], None],
        on_change: Callable[[DrafterLink], None],
    ) -> None:
        self.address = address
        self.status = verifier_pb2.DrafterStatus(address=address, state=verifier_pb2.DRAFTER_STATE_CONNECTING)
        self._identity = identity
        self._options = channel_options(max_message_bytes, server_name=server_name)
        self._dial = dial
        self._wire_bytes = wire_bytes
        self._post = post
        self._on_change = on_change
        self._incarnation = 0
        self._has_heard = False
        self._outbox: asyncio.Queue[drafter_pb2.DraftRequest] = asyncio.Queue()
        self._call: grpc.aio.StreamStreamCall[drafter_pb2.DraftRequest, drafter_pb2.DraftResponse] | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def key(self) -> LinkKey | None:
        """The connection in use, None while there is none."""
        is_up = self.status.state in (verifier_pb2.DRAFTER_STATE_READY, verifier_pb2.DRAFTER_STATE_DRAINING)
        return LinkKey(self.address, self._incarnation) if is_up else None

    @property
    def key_for_new(self) -> LinkKey | None:
        """The connection that new sequences may use, None while there is none."""
        return self.key if self.status.state == verifier_pb2.DRAFTER_STATE_READY else None

    def start(self) -> None:
        """Begin dialling."""
        self._task = asyncio.create_task(self._run(), name=f"drafter-link {self.address}")

    async def stop(self) -> None:
        """Close the stream and stop dialling; the engine is told that the connection is gone."""
        if self._task is not None:
            self._task.cancel()
            # Not `await self._task`, which could not tell the task's cancellation from our own.
            await asyncio.wait({self._task})
            if (key := self.key) is not None:
                self._post(LinkDown(key))
                self.status = verifier_pb2.DrafterStatus(
                    address=self.address, state=verifier_pb2.DRAFTER_STATE_CONNECTING, detail="no longer wanted"
                )

    def send(self, key: LinkKey, frame: drafter_pb2.DraftRequest) -> None:
        """Send a frame, unless the connection that it was meant for is gone."""
        if key == self.key:
            self._outbox.put_nowait(frame)

    def drop(self, key: LinkKey) -> None:
        """Close a connection that has fallen silent; dialling begins anew."""
        if key == self.key and self._call is not None:
            self._call.cancel()

    async def _run(self) -> None:
        backoff = FIRST_BACKOFF_SECONDS
        while True:
            state = verifier_pb2.DRAFTER_STATE_CONNECTING
            self._has_heard = False
            try:
                # A channel of its own each time: one that has lost its peer may sit out a backoff of its own, and a
                # certificate may have been renewed.
                async with self._dial(self.address, self._options) as channel:
                    await self._serve(
                        drafter_pb2_grpc.DrafterServiceStub(counted(channel, self._wire_bytes, "drafter"))
                    )
                detail = "the drafter closed the stream"
            except FailedPreconditionError as error:
                state, detail = verifier_pb2.DRAFTER_STATE_INCOMPATIBLE, error.message
            except grpc.aio.AioRpcError as error:
                detail = f"{error.code().name}: {error.details()}"
                if error.code() == grpc.StatusCode.FAILED_PRECONDITION:
                    state = verifier_pb2.DRAFTER_STATE_INCOMPATIBLE
            except (_BadStreamError, TimeoutError) as error:
                detail = str(error)
            except Exception as error:
                # Whatever a drafter does, dialling goes on.
                logger.exception("the link to drafter %s failed", self.address)
                detail = f"internal error: {type(error).__name__}"
            self._leave(state, detail)
            if self._has_heard:
                backoff = FIRST_BACKOFF_SECONDS
            is_incompatible = state == verifier_pb2.DRAFTER_STATE_INCOMPATIBLE
            await asyncio.sleep(INCOMPATIBLE_BACKOFF_SECONDS if is_incompatible else backoff)
            backoff = min(2 * backoff, MAX_BACKOFF_SECONDS)

    async def _serve(self, stub: drafter_pb2_grpc.DrafterServiceAsyncStub) -> None:
        info = await stub.GetInfo(drafter_pb2.DrafterServiceGetInfoRequest(), timeout=HANDSHAKE_TIMEOUT_SECONDS)
        check_compatible(self._identity, _parsed(info).identity)
        self._outbox = asyncio.Queue()
        self._outbox.put_nowait(drafter_pb2.DraftRequest(identity=self._identity))
        self._call = call = stub.Draft(self._frames())
        try:
            frames = aiter(call)
            await _hello(frames)
            self._enter(info.identity.max_length)
            key = self.key
            assert key is not None
            async for frame in frames:
                drafts = parse_proposals(_parsed(frame).proposals, self._identity.vocabulary_size)
                self._post(ProposalsArrived(key, frame, drafts))
                self._has_heard = True
                if frame.is_draining:
                    self._drain()
        except asyncio.CancelledError:
            # Either this task was cancelled, or `drop` cancelled the call: only the latter goes on dialling.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise TimeoutError("the drafter has fallen silent") from None
        finally:
            call.cancel()

    async def _frames(self) -> AsyncIterator[drafter_pb2.DraftRequest]:
        outbox = self._outbox
        while True:
            yield await outbox.get()

    def _enter(self, max_length: int) -> None:
        self._incarnation = next(_incarnations)
        self.status = verifier_pb2.DrafterStatus(
            address=self.address, state=verifier_pb2.DRAFTER_STATE_READY, max_length=max_length
        )
        key = self.key
        assert key is not None
        logger.info("drafter %s is ready", self.address)
        self._post(LinkUp(key, max_length))
        self._on_change(self)

    def _drain(self) -> None:
        if self.status.state != verifier_pb2.DRAFTER_STATE_DRAINING:
            logger.info("drafter %s is draining", self.address)
            self.status = verifier_pb2.DrafterStatus(
                address=self.address,
                state=verifier_pb2.DRAFTER_STATE_DRAINING,
                detail="it is draining",
                max_length=self.status.max_length,
            )
            self._on_change(self)

    def _leave(self, state: verifier_pb2.DrafterState, detail: str) -> None:
        key = self.key
        if key is not None:
            logger.warning("lost drafter %s: %s", self.address, detail)
            self._post(LinkDown(key))
        status = verifier_pb2.DrafterStatus(address=self.address, state=state, detail=detail)
        if status != self.status:
            if state == verifier_pb2.DRAFTER_STATE_INCOMPATIBLE:
                logger.warning("drafter %s does not fit: %s", self.address, detail)
            self.status = status
            self._on_change(self)


async def _hello(frames: AsyncIterator[drafter_pb2.DraftResponse]) -> None:
    """Return when the drafter has taken the stream, which its first frame says.

    Raises what it refused the stream with, or TimeoutError.
    """
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_SECONDS):
            _parsed(await anext(frames))
    except StopAsyncIteration:
        raise _BadStreamError("the drafter closed the stream") from None
    except TimeoutError:
        raise TimeoutError("the drafter does not answer on its stream") from None


_Message = TypeVar("_Message")


def _parsed(message: _Message | None) -> _Message:
    # What gRPC hands out in place of a message that does not parse.
    if message is None:
        raise _BadStreamError("the drafter sent bytes that are no message")
    return message
