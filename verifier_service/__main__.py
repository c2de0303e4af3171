"""`python -m verifier_service`: run one verifier."""

from __future__ import annotations

import logging
import sys

from engine.model_loader import ModelLoadError, check_files, import_transformers
from outrider.service.busy_poll import resolve_busy_poll
from outrider.service.collector import large_imports
from outrider.service.logs import set_up_logging
from outrider.service.serving import run
from outrider.service.settings import BadSettingsError
from outrider.service.telemetry import Telemetry
from verifier_service.metrics import VerifierMetrics
from verifier_service.settings import VerifierSettings

logger = logging.getLogger(__name__)


def main(arguments: list[str]) -> int:
    """Run until told to stop; the process's exit status."""
    try:
        settings = VerifierSettings.load(arguments, program="python -m verifier_service")
        set_up_logging(settings.log_level, "verifier", settings.log_format)
        metrics = VerifierMetrics.from_environment(is_scraped=settings.metrics_listen is not None)
        telemetry = Telemetry.from_environment("verifier")
        check_files(settings.model)
        with large_imports():
            import_transformers()
        # Not above: these import torch, and what is wrong with the settings is told before seconds go by.
        from engine.device import resolve_device
        from verifier_service.server import make_server

        busy_poll_seconds = resolve_busy_poll(
            settings.busy_poll_seconds, has_gpu=resolve_device(settings.device).type == "cuda"
        )
        return run(
            lambda: make_server(settings, telemetry, metrics, busy_poll_seconds=busy_poll_seconds),
            busy_poll_seconds=busy_poll_seconds,
        )
    except ModelLoadError as error:
        logger.error("cannot start: %s", error)
        return 1
    except (BadSettingsError, ValueError) as error:
        print(f"verifier: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
