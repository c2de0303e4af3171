"""The gateway's connection to one verifier: handshake, the Decode stream, reconnecting."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Sequence

import grpc

from engine.errors import FailedPreconditionError, OutriderError, UnavailableError
from engine.serving import channel_options
from gateway.decoding import Decoding
from gateway.served_model import ServedModel
from outrider.v1 import verifier_pb2, verifier_pb2_grpc

logger = logging.getLogger(__name__)

FIRST_BACKOFF_SECONDS = 0.2
LAST_BACKOFF_SECONDS = 2.0
# A verifier that serves another model will do so until somebody changes it.
REFUSED_BACKOFF_SECONDS = 30.0
HANDSHAKE_SECONDS = 5.0
# Prompts of many sequences that open at once are spread over frames of about this size.
FRAME_BYTES = 1 << 20
# A verifier that refused a sequence is passed over for this long where another one is ready.
SHUN_SECONDS = 1.0


class VerifierLink:
    """One verifier. All methods run on the event loop that `run` runs on.

    `accept` is asked with the verifier's model at each handshake and raises FailedPreconditionError to refuse it;
    `on_change` is called after everything that changes where sequences can go.
    """

    def __init__(
        self,
        address: str,
        drafters: Sequence[str],
        *,
        max_message_bytes: int,
        accept: Callable[[ServedModel], None],
        on_change: Callable[[], None],
    ) -> None:
        self.address = address
        # Set from the handshake until the connection breaks.
        self.model: ServedModel | None = None
        self.is_ready = False
        # Links of this verifier to drafters, by address, as far as it has reported them.
        self.drafters: dict[str, verifier_pb2.DrafterStatus] = {}
        self.load = verifier_pb2.VerifierLoad()
        self._pool = verifier_pb2.DrafterPool(addresses=drafters)
        self._options = channel_options(max_message_bytes)
        self._accept = accept
        self._on_change = on_change
        self._decodings: dict[int, Decoding] = {}
        self._opens: dict[int, verifier_pb2.OpenDecoding] = {}
        self._closes: list[int] = []
        self._has_outgoing = asyncio.Event()
        self._shunned_until = 0.0

    @property
    def num_sequences(self) -> int:
        """Sequences that are open here."""
        return len(self._decodings)

    @property
    def is_shunned(self) -> bool:
        """Whether the verifier refused a sequence a moment ago."""
        return time.monotonic() < self._shunned_until

    def shun(self) -> None:
        """Pass over this verifier for a moment where another one is ready."""
        self._shunned_until = time.monotonic() + SHUN_SECONDS

    def open(self, message: verifier_pb2.OpenDecoding) -> Decoding:
        """Start a sequence; all that opens in one tick of the loop travels in one frame.

        Raises UnavailableError when the verifier is not connected.
        """
        if not self.is_ready:
            raise UnavailableError(f"the verifier {self.address} is not connected", retry_delay_seconds=1.0)
        decoding = Decoding(message.sequence_id, self._close)
        self._decodings[message.sequence_id] = decoding
        self._opens[message.sequence_id] = message
        self._has_outgoing.set()
        return decoding

    async def run(self) -> None:
        """Stay connected until cancelled."""
        backoff, last_problem = FIRST_BACKOFF_SECONDS, ""
        async with grpc.aio.insecure_channel(self.address, options=self._options) as channel:
            stub = verifier_pb2_grpc.VerifierServiceStub(channel)
            while True:
                problem = "the gateway is stopping"
                was_ready = False
                try:
                    await self._connect(stub)
                    problem = "the verifier ended the stream"
                except FailedPreconditionError as error:
                    problem = error.message
                    backoff = REFUSED_BACKOFF_SECONDS
                except (OutriderError, grpc.aio.AioRpcError) as error:
                    problem = _describe(error)
                except Exception:
                    problem = "internal error, see the gateway's log"
                    logger.exception("the link to verifier %s failed", self.address)
                finally:
                    was_ready = self.is_ready
                    self._lose(problem)
                if was_ready:
                    logger.warning("lost verifier %s: %s", self.address, problem)
                    backoff = FIRST_BACKOFF_SECONDS
                elif problem != last_problem:
                    # Once, and not with every attempt.
                    logger.warning("cannot connect to verifier %s: %s", self.address, problem)
                last_problem = problem
                # Gateways that lost the same verifier come back spread out.
                await asyncio.sleep(backoff * random.uniform(0.8, 1.2))
                backoff = min(2 * backoff, LAST_BACKOFF_SECONDS)

    async def _connect(self, stub: verifier_pb2_grpc.VerifierServiceAsyncStub) -> None:
        """Handshake, then serve the stream; returns when the verifier ends it, raises when it breaks."""
        info = await stub.GetInfo(verifier_pb2.VerifierServiceGetInfoRequest(), timeout=HANDSHAKE_SECONDS)
        model = ServedModel.from_info(info)
        self._accept(model)
        self.model = model
        self.load = info.load
        call = stub.Decode(None)
        writer = reader = None
        try:
            # The pool goes first: a sequence may name a drafter only when the verifier knows it.
            await call.write(verifier_pb2.DecodeRequest(drafters=self._pool))
            self.is_ready = True
            logger.info("connected to verifier %s, model %s", self.address, model.name)
            self._on_change()
            writer = asyncio.create_task(self._write(call))
            reader = asyncio.create_task(self._read(call))
            done, _ = await asyncio.wait({writer, reader}, return_when=asyncio.FIRST_COMPLETED)
            # The reader knows the status of a broken stream, the writer only that it is broken.
            await (reader if reader in done or await _ends_soon(reader) else writer)
        finally:
            for task in (writer, reader):
                if task is not None:
                    task.cancel()
                    with contextlib.suppress(asyncio.CancelledError, Exception):
                        await task
            call.cancel()

    async def _write(
        self, call: grpc.aio.StreamStreamCall[verifier_pb2.DecodeRequest, verifier_pb2.DecodeResponse]
    ) -> None:
        while True:
            await self._has_outgoing.wait()
            await call.write(self._next_frame())

    def _next_frame(self) -> verifier_pb2.DecodeRequest:
        frame = verifier_pb2.DecodeRequest(closes=self._closes)
        self._closes = []
        size = 0
        while self._opens and size < FRAME_BYTES:
            sequence_id = next(iter(self._opens))
            message = self._opens.pop(sequence_id)
            size += len(message.token_ids)
            frame.opens.append(message)
        if not self._opens:
            self._has_outgoing.clear()
        return frame

    async def _read(
        self, call: grpc.aio.StreamStreamCall[verifier_pb2.DecodeRequest, verifier_pb2.DecodeResponse]
    ) -> None:
        async for frame in call:
            for update in frame.updates:
                # Updates of a sequence that was just closed may still be on their way.
                decoding = self._decodings.get(update.sequence_id)
                if decoding is None:
                    continue
                if update.HasField("ended"):
                    del self._decodings[update.sequence_id]
                decoding.deliver(update)
            if frame.HasField("load"):
                self.load = frame.load
            if frame.drafters:
                self.drafters.update({status.address: status for status in frame.drafters})
                self._on_change()

    def _close(self, decoding: Decoding) -> None:
        if self._decodings.get(decoding.sequence_id) is not decoding:
            return
        del self._decodings[decoding.sequence_id]
        # Without its opening on the way, the verifier never hears of the sequence.
        if self._opens.pop(decoding.sequence_id, None) is None:
            self._closes.append(decoding.sequence_id)
            self._has_outgoing.set()

    def _lose(self, problem: str) -> None:
        self.is_ready = False
        self.model = None
        self.drafters.clear()
        self._opens.clear()
        self._closes.clear()
        self._has_outgoing.clear()
        decodings, self._decodings = self._decodings, {}
        for decoding in decodings.values():
            decoding.fail(UnavailableError(f"lost the verifier {self.address}: {problem}", retry_delay_seconds=1.0))
        self._on_change()


async def _ends_soon(task: asyncio.Task[None]) -> bool:
    done, _ = await asyncio.wait({task}, timeout=1.0)
    return bool(done)


def _describe(error: OutriderError | grpc.aio.AioRpcError) -> str:
    if isinstance(error, OutriderError):
        return error.message
    return f"{error.code().name}: {error.details()}"
