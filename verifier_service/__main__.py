"""`python -m verifier_service`: run one verifier."""

from __future__ import annotations

import logging
import sys

from engine.model_loader import ModelLoadError, check_files, import_transformers
from outrider.service.collector import large_imports
from outrider.service.model_service import MakeServer, run_model_service
from verifier_service.metrics import VerifierMetrics
from verifier_service.settings import VerifierSettings

logger = logging.getLogger(__name__)


def main(arguments: list[str]) -> int:
    """Run until told to stop; the process's exit status."""
    try:
        return run_model_service(arguments, VerifierSettings, VerifierMetrics, _prepare)
    except ModelLoadError as error:
        logger.error("cannot start: %s", error)
        return 1


def _prepare(settings: VerifierSettings) -> tuple[MakeServer[VerifierSettings, VerifierMetrics], bool]:
    check_files(settings.model)
    with large_imports():
        import_transformers()
    # Not above: these import torch, and what is wrong with the settings is told before seconds go by.
    from engine.device import resolve_device
    from verifier_service.server import make_server

    return make_server, resolve_device(settings.device).type == "cuda"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
