"""The program of a service with a model: settings, logs, metrics, traces, then its server until told to stop."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from outrider.service.busy_poll import resolve_busy_poll
from outrider.service.logs import set_up_logging
from outrider.service.metrics import ServiceMetrics
from outrider.service.serving import Server, run
from outrider.service.settings import BadSettingsError, ModelSettings
from outrider.service.telemetry import Telemetry

SettingsT = TypeVar("SettingsT", bound=ModelSettings)
MetricsT = TypeVar("MetricsT", bound=ServiceMetrics)
TakesSettings = TypeVar("TakesSettings", bound=ModelSettings, contravariant=True)
TakesMetrics = TypeVar("TakesMetrics", bound=ServiceMetrics, contravariant=True)


class MakeServer(Protocol[TakesSettings, TakesMetrics]):
    """Makes the whole service, not yet started. May raise BadSettingsError."""

    def __call__(
        self, settings: TakesSettings, telemetry: Telemetry, metrics: TakesMetrics, *, busy_poll_seconds: float
    ) -> Server: ...


def run_model_service(
    arguments: Sequence[str],
    settings_type: type[SettingsT],
    metrics_type: type[MetricsT],
    prepare: Callable[[SettingsT], tuple[MakeServer[SettingsT, MetricsT], bool]],
) -> int:
    """Run until told to stop; the process's exit status, 2 for settings that are no good.

    `prepare` imports what takes long, once the settings are known to be good, and returns what makes the server and
    whether its model has a GPU.
    """
    name = metrics_type.service
    try:
        settings = settings_type.load(arguments, program=f"python -m {name}_service")
        set_up_logging(settings.log_level, name, settings.log_format)
        metrics = metrics_type.from_environment(is_scraped=settings.metrics_listen is not None)
        telemetry = Telemetry.from_environment(name)
        make_server, has_gpu = prepare(settings)
        seconds = resolve_busy_poll(settings.busy_poll_seconds, has_gpu=has_gpu)
        return run(
            lambda: make_server(settings, telemetry, metrics, busy_poll_seconds=seconds), busy_poll_seconds=seconds
        )
    except (BadSettingsError, ValueError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
