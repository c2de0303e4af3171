"""`python -m gateway`: run the gateway until SIGTERM."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from gateway.gateway import make_server
from gateway.metrics import GatewayMetrics
from gateway.settings import GatewaySettings
from gateway.tokenizer import Tokenizer
from gateway.trace_sampler import limited
from outrider.service.logs import set_up_logging
from outrider.service.serving import run
from outrider.service.settings import BadSettingsError
from outrider.service.telemetry import Telemetry


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the gateway; the process's exit status, 2 for bad settings."""
    try:
        settings = GatewaySettings.load(sys.argv[1:] if arguments is None else arguments, program="python -m gateway")
        tokenizer = Tokenizer.from_directory(settings.tokenizer) if settings.tokenizer is not None else None
        metrics = GatewayMetrics.from_environment(is_scraped=settings.serves_metrics)
        telemetry = Telemetry.from_environment("gateway", wrap_sampler=limited(settings.max_traces_per_second))
    except (BadSettingsError, ValueError) as error:
        print(f"gateway: {error}", file=sys.stderr)
        return 2
    set_up_logging(settings.log_level, "gateway", settings.log_format)
    try:
        return run(lambda: make_server(settings, tokenizer, telemetry, metrics))
    except BadSettingsError as error:
        print(f"gateway: {error}", file=sys.stderr)
        return 2
    finally:
        telemetry.shutdown()


if __name__ == "__main__":
    sys.exit(main())
