"""`python -m drafter_service`: run one drafter."""

from __future__ import annotations

import sys

from drafter_service.factory import has_gpu, make_drafter
from drafter_service.metrics import DrafterMetrics
from drafter_service.service import DrafterService
from drafter_service.settings import DrafterSettings
from engine.model_loader import ModelLoadError, check_files, import_transformers
from outrider.service.busy_poll import resolve_busy_poll
from outrider.service.collector import large_imports
from outrider.service.logs import set_up_logging
from outrider.service.serving import Registration, Server, run
from outrider.service.settings import BadSettingsError
from outrider.service.telemetry import Telemetry
from outrider.v1 import drafter_pb2, drafter_pb2_grpc


def make_server(
    settings: DrafterSettings,
    telemetry: Telemetry,
    metrics: DrafterMetrics | None = None,
    *,
    busy_poll_seconds: float = 0.0,
) -> Server:
    """The whole service, not yet started. Raises BadSettingsError for what only shows when the drafter is made."""
    service = DrafterService(
        make_drafter(settings),
        max_sequences=settings.max_sequences,
        target_revision=settings.target_revision,
        telemetry=telemetry,
        metrics=metrics,
        busy_poll_seconds=busy_poll_seconds,
        step_spans=settings.step_spans,
    )
    name = drafter_pb2.DESCRIPTOR.services_by_name["DrafterService"].full_name
    registration = Registration(
        name, lambda server: drafter_pb2_grpc.add_DrafterServiceServicer_to_server(service, server)
    )
    return Server(settings, service, [registration], metrics=metrics)


def main(arguments: list[str]) -> int:
    """Run until told to stop; the process's exit status."""
    try:
        settings = DrafterSettings.load(arguments, program="python -m drafter_service")
        set_up_logging(settings.log_level, "drafter", settings.log_format)
        metrics = DrafterMetrics.from_environment(is_scraped=settings.metrics_listen is not None)
        telemetry = Telemetry.from_environment("drafter")
        if settings.kind == "model" and settings.model is not None:
            check_files(settings.model)
            with large_imports():
                import_transformers()
        busy_poll_seconds = resolve_busy_poll(settings.busy_poll_seconds, has_gpu=has_gpu(settings))
        return run(
            lambda: make_server(settings, telemetry, metrics, busy_poll_seconds=busy_poll_seconds),
            busy_poll_seconds=busy_poll_seconds,
        )
    except (BadSettingsError, ModelLoadError, ValueError, OSError) as error:
        print(f"drafter: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
