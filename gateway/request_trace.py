"""The span of one request, with the attributes of OpenTelemetry's conventions for generative AI."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry import trace
from opentelemetry.trace import SpanKind, Status, StatusCode

from gateway.request_metrics import RequestMetrics
from outrider.protocol.verification import Verification
from outrider.protocol.words import word
from outrider.service.logs import Subject, about
from outrider.service.telemetry import Telemetry, context_of, traceparent_of
from outrider.v1 import common_pb2, generation_pb2

logger = logging.getLogger(__name__)

OPERATION = "text_completion"
# What is shorter is not worth a span of its own.
MIN_SPAN_NS = 1_000_000
# A client that lets a piece of its answer wait for so long gets an event, the first few times.
SLOW_CLIENT_SECONDS = 0.1
MAX_SLOW_CLIENT_EVENTS = 16

# The conventions' words; both kinds of stop token are a plain stop.
FINISH_REASONS = {
    generation_pb2.FINISH_REASON_EOS: "stop",
    generation_pb2.FINISH_REASON_STOP_TOKEN: "stop",
    generation_pb2.FINISH_REASON_STOP_STRING: "stop",
    generation_pb2.FINISH_REASON_LENGTH: "length",
}

# What the conventions for RPC count as the server's own failure; the rest is the caller's affair.
SERVER_FAULTS = frozenset(
    {
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)


@dataclass
class RequestTrace:
    """Writes what happens to a request into its span, if it has one, and one line about its end into the log."""

    telemetry: Telemetry
    span: trace.Span | None = None
    has_prompts: bool = False
    # Of the request's trace, sampled or not: for the services below and for logs; empty where nothing traces.
    traceparent: str = ""
    # The conventions' word for what the request asks for.
    operation: str = OPERATION
    # Set by the generator where somebody reads the metrics.
    metrics: RequestMetrics | None = None
    _client_wait_seconds: float = 0.0
    _num_slow_deliveries: int = 0
    _has_first_token: bool = False
    _request_id: str = ""
    _caller: str = ""
    _finished: generation_pb2.Finished | None = None

    @classmethod
    def start(
        cls, telemetry: Telemetry, *, model: str, parent: str, attributes: Mapping[str, Any], has_prompts: bool = False
    ) -> RequestTrace:
        """Begin the span of a request below the client's `parent` traceparent, which may be empty."""
        if not telemetry.is_enabled:
            return cls(telemetry)
        operation = str(attributes.get("gen_ai.operation.name", OPERATION))
        span = telemetry.tracer.start_span(
            f"{operation} {model}" if model else operation,
            context=context_of(parent),
            kind=SpanKind.SERVER,
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "outrider",
                "gen_ai.request.model": model,
                "gen_ai.request.stream": True,
                **attributes,
            },
        )
        # The span of a trace that is not sampled only has ids: they go on, so that nothing below samples it either.
        return cls(
            telemetry,
            span if span.is_recording() else None,
            has_prompts,
            traceparent_of(span),
            operation,
        )

    def called_by(self, caller: str) -> None:
        """The name of who calls, where the gateway asks for one."""
        self._caller = caller
        if self.span is not None and caller:
            self.span.set_attribute("outrider.caller", caller)

    def requested(self, request: generation_pb2.GenerateRequest, *, request_id: str) -> None:
        """A request that passed the checks."""
        self._request_id = request_id
        if self.span is None:
            return
        sampling, stopping = request.sampling, request.stopping
        # Without the seed: who knows it can predict tokens, and repeat them.
        attributes: dict[str, Any] = {"gen_ai.response.id": request_id}
        for name in ("temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty"):
            if sampling.HasField(name):
                # Conventions have all of these as doubles; a float32 is shown as it was meant.
                attributes[f"gen_ai.request.{name}"] = float(f"{getattr(sampling, name):.7g}")
        if stopping.HasField("max_tokens"):
            attributes["gen_ai.request.max_tokens"] = stopping.max_tokens
        if stopping.stop and self.has_prompts:
            # Text of the client's, as a prompt is.
            attributes["gen_ai.request.stop_sequences"] = list(stopping.stop)
        self.span.set_attributes(attributes)
        if self.has_prompts and request.prompt:
            self.span.set_attribute("gen_ai.input.messages", _messages("user", request.prompt))

    def queued(self, started_ns: int, ended_ns: int) -> None:
        """The request waited for a place between these times of `time.time_ns`, in the end perhaps in vain."""
        if self.metrics is not None:
            self.metrics.queued((ended_ns - started_ns) * 1e-9)
        self._child("admission", started_ns, ended_ns, {})

    def tokenized(self, started_ns: int, ended_ns: int, num_tokens: int) -> None:
        """The prompt was tokenized between these times of `time.time_ns`."""
        self._child("tokenize", started_ns, ended_ns, {"outrider.num_prompt_tokens": num_tokens})

    def routed(self, verifier: str, drafter: str) -> None:
        """The services that the sequence is opened with; no drafter when empty."""
        if self.span is None:
            return
        attributes = {"outrider.verifier.address": verifier, "outrider.drafter.address": drafter}
        self.span.set_attributes(attributes)
        self.span.add_event("outrider.routed", attributes)

    def refused_by(self, verifier: str, error: Exception) -> None:
        """A verifier did not take the sequence, which goes on to another one."""
        if self.span is not None:
            self.span.add_event(
                "outrider.rerouted", {"outrider.verifier.address": verifier, "exception.message": str(error)}
            )

    def sending(self) -> float:
        """A piece of the answer is on its way to the client; the time to hand to `sent`."""
        if self.span is not None and not self._has_first_token:
            self._has_first_token = True
            self.span.add_event("outrider.first_token")
        return time.monotonic()

    def sent(self, since: float) -> None:
        """The client's connection has taken what was sent at `since`: until then, it held the request up."""
        if self.span is None:
            return
        seconds = time.monotonic() - since
        self._client_wait_seconds += seconds
        if seconds >= SLOW_CLIENT_SECONDS and self._num_slow_deliveries < MAX_SLOW_CLIENT_EVENTS:
            self._num_slow_deliveries += 1
            self.span.add_event("outrider.slow_client", {"outrider.client_wait_seconds": seconds})

    def fell_back(self, fallback: common_pb2.Fallback) -> None:
        """The sequence went on without a drafter."""
        if self.metrics is not None:
            self.metrics.fell_back(fallback.reason)
        if self.span is None:
            return
        reason = word(common_pb2.FallbackReason, fallback.reason)
        self.span.add_event(
            "outrider.fallback",
            {"outrider.fallback.reason": reason, "outrider.fallback.position": fallback.position},
        )

    def finished(self, finished: generation_pb2.Finished, model: str, text: str) -> None:
        """The last message to the client; `text` is kept only where prompts are traced."""
        self._finished = finished
        if self.metrics is not None:
            self.metrics.finished(finished)
        if self.span is None:
            return
        speculation, timings = finished.speculation, finished.timings
        reason = FINISH_REASONS[finished.finish_reason]
        verification = Verification.from_message(speculation.verification)
        attributes: dict[str, Any] = {
            "gen_ai.response.model": model,
            "gen_ai.response.finish_reasons": [reason],
            "gen_ai.usage.input_tokens": finished.usage.num_prompt_tokens,
            "gen_ai.usage.output_tokens": finished.usage.num_output_tokens,
            "outrider.num_steps": speculation.num_steps,
            "outrider.num_draft_tokens": speculation.num_draft_tokens,
            "outrider.num_accepted_tokens": speculation.num_accepted_tokens,
            "outrider.num_accepted_per_position": list(speculation.num_accepted_per_position),
            "outrider.queue_seconds": timings.queue_seconds,
            "outrider.prefill_seconds": timings.prefill_seconds,
            "outrider.time_to_first_token_seconds": timings.time_to_first_token_seconds,
        }
        if verification is not None:
            attributes["outrider.verification"] = verification.value
        if speculation.num_draft_tokens:
            attributes["outrider.acceptance_rate"] = speculation.num_accepted_tokens / speculation.num_draft_tokens
        if speculation.num_steps:
            attributes["outrider.mean_acceptance_length"] = finished.usage.num_output_tokens / speculation.num_steps
        self.span.set_attributes(attributes)
        if self.has_prompts:
            self.span.set_attribute("gen_ai.output.messages", _messages("assistant", text, finish_reason=reason))

    def end(self, code: grpc.StatusCode, message: str = "") -> None:
        """The call ended with this status."""
        with about(Subject(self._request_id, traceparent=self.traceparent)):
            self._log(code, message)
        if self.metrics is not None:
            self.metrics.ended(code)
        if self.span is None:
            return
        self.span.set_attribute("rpc.response.status_code", code.name)
        self.span.set_attribute("outrider.client_wait_seconds", self._client_wait_seconds)
        if code is not grpc.StatusCode.OK:
            self.span.set_attribute("error.type", code.name)
        if code in SERVER_FAULTS:
            self.span.set_status(Status(StatusCode.ERROR, message))
        self.span.end()

    def _log(self, code: grpc.StatusCode, message: str) -> None:
        level = logging.WARNING if code in SERVER_FAULTS else logging.INFO
        if not logger.isEnabledFor(level):
            return
        caller = {"caller": self._caller} if self._caller else {}
        if self._finished is None:
            # Messages about bad input may quote it: the client gets to read them, the log does not.
            reason = "" if code is grpc.StatusCode.INVALID_ARGUMENT else message
            logger.log(level, "a request ended with %s%s", code.name, f": {reason}" if reason else "", extra=caller)
            return
        usage, timings = self._finished.usage, self._finished.timings
        numbers = {
            "num_prompt_tokens": usage.num_prompt_tokens,
            "num_output_tokens": usage.num_output_tokens,
            "time_to_first_token_seconds": round(timings.time_to_first_token_seconds, 4),
            "total_seconds": round(timings.total_seconds, 4),
        }
        logger.log(level, "a request ended with %s", code.name, extra={**caller, **numbers})

    def _child(self, name: str, started_ns: int, ended_ns: int, attributes: Mapping[str, Any]) -> None:
        if self.span is None or ended_ns - started_ns < MIN_SPAN_NS:
            return
        context = trace.set_span_in_context(self.span)
        child = self.telemetry.tracer.start_span(name, context=context, start_time=started_ns, attributes=attributes)
        child.end(ended_ns)


def _messages(role: str, text: str, **more: str) -> str:
    return json.dumps([{"role": role, "parts": [{"type": "text", "content": text}], **more}], ensure_ascii=False)
