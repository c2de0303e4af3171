"""Which exporter the standard OTEL_* variables ask for, for traces and metrics alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Exporter = Literal["otlp", "console", "none"]


def chosen_exporter(environment: Mapping[str, str], signal: Literal["TRACES", "METRICS"]) -> Exporter:
    """What OTEL_{signal}_EXPORTER names; without it `otlp` where an OTLP endpoint is set, and none elsewhere.

    Raises ValueError for an exporter that is not supported, and for OTLP over anything but gRPC.
    """
    endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT")
    has_endpoint = any(environment.get(name) for name in endpoints)
    match environment.get(f"OTEL_{signal}_EXPORTER", "otlp" if has_endpoint else "none"):
        case "none":
            return "none"
        case "console":
            return "console"
        case "otlp":
            protocol = environment.get(
                f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL", environment.get("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
            )
            if protocol != "grpc":
                raise ValueError(f"OTEL_EXPORTER_OTLP_PROTOCOL: {protocol!r} is not supported, only 'grpc' is")
            return "otlp"
        case other:
            raise ValueError(
                f"OTEL_{signal}_EXPORTER: {other!r} is not supported, only 'otlp', 'console' and 'none' are"
            )
