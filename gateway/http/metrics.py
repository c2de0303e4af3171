"""Metrics on the HTTP port, the same text as on the port that `metrics_listen` names."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from gateway.auth import Authenticate
from gateway.http.errors import from_exception
from gateway.metrics import GatewayMetrics
from outrider.protocol.errors import UnauthenticatedError

METRICS_PATH = "/metrics"


def metrics_routes(metrics: GatewayMetrics | None, authenticate: Authenticate) -> list[BaseRoute]:
    """`/metrics`, where there are any, for those who may call the gateway."""
    if metrics is None or not metrics.has_text:
        return []

    # Not `async`: making the text takes milliseconds, which a thread spends better than the event loop.
    def text(request: Request) -> Response:
        try:
            authenticate(request.headers.get("authorization"))
        except UnauthenticatedError as error:
            return from_exception(error, {}).response()
        body, content_type = metrics.render()
        return Response(body, headers={"content-type": content_type})

    return [Route(METRICS_PATH, text)]
