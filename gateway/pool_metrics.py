"""Reads the gateway's state for its metrics, whenever somebody asks."""

from __future__ import annotations

from collections import Counter

from gateway.admission import Admission
from gateway.metrics import GatewayMetrics
from gateway.verifier_link import VerifierLink
from gateway.verifier_pool import VerifierPool
from outrider.service.instruments import Labels


def follow(metrics: GatewayMetrics, admission: Admission, pool: VerifierPool) -> None:
    """Let the instruments show what these two know; they are read from other threads too."""
    metrics.requests_running.follow(lambda: {(): admission.num_running})
    metrics.requests_waiting.follow(lambda: {(): admission.num_waiting})
    metrics.requests_limit.follow(lambda: {(): admission.capacity})
    metrics.refusals.follow(lambda: {(reason,): num for reason, num in admission.refusals.copy().items()})

    def verifiers() -> dict[Labels, float]:
        found = Counter(_state(link) for link in pool.links)
        return {labels: found[labels[0]] for labels in metrics.verifiers.instrument.known_labels}

    def drafters() -> dict[Labels, float]:
        found = Counter("ready" if member.is_ready else "lost" for member in pool.drafter_members())
        return {labels: found[labels[0]] for labels in metrics.drafters.instrument.known_labels}

    metrics.verifiers.follow(verifiers)
    metrics.drafters.follow(drafters)


def _state(link: VerifierLink) -> str:
    if not link.is_connected:
        return "lost"
    return "ready" if link.is_ready else "draining"
