"""`/dashboard`: the page, what it is fed with, and the box that generates."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from gateway.auth import ANONYMOUS, Caller
from gateway.dashboard.dashboard import Dashboard
from gateway.dashboard.feed import pieces
from gateway.dashboard.timeline import summary, timeline
from gateway.generator import Event, Generator
from gateway.http.choices import ChoiceRunner
from gateway.http.errors import ApiError, from_exception
from gateway.http.host import check_host
from gateway.http.request_body import parse_body, read_body
from gateway.trace_sampler import WATCHED
from outrider.protocol.verification import Verification
from outrider.protocol.words import word
from outrider.service.telemetry import Telemetry
from outrider.v1 import common_pb2, generation_pb2

if TYPE_CHECKING:
    from gateway.http.app import Front

PATH = "/dashboard"
GENERATE = f"{PATH}/api/generate"
STATIC = Path(__file__).parent / "static"
MAX_BODY_BYTES = 1 << 20
TOKENS_SECONDS = 0.1
STATE_SECONDS = 1.0

# Everything that the page is made of comes from here, and it talks to nobody else.
HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no", "x-content-type-options": "nosniff"}


class GenerateForm(BaseModel):
    """What the page's box sends."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: str = Field(min_length=1)
    max_tokens: int = Field(default=128, ge=1, le=4096)
    temperature: float = Field(default=0.0, ge=0, le=2, strict=False)
    speculation: bool = True
    max_draft_tokens: int | None = Field(default=None, ge=1, le=32)


def dashboard_routes(front: Front, dashboard: Dashboard) -> list[BaseRoute]:
    """For the HTTP front to mount."""
    return DashboardRoutes(
        dashboard,
        front.generator,
        front.telemetry,
        host=front.host,
        trace_prompts=front.settings.trace_prompts,
        authenticate=front.authenticate,
    ).routes()


class DashboardRoutes:
    """The routes. `authenticate` is the HTTP front's own; `host` is what it listens on."""

    def __init__(
        self,
        dashboard: Dashboard,
        generator: Generator,
        telemetry: Telemetry,
        *,
        host: str,
        trace_prompts: bool = False,
        authenticate: Callable[[str | None], Caller] = lambda authorization: ANONYMOUS,
    ) -> None:
        self._dashboard = dashboard
        self._generator = generator
        self._telemetry = telemetry
        self._host = host
        self._trace_prompts = trace_prompts
        self._authenticate = authenticate

    def routes(self) -> list[BaseRoute]:
        """The page itself holds nothing: whoever may not see the data gets an empty one."""
        return [
            Route(f"{PATH}/api/state", self._guarded(self._state)),
            Route(f"{PATH}/api/events", self._guarded(self._events)),
            Route(f"{PATH}/api/traces", self._guarded(self._traces)),
            Route(f"{PATH}/api/traces/{{trace_id}}", self._guarded(self._trace)),
            Route(f"{PATH}/api/requests/{{request_id}}/trace", self._guarded(self._trace_of_request)),
            Route(GENERATE, self._guarded(self._generate), methods=["POST"]),
            Route(PATH, lambda request: RedirectResponse(f"{PATH}/")),
            Mount(PATH, _Page(directory=STATIC, html=True)),
        ]

    def _guarded(self, handler: Callable[[Request, Caller], Any]) -> Callable[[Request], Any]:
        async def guarded(request: Request) -> Response:
            try:
                check_host(request, self._host)
                caller = self._authenticate(request.headers.get("authorization"))
                response = await handler(request, caller)
                assert isinstance(response, Response)
                return response
            except Exception as error:
                return from_exception(error, {}).response()

        return guarded

    async def _state(self, request: Request, caller: Caller) -> Response:
        return JSONResponse(self._dashboard.state(), headers=STREAM_HEADERS)

    async def _traces(self, request: Request, caller: Caller) -> Response:
        found = [line for trace in self._dashboard.spans.traces() if (line := summary(trace)) is not None]
        return JSONResponse(found, headers=STREAM_HEADERS)

    async def _trace(self, request: Request, caller: Caller) -> Response:
        trace = self._dashboard.spans.get(request.path_params["trace_id"])
        found = timeline(trace) if trace is not None else None
        if found is None:
            raise ApiError(404, "the trace is not here, or not here yet", code="not_found")
        return JSONResponse(found, headers=STREAM_HEADERS)

    async def _trace_of_request(self, request: Request, caller: Caller) -> Response:
        trace = self._dashboard.spans.of_request(request.path_params["request_id"])
        found = timeline(trace) if trace is not None else None
        if found is None:
            # A page that has just seen the request end asks until its spans have come.
            return Response(status_code=204)
        return JSONResponse(found, headers=STREAM_HEADERS)

    async def _events(self, request: Request, caller: Caller) -> Response:
        if self._dashboard.feed.is_full:
            raise ApiError(503, "too many pages look on already")
        return StreamingResponse(self._feed(), media_type="text/event-stream", headers=STREAM_HEADERS)

    async def _feed(self) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        with self._dashboard.feed.subscribe() as subscription:
            next_state = loop.time()
            while True:
                if news := subscription.take():
                    yield _sse("tokens", news)
                if loop.time() >= next_state:
                    next_state = loop.time() + STATE_SECONDS
                    yield _sse("state", self._dashboard.state())
                await asyncio.sleep(TOKENS_SECONDS)

    async def _generate(self, request: Request, caller: Caller) -> Response:
        form = await parse_body(await read_body(request, MAX_BODY_BYTES), GenerateForm)
        runner = ChoiceRunner(
            generator=self._generator,
            telemetry=self._telemetry,
            caller=caller,
            route=GENERATE,
            operation="text_completion",
            parent="",
            trace_prompts=self._trace_prompts,
            attributes={WATCHED: True},
        )
        events = runner.run([_request(form)])
        # The first one by itself: what is refused is refused with a status.
        first = await anext(events)
        return StreamingResponse(_lines(first[1], events), media_type="application/x-ndjson", headers=STREAM_HEADERS)


