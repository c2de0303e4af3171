"""What the gateway measures."""

from __future__ import annotations

import grpc

from outrider.protocol.words import FALLBACKS, ORIGINS
from outrider.service.instruments import SECONDS
from outrider.service.metrics import ServiceMetrics

FINISH_REASONS = ("eos", "stop_token", "stop_string", "length")
STATUSES = tuple(code.name.lower() for code in grpc.StatusCode if code is not grpc.StatusCode.OK)
REFUSALS = (
    *("caller_limit", "request_rate", "token_rate"),
    *("queue_full", "queue_too_long", "queue_timeout", "deadline", "displaced", "draining"),
)
CONVENTION = {"gen_ai.operation.name": (), "gen_ai.provider.name": (), "gen_ai.request.model": (), "error.type": ()}


class GatewayMetrics(ServiceMetrics):
    """The gateway's instruments. Those called gen_ai.* follow OpenTelemetry's conventions for generative AI."""

    service = "gateway"
    peers = ("client", "verifier")

    def __init__(self) -> None:
        super().__init__()
        make = self.instruments
        self.request_duration = make.histogram(
            "gen_ai.server.request.duration",
            "s",
            "From the arrival of a request to its end, the waits for a place and for the client included",
            CONVENTION,
            buckets=SECONDS,
        )
        self.time_to_first_token = make.histogram(
            "gen_ai.server.time_to_first_token",
            "s",
            "From the arrival of a request to its first token",
            {name: () for name in CONVENTION if name != "error.type"},
            buckets=SECONDS,
        )
        self.time_per_output_token = make.histogram(
            "gen_ai.server.time_per_output_token",
            "s",
            "Time for each token after the first, on average over a request that finished",
            {name: () for name in CONVENTION if name != "error.type"},
            buckets=SECONDS,
        )
        self.queue_duration = make.histogram(
            "outrider.gateway.queue.duration",
            "s",
            "From the arrival of a request until it had a place, or had waited in vain",
            buckets=SECONDS,
        )
        self.requests_running = make.gauge(
            "outrider.gateway.requests.running", "{request}", "Requests that hold a place"
        )
        self.requests_waiting = make.gauge(
            "outrider.gateway.requests.waiting", "{request}", "Requests that wait for a place"
        )
        self.requests_limit = make.gauge(
            "outrider.gateway.requests.limit", "{request}", "Places: requests that may run at once"
        )
        self.requests_ended = make.counter(
            "outrider.gateway.requests.ended",
            "{request}",
            "Requests that ended, by finish reason or gRPC status",
            {"reason": (*FINISH_REASONS, *STATUSES)},
        )
        self.refusals = make.counter(
            "outrider.gateway.requests.refused",
            "{request}",
            "Requests that were refused a place, by reason",
            {"reason": REFUSALS},
        )
        self.prompt_tokens = make.counter(
            "outrider.gateway.prompt.tokens", "{token}", "Tokens of prompts that were sent to a verifier"
        )
        self.tokens = make.counter(
            "outrider.gateway.tokens",
            "{token}",
            "Tokens sent to clients, by origin",
            {"origin": tuple(ORIGINS.values())},
        )
        self.fallbacks = make.counter(
            "outrider.gateway.fallbacks",
            "{request}",
            "Requests that went on without a drafter, by reason",
            {"reason": tuple(FALLBACKS.values())},
        )
        self.verifiers = make.gauge(
            "outrider.gateway.verifiers", "{verifier}", "Verifiers by state", {"state": ("ready", "draining", "lost")}
        )
        self.drafters = make.gauge(
            "outrider.gateway.drafters", "{drafter}", "Drafters by state", {"state": ("ready", "lost")}
        )
