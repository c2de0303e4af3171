"""Errors in the shape of OpenAI's API: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from outrider.protocol.errors import InvalidArgumentError, OutriderError, Reason, Violation

logger = logging.getLogger(__name__)

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"
# What nginx made customary for a client that left; nobody receives it, the trace shows it.
CLIENT_CLOSED_REQUEST = 499


# Not frozen: an exception is given its traceback while it travels.
@dataclass(eq=False)
class ApiError(Exception):
    """One error as the API shows it."""

    status: int
    message: str
    type: str = INVALID_REQUEST
    # The request's field that is at fault.
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        """What the client reads."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The answer, for as long as nothing else was sent."""
        return JSONResponse(self.body, self.status, headers=dict(self.headers))


# A body can have any number of bad fields.
MAX_PROBLEMS = 32
_CODES = {
    Reason.CONTEXT_LENGTH_EXCEEDED: "context_length_exceeded",
    Reason.MISSING_FIELD: "missing_required_parameter",
}
_GROUP = re.compile(r"^(sampling|stopping|speculation)\.")

# Status, type and code by gRPC status; what is not here is INTERNAL.
_BY_CODE: dict[grpc.StatusCode, tuple[int, str, str | None]] = {
    grpc.StatusCode.INVALID_ARGUMENT: (400, INVALID_REQUEST, None),
    grpc.StatusCode.OUT_OF_RANGE: (400, INVALID_REQUEST, None),
    grpc.StatusCode.UNAUTHENTICATED: (401, INVALID_REQUEST, "invalid_api_key"),
    grpc.StatusCode.PERMISSION_DENIED: (403, INVALID_REQUEST, None),
    grpc.StatusCode.NOT_FOUND: (404, INVALID_REQUEST, None),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (429, "rate_limit_error", "rate_limit_exceeded"),
    grpc.StatusCode.CANCELLED: (CLIENT_CLOSED_REQUEST, INVALID_REQUEST, None),
    grpc.StatusCode.UNAVAILABLE: (503, SERVER_ERROR, "unavailable"),
    grpc.StatusCode.ABORTED: (503, SERVER_ERROR, "aborted"),
    grpc.StatusCode.DEADLINE_EXCEEDED: (504, SERVER_ERROR, "deadline_exceeded"),
}


def from_exception(error: Exception, names: Mapping[str, str]) -> ApiError:
    """The API's error for whatever a request ran into.

    `names` has the API's name of a field of ours where it is another one.
    """
    match error:
        case ApiError():
            return error
        case InvalidArgumentError():
            return bad_request(renamed(error.violations, names))
        case OutriderError():
            status, kind, code = _BY_CODE.get(error.code, (500, SERVER_ERROR, None))
            return ApiError(status, error.message, kind, code=code, headers=_headers(status, error))
        case _:
            logger.error("a request failed with an unexpected error", exc_info=error)
            # The details stay in the log: an internal error's text may hold what the caller must not see.
            return ApiError(500, "internal error, see the service's log", SERVER_ERROR)


def api_name(field: str) -> str:
    """A field's name without its group, of which the API has none."""
    return _GROUP.sub("", field)


def renamed(violations: Sequence[Violation], names: Mapping[str, str]) -> list[Violation]:
    """The same with the API's names; `names` has those that differ by more than the group."""
    found = []
    for violation in violations:
        name = api_name(violation.field)
        found.append(replace(violation, field=names.get(name, name)))
    return found


def bad_request(violations: Sequence[Violation]) -> ApiError:
    """The API's error for bad fields, at least one; the first is the one that `param` and `code` speak of."""
    first = violations[0]
    problems = [_problem(violation) for violation in violations[:MAX_PROBLEMS]]
    if len(violations) > MAX_PROBLEMS:
        problems.append(f"and {len(violations) - MAX_PROBLEMS} more")
    code = _CODES.get(first.reason)
    return ApiError(400, "; ".join(problems), param=first.field or None, code=code)


def _problem(violation: Violation) -> str:
    match violation.reason:
        # As OpenAI's API words them.
        case Reason.UNKNOWN_FIELD:
            return f"Unrecognized request argument supplied: {violation.field}"
        case Reason.MISSING_FIELD if not violation.problem:
            return f"Missing required parameter: '{violation.field}'."
        case _:
            return str(violation) if violation.field else violation.problem


def routing_error(request: Request, error: Exception) -> Response:
    """For Starlette: a path or method that is not served."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        return ApiError(404, f"nothing is served at {where}", code="unknown_url").response()
    return ApiError(error.status_code, f"{where}: {error.detail}", headers=error.headers or {}).response()


def _headers(status: int, error: OutriderError) -> dict[str, str]:
    if status == 401:
        return {"www-authenticate": "Bearer"}
    if error.retry_delay_seconds > 0:
        # The second one is finer, and what OpenAI's own clients look at first.
        return {
            "retry-after": str(math.ceil(error.retry_delay_seconds)),
            "retry-after-ms": str(math.ceil(error.retry_delay_seconds * 1000)),
        }
    return {}
