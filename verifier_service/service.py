"""The verifier's gRPC face: parse, hand to the engine, translate back."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc

from engine.gpu_memory import gpu_memory
from kernels.random_scheme import RANDOM_SCHEME
from outrider.protocol.errors import OutriderError, UnavailableError, code_number
from outrider.protocol.fingerprint import model_revision, tokenizer_digest
from outrider.protocol.handshake import DraftLimits
from outrider.protocol.wire import PROTOCOL_VERSION
from outrider.service.engine_thread import EngineThread
from outrider.service.instruments import Labels
from outrider.service.security import make_dial
from outrider.service.telemetry import Telemetry
from outrider.v1 import common_pb2, verifier_pb2, verifier_pb2_grpc
from verifier_service.decoding import TargetLimits, parse_opening
from verifier_service.drafter_link import DrafterLink
from verifier_service.drafter_pool import check_pool
from verifier_service.engine import VerifierEngine
from verifier_service.events import (
    Event,
    LinkRetired,
    OpeningRefused,
    SequenceOpened,
    SequencesClosed,
    SessionClosed,
    StepOutput,
)
from verifier_service.metrics import DRAFTER_STATES, VerifierMetrics
from verifier_service.sequence_trace import SequenceTrace
from verifier_service.session import Session
from verifier_service.settings import VerifierSettings
from verifier_service.step_metrics import StepMetrics
from verifier_service.target import Target

logger = logging.getLogger(__name__)


class VerifierService(verifier_pb2_grpc.VerifierServiceServicer):
    """Servicer and component in one: gateways' sessions on one side, links to drafters on the other."""

    def __init__(
        self,
        settings: VerifierSettings,
        target: Target,
        telemetry: Telemetry,
        metrics: VerifierMetrics | None = None,
        *,
        busy_poll_seconds: float = 0.0,
    ) -> None:
        self._settings = settings
        self._dial = make_dial(settings)
        self._target = target
        self._telemetry = telemetry
        # None where nobody reads them.
        self._metrics = metrics if metrics is not None and metrics.is_enabled else None
        self._engine = VerifierEngine(
            target,
            max_running=settings.max_running,
            max_waiting=settings.max_waiting,
            split_from=settings.split_from,
            draft_timeout=settings.draft_timeout_seconds,
            is_polling=busy_poll_seconds > 0,
            metrics=StepMetrics(self._metrics) if self._metrics is not None else None,
        )
        self._thread: EngineThread[Event, StepOutput] = EngineThread(
            self._engine,
            self._deliver,
            self._on_engine_failure,
            "verifier-engine",
            busy_poll_seconds=busy_poll_seconds,
        )
        self._session_ids = itertools.count(1)
        self._link_sequence_ids = itertools.count(1)
        self._sessions: dict[int, Session] = {}
        self._links: dict[str, DrafterLink] = {}
        # Addresses of those that no gateway names any more, and that still have sequences.
        self._retired: set[str] = set()
        self._stops: set[asyncio.Task[None]] = set()
        self._is_draining = False
        self._has_failed = False

    async def start(self) -> None:
        """Load and warm up."""
        model = self._settings.model
        await self._thread.start()
        if self._metrics is not None:
            device = self._target.device
            self._metrics.gpu_memory.follow(lambda: gpu_memory(device))
            self._metrics.drafters.follow(self._drafters_by_state)
        tokenizer = tokenizer_digest(model)
        self._identity = common_pb2.ModelIdentity(
            protocol_version=PROTOCOL_VERSION,
            name=model.name,
            revision=model_revision(model),
            tokenizer_fingerprint=tokenizer.fingerprint,
            num_token_ids=tokenizer.num_token_ids,
            vocabulary_size=self._target.vocabulary_size,
            max_length=self._target.max_length,
            random_scheme=RANDOM_SCHEME,
        )
        self._limits = TargetLimits(
            vocabulary_size=self._target.vocabulary_size,
            max_length=self._target.max_length,
            eos_token_ids=self._target.eos_token_ids,
            max_draft_tokens=self._settings.max_draft_tokens,
        )

    async def drain(self) -> None:
        """Refuse new sequences and let those that run end."""
        self._is_draining = True
        for session in self._sessions.values():
            session.send(verifier_pb2.DecodeResponse(is_draining=True))
        # It changes on the engine's thread, which knows nothing of this loop's events.
        while self._engine.is_busy and not self._has_failed:  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    async def stop(self) -> None:
        """End all streams and the engine."""
        self._is_draining = True
        for session in self._sessions.values():
            session.outbox.put_nowait(None)
        await asyncio.gather(*self._stops, *(link.stop() for link in self._links.values()))
        self._links.clear()
        await self._thread.stop()
        self._telemetry.shutdown()

    async def GetInfo(
        self, request: verifier_pb2.VerifierServiceGetInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> verifier_pb2.VerifierServiceGetInfoResponse:
        """The handshake, and the state of the engine."""
        return verifier_pb2.VerifierServiceGetInfoResponse(
            identity=self._identity,
            load=self._engine.load_report(),
            drafters=[link.status for link in self._links.values()],
            eos_token_ids=sorted(self._target.eos_token_ids),
            is_draining=self._is_draining,
        )

    async def Decode(
        self,
        request_iterator: AsyncIterator[verifier_pb2.DecodeRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[verifier_pb2.DecodeResponse]:
        """One gateway's stream."""
        session = Session(next(self._session_ids), self._identity.name, self._telemetry)
        self._sessions[session.session_id] = session
        # The first frame names all links and the load, so that the gateway can route before it has sent anything.
        session.send(
            verifier_pb2.DecodeResponse(
                drafters=[link.status for link in self._links.values()],
                load=self._engine.load_report(),
                is_draining=self._is_draining,
            )
        )
        reader = asyncio.create_task(self._read(session, request_iterator))
        try:
            while (frame := await session.outbox.get()) is not None:
                yield frame
            if self._has_failed:
                raise UnavailableError("the verifier's engine failed", retry_delay_seconds=1.0)
            if reader.done():
                # Raises what ended the reading: a frame that did not parse ends the stream with its status.
                reader.result()
        finally:
            # First what cannot be interrupted. A task that is cancelled posts nothing more.
            reader.cancel()
            del self._sessions[session.session_id]
            session.close()
            self._thread.post(SessionClosed(session.session_id))
            await asyncio.wait({reader})
            self._retire_links()

    async def _read(self, session: Session, requests: AsyncIterator[verifier_pb2.DecodeRequest]) -> None:
        try:
            async for frame in requests:
                if frame.HasField("drafters"):
                    check_pool(frame.drafters)
                    self._follow(session, frame.drafters)
                for opening in frame.opens:
                    self._open(session, opening)
                if frame.closes:
                    self._thread.post(SequencesClosed(session.session_id, list(frame.closes)))
        finally:
            session.outbox.put_nowait(None)

    def _open(self, session: Session, opening: verifier_pb2.OpenDecoding) -> None:
        arrived_ns = time.time_ns()
        try:
            if self._is_draining:
                raise UnavailableError("the verifier is draining", retry_delay_seconds=1.0)
            link = self._links.get(opening.drafter_address)
            drafter = link.key_for_new if link else None
            limits = self._limits
            if link is not None and drafter is not None:
                limits = replace(limits, max_draft_tokens=link.limits.max_draft_tokens)
            sequence = parse_opening(
                opening,
                limits=limits,
                session_id=session.session_id,
                link_sequence_id=next(self._link_sequence_ids),
                drafter=drafter,
                arrived_ns=arrived_ns,
            )
        except OutriderError as error:
            self._thread.post(OpeningRefused(session.session_id, opening.sequence_id, _sequence_error(error)))
            return
        if sequence.speculation.drafter is None:
            sequence.fall_back(_reason_without_drafter(opening, link))
        sequence.traceparent = session.start_span(opening)
        if session.is_tracing(opening.sequence_id):
            sequence.trace = SequenceTrace(self._settings.step_spans)
        self._thread.post(SequenceOpened(sequence))

    def _follow(self, session: Session, pool: verifier_pb2.DrafterPool) -> None:
        """Have links to the drafters that the gateway names, and none for long to those that no gateway names."""
        known = session.drafter_addresses
        session.drafter_addresses = frozenset(pool.addresses)
        # Of these the gateway may not have heard, as they were another's alone.
        shared = (session.drafter_addresses & self._links.keys()) - known
        if shared:
            session.send(verifier_pb2.DecodeResponse(drafters=[self._links[address].status for address in shared]))
        for address in session.drafter_addresses & self._retired:
            self._retired.discard(address)
            if (key := self._links[address].key) is not None:
                self._thread.post(LinkRetired(key, is_retired=False))
        if not self._is_draining:
            for address in session.drafter_addresses - self._links.keys():
                self._links[address] = DrafterLink(
                    address,
                    self._identity,
                    DraftLimits(self._settings.max_draft_tokens, self._settings.num_candidates),
                    server_name=pool.server_names.get(address, ""),
                    max_message_bytes=self._settings.max_message_bytes,
                    dial=self._dial,
                    wire_bytes=self._metrics.wire_bytes if self._metrics is not None else None,
                    post=self._thread.post,
                    on_change=self._announce,
                )
                self._links[address].start()
        self._retire_links()

    def _retire_links(self) -> None:
        wanted = frozenset[str]().union(*(session.drafter_addresses for session in self._sessions.values()))
        for address in self._links.keys() - wanted - self._retired:
            if (key := self._links[address].key) is None:
                self._stop_link(address)
            else:
                self._retired.add(address)
                self._thread.post(LinkRetired(key, is_retired=True))

    def _stop_link(self, address: str) -> None:
        self._retired.discard(address)
        # In a task of its own: a link that is told so by its own report cannot wait for its end.
        task = asyncio.create_task(self._links.pop(address).stop())
        if self._metrics is not None:
            self._metrics.forget_drafter(address)
        self._stops.add(task)
        task.add_done_callback(self._stops.discard)

    def _drafters_by_state(self) -> dict[Labels, float]:
        states = Counter(verifier_pb2.DrafterState.Name(link.status.state) for link in list(self._links.values()))
        return {(state,): states[f"DRAFTER_STATE_{state.upper()}"] for state in DRAFTER_STATES}

    def _announce(self, link: DrafterLink) -> None:
        for session in self._sessions.values():
            if link.address in session.drafter_addresses:
                session.send(verifier_pb2.DecodeResponse(drafters=[link.status], load=self._engine.load_report()))
        if link.address in self._retired and link.key is None and self._links.get(link.address) is link:
            # What is left of its sequences does without a drafter by now.
            self._stop_link(link.address)

    def _on_engine_failure(self, error: BaseException) -> None:
        # The engine is gone for good: leave, so that whoever runs the process starts it anew.
        logger.critical("leaving: the engine failed with %r", error)
        self._has_failed = True
        for session in self._sessions.values():
            session.outbox.put_nowait(None)
        os.kill(os.getpid(), signal.SIGTERM)

    def _deliver(self, output: StepOutput) -> None:
        # Drafters first: while their frames travel, the gateways' are packed.
        for key, request in output.link_frames.items():
            if link := self._links.get(key.address):
                link.send(key, request)
        for key in output.silent_links:
            if link := self._links.get(key.address):
                link.drop(key)
        for key in output.idle_links:
            if key.address in self._retired and self._links[key.address].key == key:
                self._stop_link(key.address)
        for records in output.records:
            if session := self._sessions.get(records.session_id):
                session.record(records)
        for session_id, frame in output.session_frames.items():
            if session := self._sessions.get(session_id):
                session.send(frame)


def _reason_without_drafter(opening: verifier_pb2.OpenDecoding, link: DrafterLink | None) -> common_pb2.FallbackReason:
    if not opening.drafter_address and opening.no_drafter_reason:
        return opening.no_drafter_reason
    if link is not None and link.status.state == verifier_pb2.DRAFTER_STATE_INCOMPATIBLE:
        return common_pb2.FALLBACK_REASON_INCOMPATIBLE_DRAFTER
    return common_pb2.FALLBACK_REASON_NO_DRAFTER


def _sequence_error(error: OutriderError) -> verifier_pb2.SequenceError:
    return verifier_pb2.SequenceError(
        code=code_number(error.code), message=error.message, retry_delay_seconds=error.retry_delay_seconds
    )
