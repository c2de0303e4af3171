"""The tables of docs/observability.md that say what each service measures, from the instruments themselves.

`python -m tests.metric_rows` prints them.
"""

from __future__ import annotations

from drafter_service.metrics import DrafterMetrics
from gateway.metrics import GatewayMetrics
from outrider.service.instruments import Instrument
from outrider.service.metrics import ServiceMetrics
from verifier_service.metrics import VerifierMetrics

SERVICES: dict[str, type[ServiceMetrics]] = {
    "Gateway": GatewayMetrics,
    "Verifier": VerifierMetrics,
    "Drafter": DrafterMetrics,
}
HEAD = ("| metric | type | unit | labels | |", "|---|---|---|---|---|")
# More values than this are not listed: 32 positions, or all statuses of gRPC.
MAX_VALUES = 10


def rows(service: type[ServiceMetrics]) -> list[str]:
    """One row for each instrument."""
    return [_row(made.instrument) for made in service().instruments]


def _row(about: Instrument) -> str:
    labels = "; ".join(_label(name, values) for name, values in about.labels.items())
    return f"| `{about.name}` | {about.kind} | {about.unit} | {labels} | {about.description} |"


def _label(name: str, values: tuple[str, ...]) -> str:
    return f"`{name}`: {', '.join(values)}" if 0 < len(values) <= MAX_VALUES else f"`{name}`"


def main() -> None:
    """Print the tables."""
    for name, service in SERVICES.items():
        print(f"### {name}\n", *HEAD, *rows(service), "", sep="\n")


if __name__ == "__main__":
    main()
