"""The errors that a client of the gateway sees, one class for each way to react."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

# The gateway starts the message of a bad request with the name of the field.
_FIELD = re.compile(r"([A-Za-z_][\w.\[\]]*): ")


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One bad field of a request: its name, what is wrong with it, and the word for this kind of mistake."""

    field: str
    description: str
    reason: str


class ClientError(Exception):
    """A call failed; `code` is its gRPC status. Raised itself for a status that no subclass stands for."""

    def __init__(self, message: str, code: grpc.StatusCode = grpc.StatusCode.UNKNOWN) -> None:
        super().__init__(message)
        self.message = message
        self.code = code


class InvalidRequestError(ClientError):
    """The request is bad and stays so; `field` names what is wrong first, empty when the message does not say.

    `violations` has every bad field that the gateway found, `reason` its word for the first one's kind, such as
    `INVALID_VALUE`; both are empty where the request never reached it.
    """

    def __init__(self, message: str, *, violations: Sequence[FieldViolation] = (), reason: str = "") -> None:
        super().__init__(message, grpc.StatusCode.INVALID_ARGUMENT)
        match = _FIELD.match(message)
        self.field = match.group(1) if match else ""
        self.violations = tuple(violations)
        self.reason = reason


class UnauthenticatedError(ClientError):
    """The gateway asks for an API key, and the call had none or one that it does not know."""

    def __init__(self, message: str) -> None:
        super().__init__(message, grpc.StatusCode.UNAUTHENTICATED)


class OverloadedError(ClientError):
    """The service is full; try again after `retry_delay_seconds`, 0 when it named no time."""

    def __init__(self, message: str, retry_delay_seconds: float = 0.0) -> None:
        super().__init__(message, grpc.StatusCode.RESOURCE_EXHAUSTED)
        self.retry_delay_seconds = retry_delay_seconds


class UnavailableError(ClientError):
    """Nothing answers at the address, or what answers is loading, draining or cut off from its verifiers."""

    def __init__(self, message: str, retry_delay_seconds: float = 0.0) -> None:
        super().__init__(message, grpc.StatusCode.UNAVAILABLE)
        self.retry_delay_seconds = retry_delay_seconds


class DeadlineExceededError(ClientError):
    """The call's `timeout` passed; the gateway has ended the request."""

    def __init__(self, message: str) -> None:
        super().__init__(message, grpc.StatusCode.DEADLINE_EXCEEDED)


def from_rpc_error(error: Any) -> ClientError:
    """The client's error for one of grpc's, of the blocking and the asyncio kind alike."""
    code: grpc.StatusCode = error.code()
    message: str = error.details() or code.name
    match code:
        case grpc.StatusCode.INVALID_ARGUMENT:
            return _invalid_request(message, error)
        case grpc.StatusCode.UNAUTHENTICATED:
            return UnauthenticatedError(message)
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return OverloadedError(message, _retry_delay_seconds(error))
        case grpc.StatusCode.UNAVAILABLE:
            return UnavailableError(message, _retry_delay_seconds(error))
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceededError(message)
        case _:
            return ClientError(message, code)


def _invalid_request(message: str, error: Any) -> InvalidRequestError:
    bad_request = _detail(error, error_details_pb2.BadRequest)
    info = _detail(error, error_details_pb2.ErrorInfo)
    violations = [
        FieldViolation(violation.field, violation.description, violation.reason)
        for violation in (bad_request.field_violations if bad_request is not None else ())
    ]
    return InvalidRequestError(message, violations=violations, reason=info.reason if info is not None else "")


def _retry_delay_seconds(error: Any) -> float:
    info = _detail(error, error_details_pb2.RetryInfo)
    return 0.0 if info is None else float(info.retry_delay.ToNanoseconds() / 1e9)


def _detail(error: Any, kind: Any) -> Any:
    """The detail of this kind that came with a call's status, None without."""
    try:
        status = rpc_status.from_call(error)
    except ValueError:
        # The status inside the details contradicts the call's own: not from our gateway.
        return None
    for packed in status.details if status is not None else ():
        detail = kind()
        if packed.Unpack(detail):
            return detail
    return None
