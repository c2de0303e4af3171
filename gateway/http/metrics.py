"""Metrics on the HTTP port, the same text as on the port that `metrics_listen` names."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from gateway.metrics import GatewayMetrics

METRICS_PATH = "/metrics"


def metrics_routes(metrics: GatewayMetrics | None) -> list[BaseRoute]:
    """`/metrics`, where there are any."""
    if metrics is None or not metrics.has_text:
        return []

    # Not `async`: making the text takes milliseconds, which a thread spends better than the event loop.
    def text(request: Request) -> Response:
        body, content_type = metrics.render()
        return Response(body, headers={"content-type": content_type})

    return [Route(METRICS_PATH, text)]
