"""`python -m verifier_service`: run one verifier."""

from __future__ import annotations

import sys

from engine.device import resolve_device
from outrider.service.busy_poll import resolve_busy_poll
from outrider.service.logs import set_up_logging
from outrider.service.serving import Registration, Server, run
from outrider.service.settings import BadSettingsError
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


def main(arguments: list[str]) -> int:
    """Run until told to stop; the process's exit status."""
    try:
        settings = VerifierSettings.load(arguments, program="python -m verifier_service")
        set_up_logging(settings.log_level, "verifier", settings.log_format)
        metrics = VerifierMetrics.from_environment(is_scraped=settings.metrics_listen is not None)
        telemetry = Telemetry.from_environment("verifier")
        busy_poll_seconds = resolve_busy_poll(
            settings.busy_poll_seconds, has_gpu=resolve_device(settings.device).type == "cuda"
        )
        return run(
            lambda: make_server(settings, telemetry, metrics, busy_poll_seconds=busy_poll_seconds),
            busy_poll_seconds=busy_poll_seconds,
        )
    except (BadSettingsError, ValueError) as error:
        print(f"verifier: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
