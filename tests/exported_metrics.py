"""What the services' Prometheus endpoints export, from the instruments themselves."""

from __future__ import annotations

from drafter_service.metrics import DrafterMetrics
from gateway.metrics import GatewayMetrics
from outrider.service.instruments import Instrument
from verifier_service.metrics import VerifierMetrics

# Of every process, from prometheus_client and OpenTelemetry.
OF_EVERY_PROCESS = frozenset(
    {
        "process_cpu_seconds_total",
        "process_max_fds",
        "process_open_fds",
        "process_resident_memory_bytes",
        "process_start_time_seconds",
        "process_virtual_memory_bytes",
        "target_info",
    }
)


def instruments() -> list[Instrument]:
    """Every instrument of every service."""
    services = (GatewayMetrics(), VerifierMetrics(), DrafterMetrics())
    return [made.instrument for service in services for made in service.instruments]


def exported_names() -> frozenset[str]:
    """Every name that a query may use: of counters with `_total`, of histograms with `_bucket`, `_sum` and `_count`."""
    return OF_EVERY_PROCESS | {name for instrument in instruments() for name in instrument.sample_names}
