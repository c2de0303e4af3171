"""The drafter's gRPC face: parse, hand to the engine, translate back."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import grpc

from drafter_service.drafter import Drafter
from drafter_service.engine import (
    DrafterEngine,
    DraftRecords,
    EngineEvent,
    EngineOutput,
    FrameArrived,
    SessionClosed,
    SessionOpened,
)
from drafter_service.metrics import DrafterMetrics
from engine.gpu_memory import gpu_memory
from kernels.random_scheme import RANDOM_SCHEME
from outrider.protocol.errors import InvalidArgumentError, UnavailableError
from outrider.protocol.handshake import check_compatible
from outrider.protocol.wire import PROTOCOL_VERSION
from outrider.service.engine_thread import EngineThread
from outrider.service.instruments import Labels
from outrider.service.telemetry import Telemetry, context_of
from outrider.v1 import common_pb2, drafter_pb2, drafter_pb2_grpc

logger = logging.getLogger(__name__)


class DrafterService(drafter_pb2_grpc.DrafterServiceServicer):
    """Servicer and component in one: its streams are all that it has to start and to drain."""

    def __init__(
        self,
        drafter: Drafter,
        *,
        max_sequences: int,
        target_revision: str,
        telemetry: Telemetry,
        metrics: DrafterMetrics | None = None,
        busy_poll_seconds: float = 0.0,
        step_spans: int = 32,
    ) -> None:
        self._drafter = drafter
        self._max_sequences = max_sequences
        self._target_revision = target_revision
        self._telemetry = telemetry
        # None where nobody reads them.
        self._metrics = metrics if metrics is not None and metrics.is_enabled else None
        self._engine = DrafterEngine(
            drafter,
            max_sequences=max_sequences,
            is_tracing=telemetry.is_enabled,
            step_spans=step_spans,
            metrics=self._metrics,
        )
        self._thread: EngineThread[EngineEvent, EngineOutput] = EngineThread(
            self._engine, self._deliver, self._on_engine_failure, "drafter-engine", busy_poll_seconds=busy_poll_seconds
        )
        self._session_ids = itertools.count(1)
        self._outboxes: dict[int, asyncio.Queue[drafter_pb2.DraftResponse | None]] = {}
        self._is_draining = False
        self._has_failed = False

    async def start(self) -> None:
        """Load and warm up."""
        await self._thread.start()
        if self._metrics is not None:
            self._follow(self._metrics)

    async def drain(self) -> None:
        """Refuse new streams and sequences and let those that are open end; they would lose their drafter otherwise."""
        self._is_draining = True
        self._engine.refuse_openings()
        for outbox in self._outboxes.values():
            outbox.put_nowait(drafter_pb2.DraftResponse(is_draining=True))
        # The count changes on the engine's thread, which knows nothing of this loop's events.
        while self._engine.num_sequences and not self._has_failed:  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    async def stop(self) -> None:
        """End all streams and the engine."""
        for outbox in self._outboxes.values():
            outbox.put_nowait(None)
        await self._thread.stop()
        self._telemetry.shutdown()

    async def GetInfo(
        self, request: drafter_pb2.DrafterServiceGetInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> drafter_pb2.DrafterServiceGetInfoResponse:
        """The handshake, and how busy the drafter is."""
        return drafter_pb2.DrafterServiceGetInfoResponse(
            identity=self._identity(),
            kind=self._drafter.kind,
            num_sequences=self._engine.num_sequences,
            max_sequences=self._max_sequences,
            num_kv_blocks=self._drafter.num_kv_blocks,
            num_free_kv_blocks=self._drafter.num_free_kv_blocks,
        )

    async def Draft(
        self, request_iterator: AsyncIterator[drafter_pb2.DraftRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[drafter_pb2.DraftResponse]:
        """One verifier's stream."""
        if self._is_draining:
            raise UnavailableError("the drafter is draining", retry_delay_seconds=1.0)
        requests = aiter(request_iterator)
        first = await anext(requests, None)
        if first is None:
            return
        if not first.HasField("identity"):
            raise InvalidArgumentError("identity", "must be set in the first frame of a stream")
        check_compatible(first.identity, self._identity())
        limits = self._drafter.limits.with_offer(first.limits)
        logger.info(
            "drafting for %s: at most %d draft tokens a proposal, %d candidates a draft token",
            first.identity.name or "a target",
            limits.max_draft_tokens,
            limits.max_candidates,
        )
        session_id = next(self._session_ids)
        outbox: asyncio.Queue[drafter_pb2.DraftResponse | None] = asyncio.Queue()
        # Tells the verifier that it was accepted: only now will it send sequences.
        outbox.put_nowait(drafter_pb2.DraftResponse(limits=limits.to_message()))
        self._outboxes[session_id] = outbox
        self._thread.post(SessionOpened(session_id, limits))
        self._thread.post(FrameArrived(session_id, first))
        reader = asyncio.create_task(self._read(session_id, requests, outbox))
        try:
            while (frame := await outbox.get()) is not None:
                yield frame
            if self._has_failed:
                raise UnavailableError("the drafter's engine failed", retry_delay_seconds=1.0)
            if reader.done():
                # Raises what ended the reading: a frame that did not parse ends the stream with its status.
                reader.result()
        finally:
            # First what cannot be interrupted. A task that is cancelled posts nothing more.
            reader.cancel()
            del self._outboxes[session_id]
            self._thread.post(SessionClosed(session_id))
            await asyncio.wait({reader})

    async def _read(
        self,
        session_id: int,
        requests: AsyncIterator[drafter_pb2.DraftRequest],
        outbox: asyncio.Queue[drafter_pb2.DraftResponse | None],
    ) -> None:
        try:
            async for frame in requests:
                self._thread.post(FrameArrived(session_id, frame))
        finally:
            outbox.put_nowait(None)

    def _on_engine_failure(self, error: BaseException) -> None:
        # The engine is gone for good: leave, so that whoever runs the process starts it anew.
        logger.critical("leaving: the engine failed with %r", error)
        self._has_failed = True
        for outbox in self._outboxes.values():
            outbox.put_nowait(None)
        os.kill(os.getpid(), signal.SIGTERM)

    def _deliver(self, output: EngineOutput) -> None:
        if isinstance(output, DraftRecords):
            self._trace(output)
        elif outbox := self._outboxes.get(output.session_id):
            outbox.put_nowait(output.frame)

    def _trace(self, output: DraftRecords) -> None:
        for traceparent, record in output.records:
            span = self._telemetry.tracer.start_span(
                record.name,
                context=context_of(traceparent),
                start_time=record.start_ns,
                attributes=record.attributes,
            )
            span.end(record.end_ns)

    def _follow(self, metrics: DrafterMetrics) -> None:
        drafter = self._drafter
        metrics.verifiers.follow(lambda: {(): len(self._outboxes)})
        metrics.sequences_open.follow(lambda: {(): self._engine.num_sequences})
        metrics.sequences_limit.follow(lambda: {(): self._max_sequences})
        if drafter.num_kv_blocks:

            def kv_blocks() -> dict[Labels, float]:
                num_free = drafter.num_free_kv_blocks
                return {("used",): drafter.num_kv_blocks - num_free, ("free",): num_free}

            metrics.kv_blocks.follow(kv_blocks)
        if (device := drafter.device) is not None:
            metrics.gpu_memory.follow(lambda: gpu_memory(device))

    def _identity(self) -> common_pb2.ModelIdentity:
        return common_pb2.ModelIdentity(
            protocol_version=PROTOCOL_VERSION,
            name=self._drafter.name,
            revision=self._drafter.revision,
            tokenizer_fingerprint=self._drafter.tokenizer.fingerprint,
            num_token_ids=self._drafter.tokenizer.num_token_ids,
            vocabulary_size=self._drafter.vocabulary_size,
            max_length=self._drafter.max_length,
            random_scheme=RANDOM_SCHEME,
            target_revision=self._target_revision,
        )