class _Page(StaticFiles):
    def file_response(self, *arguments: Any, **keywords: Any) -> Response:
        response = super().file_response(*arguments, **keywords)
        response.headers.update(HEADERS)
        return response


async def _lines(first: Event, events: AsyncGenerator[tuple[int, Event], None]) -> AsyncIterator[bytes]:
    async with aclosing(events):
        yield _line(first)
        try:
            async for _, event in events:
                yield _line(event)
        except Exception as error:
            # The status has been sent: the error is the last line.
            yield json.dumps({"error": from_exception(error, {}).message}).encode() + b"\n"


def _line(event: Event) -> bytes:
    match event:
        case generation_pb2.Started():
            line: dict[str, Any] = {
                "started": {
                    "request_id": event.request_id,
                    "model": event.model,
                    "num_prompt_tokens": event.num_prompt_tokens,
                }
            }
        case generation_pb2.Chunk():
            line = {"tokens": pieces(event)}
        case _:
            speculation, timings = event.speculation, event.timings
            line = {
                "finished": {
                    "reason": word(generation_pb2.FinishReason, event.finish_reason),
                    "num_output_tokens": event.usage.num_output_tokens,
                    "num_steps": speculation.num_steps,
                    "num_draft_tokens": speculation.num_draft_tokens,
                    "num_accepted_tokens": speculation.num_accepted_tokens,
                    "verification": Verification.from_message(speculation.verification),
                    "fallbacks": [
                        word(common_pb2.FallbackReason, fallback.reason) for fallback in speculation.fallbacks
                    ],
                    "time_to_first_token_seconds": timings.time_to_first_token_seconds,
                    "total_seconds": timings.total_seconds,
                }
            }
    return json.dumps(line, ensure_ascii=False).encode() + b"\n"


def _sse(name: str, data: dict[str, Any]) -> bytes:
    return f"event: {name}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n".encode()


def _request(form: GenerateForm) -> generation_pb2.GenerateRequest:
    request = generation_pb2.GenerateRequest(
        prompt=form.prompt,
        sampling=common_pb2.SamplingParameters(temperature=form.temperature),
        stopping=generation_pb2.StoppingParameters(max_tokens=form.max_tokens),
        token_texts=True,
    )
    if not form.speculation:
        request.speculation.mode = generation_pb2.SPECULATION_MODE_OFF
    if form.max_draft_tokens is not None:
        request.speculation.max_draft_tokens = form.max_draft_tokens
    return request
