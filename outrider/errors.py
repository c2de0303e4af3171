"""The errors that a client of the gateway sees, one class for each way to react."""

from __future__ import annotations

import re
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

# The gateway starts the message of a bad request with the name of the field.
_FIELD = re.compile(r"([A-Za-z_][\w.\[\]]*): ")


class ClientError(Exception):
    """A call failed; `code` is its gRPC status. Raised itself for a status that no subclass stands for."""

    def __init__(self, message: str, code: grpc.StatusCode = grpc.StatusCode.UNKNOWN) -> None:
        super().__init__(message)
        self.message = message
        self.code = code


class InvalidRequestError(ClientError):
    """The request is bad and stays so; `field` names what is wrong, empty when the message does not say."""

    def __init__(self, message: str) -> None:
        super().__init__(message, grpc.StatusCode.INVALID_ARGUMENT)
        match = _FIELD.match(message)
        self.field = match.group(1) if match else ""


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
            return InvalidRequestError(message)
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


def _retry_delay_seconds(error: Any) -> float:
    try:
        status = rpc_status.from_call(error)
    except ValueError:
        # The status inside the details contradicts the call's own: not from our gateway.
        return 0.0
    for detail in status.details if status is not None else ():
        info = error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            return float(info.retry_delay.ToNanoseconds() / 1e9)
    return 0.0
