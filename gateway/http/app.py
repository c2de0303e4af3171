"""The HTTP front's application: every route that the gateway serves, put together here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute

from gateway.auth import Authenticate, admit_anyone
from gateway.generator import Generator
from gateway.http.errors import routing_error
from gateway.http.health import health_routes
from gateway.http.metrics import metrics_routes
from gateway.http.openai_routes import openai_routes
from gateway.metrics import GatewayMetrics
from gateway.settings import GatewaySettings
from gateway.tokenizer import Tokenizer
from gateway.verifier_pool import VerifierPool
from outrider.service.telemetry import Telemetry

if TYPE_CHECKING:
    from gateway.dashboard.dashboard import Dashboard


@dataclass(frozen=True)
class Front:
    """What the routes are made of: the gateway's own parts, the same ones that its gRPC front uses."""

    settings: GatewaySettings
    generator: Generator
    pool: VerifierPool
    tokenizer: Tokenizer | None
    telemetry: Telemetry
    # Whether new requests are welcome: false while loading and from the moment of draining.
    is_serving: Callable[[], bool]
    dashboard: Dashboard | None = None
    metrics: GatewayMetrics | None = None
    # Who sends an `Authorization` header. Raises UnauthenticatedError.
    authenticate: Authenticate = admit_anyone

    @property
    def host(self) -> str:
        """What the front listens on, without the port."""
        assert self.settings.http_listen is not None
        return self.settings.http_listen.rpartition(":")[0]


def make_app(front: Front) -> Starlette:
    """The ASGI application. Raises BadSettingsError for a chat template that is not usable."""
    routes: list[BaseRoute] = [*health_routes(front.is_serving), *openai_routes(front)]
    routes += metrics_routes(front.metrics, front.authenticate)
    if front.dashboard is not None:
        from gateway.dashboard.routes import dashboard_routes

        routes += dashboard_routes(front, front.dashboard)
    return Starlette(routes=routes, exception_handlers={HTTPException: routing_error})
