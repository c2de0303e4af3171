"""One gateway's Decode stream, as the event loop holds it."""

from __future__ import annotations

import asyncio

from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context

from outrider.protocol.verification import Verification
from outrider.protocol.words import word
from outrider.service.step_spans import EventRecord
from outrider.service.telemetry import Telemetry, context_of, is_sampled, traceparent_of
from outrider.v1 import common_pb2, generation_pb2, verifier_pb2
from verifier_service.events import SequenceRecords


class Session:
    """The frames that wait to be sent to a gateway, and the spans of its sequences."""

    def __init__(self, session_id: int, model: str, telemetry: Telemetry) -> None:
        self.session_id = session_id
        self.drafter_addresses: frozenset[str] = frozenset()
        # None ends the stream.
        self.outbox: asyncio.Queue[verifier_pb2.DecodeResponse | None] = asyncio.Queue()
        self._model = model
        self._telemetry = telemetry
        self._spans: dict[int, Span] = {}

    def send(self, frame: verifier_pb2.DecodeResponse) -> None:
        """Queue a frame, and end the spans of the sequences that it ends."""
        if self._spans:
            for update in frame.updates:
                span = self._spans.get(update.sequence_id)
                if span is not None:
                    self._note(span, update)
        self.outbox.put_nowait(frame)

    def start_span(self, opening: verifier_pb2.OpenDecoding, verification: Verification) -> str:
        """Begin the span of a sequence whose trace is sampled; the traceparent for what belongs below it."""
        if not self._telemetry.is_enabled or not is_sampled(opening.traceparent):
            # The drafter may trace where we do not.
            return opening.traceparent
        self.end_span(opening.sequence_id, "the gateway used the sequence's id again")
        span = self._telemetry.tracer.start_span(
            f"decode {self._model}",
            context=context_of(opening.traceparent),
            kind=SpanKind.SERVER,
            attributes={
                "outrider.request_id": opening.request_id,
                "outrider.verification": verification.value,
                "gen_ai.request.model": self._model,
            },
        )
        if not span.is_recording():
            # A sampler of the operator's own.
            return traceparent_of(span)
        if opening.drafter_address:
            span.set_attribute("outrider.drafter.address", opening.drafter_address)
        self._spans[opening.sequence_id] = span
        return traceparent_of(span)

    def is_tracing(self, sequence_id: int) -> bool:
        """Whether the sequence has a span."""
        return sequence_id in self._spans

    def record(self, noted: SequenceRecords) -> None:
        """Make spans and events of what the engine noted for a sequence."""
        parent = self._spans.get(noted.sequence_id)
        if parent is None:
            return
        context = set_span_in_context(parent)
        for record in noted.records:
            if isinstance(record, EventRecord):
                parent.add_event(record.name, record.attributes, record.time_ns)
                continue
            span = self._telemetry.tracer.start_span(
                record.name, context=context, start_time=record.start_ns, attributes=record.attributes
            )
            span.end(record.end_ns)
        if noted.is_closed:
            self.end_span(noted.sequence_id)

    def end_span(self, sequence_id: int, description: str = "") -> None:
        """End the span of a sequence, if there is one; with a description it counts as failed."""
        span = self._spans.pop(sequence_id, None)
        if span is not None:
            if description:
                span.set_status(Status(StatusCode.ERROR, description))
            span.end()

    def close(self) -> None:
        """End what is open: the stream is over."""
        for sequence_id in list(self._spans):
            self.end_span(sequence_id, "the gateway's stream ended")

    def _note(self, span: Span, update: verifier_pb2.SequenceUpdate) -> None:
        for fallback in update.fallbacks:
            span.add_event(
                "outrider.fallback",
                {
                    "outrider.fallback.reason": word(common_pb2.FallbackReason, fallback.reason),
                    "outrider.fallback.position": fallback.position,
                },
            )
        if update.HasField("ended"):
            if update.ended.HasField("error"):
                self.end_span(update.sequence_id, update.ended.error.message)
            else:
                reason = word(generation_pb2.FinishReason, update.ended.finish_reason)
                span.set_attribute("outrider.finish_reason", reason)
                self.end_span(update.sequence_id)
