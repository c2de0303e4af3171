"""The event loop's side of a link to a drafter: what it is, what its frames mean, what it is sent."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable

import grpc

from outrider.protocol.handshake import DraftLimits, check_compatible
from outrider.service.instruments import Counter
from outrider.service.security import Dial, dial_plaintext
from outrider.service.stream_link import LinkTimings, StreamLink
from outrider.v1 import common_pb2, drafter_pb2, drafter_pb2_grpc, verifier_pb2
from verifier_service.events import Event, ExpansionsArrived, LinkDown, LinkUp
from verifier_service.frames import read_expansions
from verifier_service.speculation import LinkKey

logger = logging.getLogger(__name__)

TIMINGS = LinkTimings(handshake_seconds=2.0, refused_backoff_seconds=10.0)

# Never used twice in a process, so that what is left of an old connection cannot pass for a new one's.
_incarnations = itertools.count(1)


class DrafterLink(StreamLink[drafter_pb2.DraftRequest, drafter_pb2.DraftResponse]):
    """Keeps one stream open to the drafter at `address` for as long as it runs.

    `limits` is what the verifier takes, of which the drafter may want less. `server_name` is what the drafter's
    certificate must be for, where that is not the address's host. `post` hands events to the engine; `on_change` is
    called whenever `status` has changed.
    """

    def __init__(
        self,
        address: str,
        identity: common_pb2.ModelIdentity,
        limits: DraftLimits,
        *,
        server_name: str = "",
        max_message_bytes: int,
        dial: Dial = dial_plaintext,
        wire_bytes: Counter | None = None,
        post: Callable[[Event], None],
        on_change: Callable[[DrafterLink], None],
    ) -> None:
        super().__init__(
            "drafter",
            address,
            timings=TIMINGS,
            max_message_bytes=max_message_bytes,
            server_name=server_name,
            dial=dial,
            wire_bytes=wire_bytes,
        )
        self.status = verifier_pb2.DrafterStatus(address=address, state=verifier_pb2.DRAFTER_STATE_CONNECTING)
        # What holds on the connection in use.
        self.limits = limits
        self._identity = identity
        self._offer = limits
        self._post = post
        self._on_change = on_change
        self._incarnation = 0
        self._max_length = 0
        self._outbox: asyncio.Queue[drafter_pb2.DraftRequest] = asyncio.Queue()
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
        self._task = asyncio.create_task(self.run(), name=f"drafter-link {self.address}")

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
        if key == self.key:
            self._give_up("the drafter has fallen silent")

    async def _shake_hands(
        self, channel: grpc.aio.Channel
    ) -> grpc.aio.StreamStreamMultiCallable[drafter_pb2.DraftRequest, drafter_pb2.DraftResponse]:
        stub: drafter_pb2_grpc.DrafterServiceAsyncStub = drafter_pb2_grpc.DrafterServiceStub(channel)
        request = drafter_pb2.DrafterServiceGetInfoRequest()
        info = self._parsed(await stub.GetInfo(request, timeout=self._timings.handshake_seconds))
        check_compatible(self._identity, info.identity)
        self._max_length = info.identity.max_length
        return stub.Draft

    def _first_request(self) -> drafter_pb2.DraftRequest:
        return drafter_pb2.DraftRequest(identity=self._identity, limits=self._offer.to_message())

    def _enter(self, hello: drafter_pb2.DraftResponse) -> None:
        self.limits = limits = self._offer.with_answer(hello.limits)
        self._incarnation = next(_incarnations)
        self._outbox = asyncio.Queue()
        self.status = verifier_pb2.DrafterStatus(
            address=self.address, state=verifier_pb2.DRAFTER_STATE_READY, max_length=self._max_length
        )
        logger.info("drafter %s is ready: %s", self.address, limits)
        self._post(LinkUp(LinkKey(self.address, self._incarnation), self._max_length))
        self._on_change(self)

    async def _next_request(self) -> drafter_pb2.DraftRequest:
        return await self._outbox.get()

    def _take(self, frame: drafter_pb2.DraftResponse) -> None:
        expansions = read_expansions(frame.expansions, self._identity.vocabulary_size, self.limits)
        key = LinkKey(self.address, self._incarnation)
        self._post(ExpansionsArrived(key, expansions, frame.refusals, frame.step_seconds))
        # Only now: one that takes every stream and ends it is not to be dialled without a pause.
        self._prove_itself()
        if frame.is_draining:
            self._drain()

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

    def _leave(self, detail: str, *, is_refused: bool) -> None:
        state = verifier_pb2.DRAFTER_STATE_INCOMPATIBLE if is_refused else verifier_pb2.DRAFTER_STATE_CONNECTING
        key = self.key
        if key is not None:
            logger.warning("lost drafter %s: %s", self.address, detail)
            self._post(LinkDown(key))
        status = verifier_pb2.DrafterStatus(address=self.address, state=state, detail=detail)
        if status != self.status:
            if is_refused:
                logger.warning("drafter %s does not fit: %s", self.address, detail)
            self.status = status
            self._on_change(self)
