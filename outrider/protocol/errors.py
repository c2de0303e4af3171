"""The errors that services report to each other and to clients, each with its gRPC status."""

from __future__ import annotations

import grpc

# Longer ones of another service are cut.
MAX_RETRY_DELAY_SECONDS = 3600.0


class OutriderError(Exception):
    """An error with a gRPC status; the message is for the caller."""

    code: grpc.StatusCode = grpc.StatusCode.INTERNAL

    def __init__(self, message: str, *, retry_delay_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.message = message
        self.retry_delay_seconds = retry_delay_seconds


class InvalidArgumentError(OutriderError):
    """A field of the request is bad; trying again will not help. The message starts with the field's name."""

    code = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


class ResourceExhaustedError(OutriderError):
    """The service is full; `retry_delay_seconds` says when to try again."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class UnavailableError(OutriderError):
    """The service is loading, draining or cannot reach a service that it needs."""

    code = grpc.StatusCode.UNAVAILABLE


class NotFoundError(OutriderError):
    """What the request names does not exist (any more)."""

    code = grpc.StatusCode.NOT_FOUND


class UnauthenticatedError(OutriderError):
    """Who calls cannot be told: no key, or one that is not known."""

    code = grpc.StatusCode.UNAUTHENTICATED


class PermissionDeniedError(OutriderError):
    """Who calls is known, and may not."""

    code = grpc.StatusCode.PERMISSION_DENIED


class FailedPreconditionError(OutriderError):
    """The two services do not fit each other."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class AbortedError(OutriderError):
    """State that the request relied on was lost; the caller may start over."""

    code = grpc.StatusCode.ABORTED


class InternalError(OutriderError):
    """A bug."""

    code = grpc.StatusCode.INTERNAL


_BY_CODE: dict[grpc.StatusCode, type[OutriderError]] = {
    error.code: error
    for error in (
        ResourceExhaustedError,
        UnavailableError,
        NotFoundError,
        FailedPreconditionError,
        AbortedError,
        InternalError,
    )
}


class RelayedError(OutriderError):
    """An error that another service reported, with that service's status."""

    def __init__(self, code: grpc.StatusCode, message: str, *, retry_delay_seconds: float = 0.0) -> None:
        super().__init__(message, retry_delay_seconds=retry_delay_seconds)
        self.code = code


def code_number(code: grpc.StatusCode) -> int:
    """The number that google.rpc.Code gives a status."""
    number: int = code.value[0]
    return number


def from_code_number(number: int, message: str, *, retry_delay_seconds: float = 0.0) -> OutriderError:
    """The error for a status number that another service sent; an unknown number, or OK, becomes INTERNAL."""
    if not 0 <= retry_delay_seconds <= MAX_RETRY_DELAY_SECONDS:
        retry_delay_seconds = MAX_RETRY_DELAY_SECONDS if retry_delay_seconds > MAX_RETRY_DELAY_SECONDS else 0.0
    if number == 0:
        return InternalError(message)
    for code in grpc.StatusCode:
        if code_number(code) == number:
            known = _BY_CODE.get(code)
            if known is not None:
                return known(message, retry_delay_seconds=retry_delay_seconds)
            return RelayedError(code, message, retry_delay_seconds=retry_delay_seconds)
    return InternalError(message)
