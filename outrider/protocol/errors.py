"""The errors that services report to each other and to clients, each with its gRPC status."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import grpc

# Longer ones of another service are cut.
MAX_RETRY_DELAY_SECONDS = 3600.0
# Of so many bad fields an error's message has the problem, of others the name: clients take some 8 KiB of trailers.
_NUM_TOLD = 3


class OutriderError(Exception):
    """An error with a gRPC status; the message is for the caller."""

    code: grpc.StatusCode = grpc.StatusCode.INTERNAL

    def __init__(self, message: str, *, retry_delay_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.message = message
        self.retry_delay_seconds = retry_delay_seconds


class Reason(StrEnum):
    """Why a field is refused. Programs compare these words: they stay as they are."""

    INVALID_VALUE = "INVALID_VALUE"
    """The value is out of range, or does not go with another field."""
    MISSING_FIELD = "MISSING_FIELD"
    """The field must be set."""
    UNKNOWN_FIELD = "UNKNOWN_FIELD"
    """There is no such field."""
    NOT_SUPPORTED = "NOT_SUPPORTED"
    """The field asks for what is not to be had here."""
    UNKNOWN_TOKEN_ID = "UNKNOWN_TOKEN_ID"  # no password
    """A token id is not in the model's vocabulary."""
    NO_TOKENIZER = "NO_TOKENIZER"
    """The field has text, and the gateway has no tokenizer."""
    CONTEXT_LENGTH_EXCEEDED = "CONTEXT_LENGTH_EXCEEDED"
    """The prompt does not fit the model's context."""
    UNREADABLE = "UNREADABLE"
    """The request could not be parsed."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One field that is bad: its name as in the request, and what is wrong with it."""

    field: str
    problem: str
    reason: Reason = Reason.INVALID_VALUE

    def __str__(self) -> str:
        return f"{self.field}: {self.problem}"


class InvalidArgumentError(OutriderError):
    """Fields of the request are bad; trying again will not help. The message starts with the first one's name."""

    code = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(self, field: str, problem: str, reason: Reason = Reason.INVALID_VALUE) -> None:
        self._set(Violation(field, problem, reason))

    @classmethod
    def of(cls, violations: Sequence[Violation]) -> InvalidArgumentError:
        """The error for all of them, at least one."""
        error = cls.__new__(cls)
        error._set(*violations)
        return error

    def _set(self, *violations: Violation) -> None:
        message = "; ".join(map(str, violations[:_NUM_TOLD]))
        if more := violations[_NUM_TOLD:]:
            message += f"; and {len(more)} more: {', '.join(violation.field for violation in more)}"
        super().__init__(message)
        self.violations = violations

    @property
    def field(self) -> str:
        """The first bad field."""
        return self.violations[0].field

    @property
    def reason(self) -> Reason:
        """Why the first one is bad."""
        return self.violations[0].reason


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
