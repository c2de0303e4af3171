"""Takes a JSON body from the network, within limits, and into a model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request

from gateway.http.errors import ApiError, bad_request
from outrider.protocol.errors import Reason, Violation

# A client that has not sent its whole body by then is given up.
BODY_SECONDS = 60.0
# So much more is read of a body that is too large: a client that still sends when the connection ends never sees why.
MAX_BYTES_DROPPED = 16 << 20
# Bodies that are parsed on the event loop: well below a millisecond.
MAX_BYTES_ON_LOOP = 32 << 10

M = TypeVar("M", bound=BaseModel)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The body of a JSON request. Raises ApiError when it is too large, too slow or of another type."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # A web page may send other types to any address without asking; this one it may not, see CORS.
    if media_type != "application/json":
        raise ApiError(415, f"content-type: must be application/json, is {media_type or 'missing'}")
    body = bytearray()
    num_bytes = 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                num_bytes += len(part)
                if num_bytes <= max_bytes:
                    body += part
                elif num_bytes > max_bytes + MAX_BYTES_DROPPED:
                    break
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_SECONDS:.0f} s") from None
    if num_bytes > max_bytes:
        raise ApiError(413, f"the body is larger than {max_bytes} bytes", headers={"connection": "close"})
    return bytes(body)


async def parse_body(body: bytes, model: type[M]) -> M:
    """The request in a body. Raises ApiError naming every field that is wrong."""
    try:
        if len(body) <= MAX_BYTES_ON_LOOP:
            return model.model_validate_json(body)
        return await asyncio.to_thread(model.model_validate_json, body)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        raise bad_request([_violation(one) for one in found]) from None


def _violation(error: ErrorDetails) -> Violation:
    param = _param(error["loc"])
    match error["type"]:
        case "json_invalid":
            problem = error["msg"].removeprefix("Invalid JSON: ")
            return Violation("", f"the body is not JSON: {problem}", Reason.UNREADABLE)
        case "model_type" if not param:
            return Violation("", "the body is not a JSON object", Reason.UNREADABLE)
        case "missing":
            return Violation(param, "", Reason.MISSING_FIELD)
        case _:
            problem = error["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
            return Violation(param, problem)


def _param(location: Sequence[int | str]) -> str:
    """`messages[0].content`."""
    text = ""
    for part in location:
        if part == "[key]":
            continue
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
