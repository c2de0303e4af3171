"""One answer of generated text, whole or as server-sent events."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from gateway.generator import Event
from gateway.http.answer import Answer
from gateway.http.choices import ChoiceRunner
from gateway.http.disconnect import until_disconnect
from gateway.http.errors import from_exception
from outrider.protocol.errors import OutriderError
from outrider.v1 import generation_pb2

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Proxies that collect a response before they pass it on leave this one alone.
    (b"x-accel-buffering", b"no"),
]
DONE = b"data: [DONE]\n\n"


class Exchange:
    """Generates and answers; an ASGI application, to be called once.

    Nothing is sent before the first generation has begun, so that what is refused is refused with a status. All
    generations end when the client leaves.
    """

    def __init__(
        self,
        runner: ChoiceRunner,
        requests: Sequence[generation_pb2.GenerateRequest],
        answer: Answer,
        *,
        is_stream: bool,
        has_usage: bool,
        names: Mapping[str, str],
    ) -> None:
        """`has_usage`: a stream ends with the usage. `names` has the API's names of fields that may be at fault."""
        self._events = runner.run(requests)
        self._answer = answer
        self._is_stream = is_stream
        self._has_usage = has_usage
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer. Raises ApiError before anything was sent, ClientLeftError when there is nobody to answer any more."""
        work = self._stream(send) if self._is_stream else self._whole(scope, receive, send)
        try:
            await until_disconnect(receive, work)
        except OutriderError as error:
            raise from_exception(error, self._names) from error

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events) as events:
            async for index, event in events:
                choice = self._answer.choices[index]
                match event:
                    case generation_pb2.Started():
                        choice.started = event
                    case generation_pb2.Chunk():
                        self._answer.keep(choice, event)
                    case _:
                        choice.finished = event
        await JSONResponse(self._answer.whole())(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            first = await anext(events)
            await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
            try:
                await self._send_piece(send, *first)
                async for index, event in events:
                    await self._send_piece(send, index, event)
                if self._has_usage:
                    await _send(send, _frame(self._answer.usage_piece()))
                last = DONE
            except Exception as error:
                # The status has been sent: the error is the stream's last event.
                last = _frame(from_exception(error, self._names).body)
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _send_piece(self, send: Send, index: int, event: Event) -> None:
        choice = self._answer.choices[index]
        match event:
            case generation_pb2.Started():
                choice.started = event
                piece = self._answer.starts(choice)
            case generation_pb2.Chunk():
                piece = self._answer.continues(choice, event)
            case _:
                choice.finished = event
                piece = self._answer.ends(choice)
        if piece is not None:
            # A client that asked for the usage finds the field in every piece.
            await _send(send, _frame({**piece, "usage": None} if self._has_usage else piece))


def _frame(piece: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(piece, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def _send(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})
