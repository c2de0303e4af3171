"""The gateway's link to one verifier: the sequences that it has there, what it hears of it, leaving."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence

import grpc

from gateway.discovery import Endpoint
from gateway.sequence_updates import SequenceUpdates
from gateway.served_model import ServedModel
from outrider.protocol.errors import UnavailableError
from outrider.service.instruments import Counter
from outrider.service.security import Dial, dial_plaintext
from outrider.service.stream_link import LinkTimings, StreamLink
from outrider.v1 import verifier_pb2, verifier_pb2_grpc

logger = logging.getLogger(__name__)

TIMINGS = LinkTimings(handshake_seconds=5.0, refused_backoff_seconds=30.0, jitter=0.2)
# Prompts of many sequences that open at once are spread over frames of about this size.
FRAME_BYTES = 1 << 20
# A verifier that refused a sequence is passed over for this long where another one is ready.
SHUN_SECONDS = 1.0


class VerifierLink(StreamLink[verifier_pb2.DecodeRequest, verifier_pb2.DecodeResponse]):
    """One verifier. All methods run on the event loop that `run` runs on.

    `accept` is asked with the verifier's model at each handshake and raises FailedPreconditionError to refuse it;
    `on_change` is called after everything that changes where sequences can go, `on_lost` when a verifier or a drafter
    that was there is there no more.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        drafters: Sequence[Endpoint],
        *,
        max_message_bytes: int,
        dial: Dial = dial_plaintext,
        wire_bytes: Counter | None = None,
        accept: Callable[[ServedModel], None],
        on_change: Callable[[], None],
        on_lost: Callable[[], None],
    ) -> None:
        super().__init__(
            "verifier",
            endpoint.address,
            timings=TIMINGS,
            max_message_bytes=max_message_bytes,
            server_name=endpoint.server_name,
            dial=dial,
            wire_bytes=wire_bytes,
        )
        # Set from the handshake until the connection breaks.
        self.model: ServedModel | None = None
        # Whether the stream is open, which the verifier's first frame says.
        self.is_connected = False
        # Whether the verifier has said that it takes no new sequences.
        self.is_draining = False
        # Whether the gateway wants no more of it than the end of the sequences that it has.
        self.is_retired = False
        # Links of this verifier to drafters, by address, as far as it has reported them.
        self.drafters: dict[str, verifier_pb2.DrafterStatus] = {}
        self.load = verifier_pb2.VerifierLoad()
        self._pool = _pool(drafters)
        self._has_new_pool = False
        self._accept = accept
        self._on_change = on_change
        self._on_lost = on_lost
        self._updates: dict[int, SequenceUpdates] = {}
        self._opens: dict[int, verifier_pb2.OpenDecoding] = {}
        self._closes: list[int] = []
        self._has_outgoing = asyncio.Event()
        self._last_problem = ""
        self._shunned_until = 0.0
        self._is_over = asyncio.Event()

    @property
    def is_ready(self) -> bool:
        """Whether new sequences may go here."""
        return self.is_connected and not self.is_draining and not self.is_retired

    @property
    def num_sequences(self) -> int:
        """Sequences that are open here."""
        return len(self._updates)

    @property
    def is_shunned(self) -> bool:
        """Whether the verifier refused a sequence a moment ago."""
        return time.monotonic() < self._shunned_until

    def shun(self) -> None:
        """Pass over this verifier for a moment where another one is ready."""
        self._shunned_until = time.monotonic() + SHUN_SECONDS

    def set_drafters(self, drafters: Sequence[Endpoint]) -> None:
        """Name the drafters that sequences use from now on; those that run keep theirs."""
        self._pool = _pool(drafters)
        self._has_new_pool = True
        self._has_outgoing.set()
        # What the verifier said of the others will be out of date by the time that they come back.
        self.drafters = {
            address: self.drafters[address] for address in self._pool.addresses if address in self.drafters
        }

    def retire(self) -> None:
        """Take no new sequences; `run` returns when those that are open have ended."""
        self.is_retired = True
        self._end_if_idle()
        self._on_change()

    def revive(self) -> bool:
        """Take new sequences again; False when it is too late for that."""
        if self._is_over.is_set():
            return False
        self.is_retired = False
        self._on_change()
        return True

    def open(self, message: verifier_pb2.OpenDecoding) -> SequenceUpdates:
        """Start a sequence; all that opens in one tick of the loop travels in one frame.

        Raises UnavailableError when the verifier is not ready.
        """
        if not self.is_ready:
            raise UnavailableError(f"the verifier {self.address} takes no sequences", retry_delay_seconds=1.0)
        updates = SequenceUpdates(message.sequence_id, self._close)
        self._updates[message.sequence_id] = updates
        self._opens[message.sequence_id] = message
        self._has_outgoing.set()
        return updates

    async def run(self) -> None:
        """Stay connected until cancelled, or until retired and idle."""
        connected = asyncio.create_task(super().run())
        over = asyncio.create_task(self._is_over.wait())
        try:
            await asyncio.wait({connected, over}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            connected.cancel()
            over.cancel()
            await asyncio.gather(connected, over, return_exceptions=True)
            self._lose("the gateway is stopping")

    async def _shake_hands(
        self, channel: grpc.aio.Channel
    ) -> grpc.aio.StreamStreamMultiCallable[verifier_pb2.DecodeRequest, verifier_pb2.DecodeResponse]:
        stub: verifier_pb2_grpc.VerifierServiceAsyncStub = verifier_pb2_grpc.VerifierServiceStub(channel)
        request = verifier_pb2.VerifierServiceGetInfoRequest()
        info = self._parsed(await stub.GetInfo(request, timeout=self._timings.handshake_seconds))
        model = ServedModel.from_info(info)
        self._accept(model)
        self.model = model
        self.load = info.load
        self.is_draining = info.is_draining
        return stub.Decode

    def _first_request(self) -> verifier_pb2.DecodeRequest:
        # A sequence may name a drafter only when the verifier knows it.
        self._has_new_pool = False
        return verifier_pb2.DecodeRequest(drafters=self._pool)

    def _enter(self, hello: verifier_pb2.DecodeResponse) -> None:
        # It names the verifier's drafters: without it, the first sequences would seem to have none.
        self._take(hello)
        self._prove_itself()
        self.is_connected = True
        assert self.model is not None
        logger.info("connected to verifier %s, model %s", self.address, self.model.name)
        self._on_change()

    def _leave(self, detail: str, *, is_refused: bool) -> None:
        was_connected = self.is_connected
        self._lose(detail)
        if was_connected:
            logger.warning("lost verifier %s: %s", self.address, detail)
            self._on_lost()
        elif detail != self._last_problem:
            # Once, and not with every attempt.
            logger.warning("cannot connect to verifier %s: %s", self.address, detail)
        self._last_problem = detail

    async def _next_request(self) -> verifier_pb2.DecodeRequest:
        await self._has_outgoing.wait()
        return self._next_frame()

    def _next_frame(self) -> verifier_pb2.DecodeRequest:
        frame = verifier_pb2.DecodeRequest(closes=self._closes)
        self._closes = []
        if self._has_new_pool:
            frame.drafters.CopyFrom(self._pool)
            self._has_new_pool = False
        size = 0
        while self._opens and size < FRAME_BYTES:
            sequence_id = next(iter(self._opens))
            message = self._opens.pop(sequence_id)
            size += len(message.token_ids)
            frame.opens.append(message)
        if not self._opens:
            self._has_outgoing.clear()
        return frame

    def _take(self, frame: verifier_pb2.DecodeResponse) -> None:
        for update in frame.updates:
            # Updates of a sequence that was just closed may still be on their way.
            updates = self._updates.get(update.sequence_id)
            if updates is None:
                continue
            if update.HasField("ended"):
                del self._updates[update.sequence_id]
            updates.deliver(update)
        self._end_if_idle()
        if frame.HasField("load"):
            self.load = frame.load
        if frame.is_draining and not self.is_draining:
            logger.info("verifier %s is draining", self.address)
            self.is_draining = True
            self._on_change()
            # What takes its place may be known already.
            self._on_lost()
        if frame.drafters:
            self._take_drafters(frame.drafters)

    def _take_drafters(self, statuses: Iterable[verifier_pb2.DrafterStatus]) -> None:
        was_ready = {a for a, status in self.drafters.items() if status.state == verifier_pb2.DRAFTER_STATE_READY}
        self.drafters.update({status.address: status for status in statuses})
        self._on_change()
        if any(self.drafters[address].state != verifier_pb2.DRAFTER_STATE_READY for address in was_ready):
            self._on_lost()

    def _close(self, updates: SequenceUpdates) -> None:
        if self._updates.get(updates.sequence_id) is not updates:
            return
        del self._updates[updates.sequence_id]
        # Without its opening on the way, the verifier never hears of the sequence.
        if self._opens.pop(updates.sequence_id, None) is None:
            self._closes.append(updates.sequence_id)
            self._has_outgoing.set()
        self._end_if_idle()

    def _end_if_idle(self) -> None:
        if self.is_retired and not self._updates:
            self._is_over.set()

    def _lose(self, problem: str) -> None:
        self.is_connected = self.is_draining = False
        self.model = None
        self.drafters.clear()
        self._opens.clear()
        self._closes.clear()
        self._has_outgoing.clear()
        all_updates, self._updates = self._updates, {}
        for updates in all_updates.values():
            updates.fail(UnavailableError(f"lost the verifier {self.address}: {problem}", retry_delay_seconds=1.0))
        self._end_if_idle()
        self._on_change()


def _pool(drafters: Iterable[Endpoint]) -> verifier_pb2.DrafterPool:
    return verifier_pb2.DrafterPool(
        addresses=[drafter.address for drafter in drafters],
        server_names={drafter.address: drafter.server_name for drafter in drafters if drafter.server_name},
    )
