"""Counts what happens to one request."""

from __future__ import annotations

import time
from collections import Counter

import grpc

from gateway.metrics import GatewayMetrics
from outrider.protocol.words import ORIGINS, word
from outrider.v1 import common_pb2, generation_pb2

PROVIDER = "outrider"


class RequestMetrics:
    """Made when the request arrives; on the event loop."""

    def __init__(self, metrics: GatewayMetrics, operation: str, model: str) -> None:
        self._metrics = metrics
        self._labels = (operation, PROVIDER, model)
        self._arrived = time.monotonic()
        self._has_token = False
        self._finish_reason = ""

    def queued(self, seconds: float) -> None:
        """The request waited for a place, in the end perhaps in vain."""
        self._metrics.queue_duration.record(max(seconds, 0.0))

    def tokenized(self, num_prompt_tokens: int) -> None:
        """The prompt is about to go to a verifier."""
        self._metrics.prompt_tokens.add(num_prompt_tokens)

    def delivered(self, chunk: generation_pb2.Chunk) -> None:
        """A piece of the answer is about to go to the client."""
        if not chunk.tokens:
            return
        if not self._has_token:
            self._has_token = True
            self._metrics.time_to_first_token.record(time.monotonic() - self._arrived, *self._labels)
        for origin, num_tokens in Counter([token.origin for token in chunk.tokens]).items():
            self._metrics.tokens.add(num_tokens, ORIGINS.get(origin, "plain"))

    def fell_back(self, reason: common_pb2.FallbackReason) -> None:
        """The request went on without a drafter."""
        self._metrics.fallbacks.add(1, word(common_pb2.FallbackReason, reason).lower())

    def finished(self, finished: generation_pb2.Finished) -> None:
        """The answer is complete."""
        self._finish_reason = word(generation_pb2.FinishReason, finished.finish_reason).lower()
        num_more = finished.usage.num_output_tokens - 1
        if num_more > 0:
            seconds = finished.timings.total_seconds - finished.timings.time_to_first_token_seconds
            self._metrics.time_per_output_token.record(max(seconds, 0.0) / num_more, *self._labels)

    def ended(self, code: grpc.StatusCode) -> None:
        """Nothing more happens to the request; called once."""
        is_ok = code is grpc.StatusCode.OK and bool(self._finish_reason)
        seconds = time.monotonic() - self._arrived
        self._metrics.request_duration.record(seconds, *self._labels, "" if is_ok else code.name)
        self._metrics.requests_ended.add(1, self._finish_reason if is_ok else code.name.lower())
