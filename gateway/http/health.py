"""What probes and load balancers ask over HTTP."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

LIVE_PATH = "/livez"
READY_PATH = "/healthz"


def health_routes(is_serving: Callable[[], bool]) -> list[BaseRoute]:
    """`/healthz`: 200 while new requests are welcome, else 503. `/livez`: 200 for as long as the process answers.

    What restarts the gateway must ask for `/livez`: one that loads or drains is not ready, and alive.
    """

    async def ready(request: Request) -> Response:
        return PlainTextResponse("serving\n") if is_serving() else PlainTextResponse("not serving\n", status_code=503)

    async def live(request: Request) -> Response:
        return PlainTextResponse("alive\n")

    return [Route(READY_PATH, ready), Route(LIVE_PATH, live)]
