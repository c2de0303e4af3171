"""The whole service of a verifier, as its process and tests run it."""

from __future__ import annotations

from outrider.service.serving import Registration, Server
from outrider.service.telemetry import Telemetry
from outrider.v1 import verifier_pb2, verifier_pb2_grpc
from verifier_service.metrics import VerifierMetrics
from verifier_service.service import VerifierService
from verifier_service.settings import VerifierSettings
from verifier_service.target import make_target


def make_server(
    settings: VerifierSettings,
    telemetry: Telemetry,
    metrics: VerifierMetrics | None = None,
    *,
    busy_poll_seconds: float = 0.0,
) -> Server:
    """The whole service, not yet started."""
    service = VerifierService(settings, make_target(settings), telemetry, metrics, busy_poll_seconds=busy_poll_seconds)
    name = verifier_pb2.DESCRIPTOR.services_by_name["VerifierService"].full_name
    registration = Registration(
        name, lambda server: verifier_pb2_grpc.add_VerifierServiceServicer_to_server(service, server)
    )
    return Server(settings, service, [registration], metrics=metrics)
