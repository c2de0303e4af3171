"""One gateway's Decode stream, as the event loop holds it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from engine.telemetry import Telemetry, context_of, traceparent_of
from outrider.v1 import common_pb2, generation_pb2, verifier_pb2
from verifier_service.events import SpanRecord


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

    def start_span(self, opening: verifier_pb2.OpenDecoding) -> str:
        """Begin the span of a sequence; the traceparent for what belongs below it, empty when it is not traced."""
        if not self._telemetry.is_enabled:
            # The drafter may trace where we do not.
            return opening.traceparent
        parent = context_of(opening.traceparent)
        if parent is None:
            return ""
        self.end_span(opening.sequence_id, "the gateway used the sequence's id again")
        span = self._telemetry.tracer.start_span(
            f"decode {self._model}",
            context=parent,
            kind=SpanKind.SERVER,
            attributes={"outrider.request_id": opening.request_id, "gen_ai.request.model": self._model},
        )
        if opening.drafter_address:
            span.set_attribute("outrider.drafter.address", opening.drafter_address)
        self._spans[opening.sequence_id] = span
        return traceparent_of(span)

    def record(self, record: SpanRecord) -> None:
        """Make a span of a part of a sequence's work that is over."""
        parent = self._spans.get(record.sequence_id)
        if parent is None:
            return
        context = context_of(traceparent_of(parent))
        attributes: Mapping[str, str | int | float] = record.attributes
        span = self._telemetry.tracer.start_span(
            record.name, context=context, start_time=record.start_ns, attributes=attributes
        )
        span.end(record.end_ns)

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
            reason = common_pb2.FallbackReason.Name(fallback.reason)
            span.add_event(
                "outrider.fallback",
                {
                    "outrider.fallback.reason": reason.removeprefix("FALLBACK_REASON_"),
                    "outrider.position": fallback.position,
                },
            )
        if update.HasField("ended"):
            if update.ended.HasField("error"):
                self.end_span(update.sequence_id, update.ended.error.message)
            else:
                name = generation_pb2.FinishReason.Name(update.ended.finish_reason)
                span.set_attribute("outrider.finish_reason", name.removeprefix("FINISH_REASON_"))
                self.end_span(update.sequence_id)
