"""Errors and the numbers that stand for them in messages."""

from __future__ import annotations

import math

import grpc
import pytest

from outrider.protocol.errors import (
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    OutriderError,
    Reason,
    RelayedError,
    ResourceExhaustedError,
    UnavailableError,
    Violation,
    code_number,
    from_code_number,
)
from outrider.protocol.violations import Violations


def test_numbers_are_those_of_google_rpc() -> None:
    assert code_number(grpc.StatusCode.INVALID_ARGUMENT) == 3
    assert code_number(grpc.StatusCode.UNAVAILABLE) == 14


@pytest.mark.parametrize("error_class", [ResourceExhaustedError, UnavailableError, FailedPreconditionError])
def test_an_error_survives_the_wire(error_class: type[OutriderError]) -> None:
    sent = error_class("full", retry_delay_seconds=1.5)
    found = from_code_number(code_number(sent.code), sent.message, retry_delay_seconds=sent.retry_delay_seconds)
    assert type(found) is error_class
    assert (found.message, found.retry_delay_seconds, str(found)) == ("full", 1.5, "full")


def test_every_status_comes_back_as_itself() -> None:
    """Catches a caller's mistake that arrives as a bug of ours."""
    for code in set(grpc.StatusCode) - {grpc.StatusCode.OK}:
        assert from_code_number(code_number(code), "x").code == code
    relayed = from_code_number(code_number(grpc.StatusCode.INVALID_ARGUMENT), "top_p: is 7")
    assert isinstance(relayed, RelayedError)
    assert relayed.message == "top_p: is 7"


def test_a_number_that_nobody_knows_is_a_bug() -> None:
    assert isinstance(from_code_number(4711, "x"), InternalError)


def test_a_bad_field_comes_first() -> None:
    error = InvalidArgumentError("sampling.top_p", "is 7")
    assert (error.field, error.message, error.code) == (
        "sampling.top_p",
        "sampling.top_p: is 7",
        grpc.StatusCode.INVALID_ARGUMENT,
    )


def test_several_bad_fields_are_one_error() -> None:
    violations = [Violation(name, "is bad") for name in "abcde"]
    error = InvalidArgumentError.of([Violation("top_p", "is 7", Reason.NOT_SUPPORTED), *violations])
    assert error.message == "top_p: is 7; a: is bad; b: is bad; and 3 more: c, d, e"
    assert (error.field, error.reason, error.code) == ("top_p", "NOT_SUPPORTED", grpc.StatusCode.INVALID_ARGUMENT)
    assert error.violations[1:] == tuple(violations)


def test_collecting_goes_on_behind_each_error() -> None:
    """Catches a caller who repairs one field after the other, with a refusal for each."""
    violations = Violations()
    violations.check()
    with violations.collecting():
        raise InvalidArgumentError("a", "is bad")
    violations.add("b", "is bad as well", Reason.NOT_SUPPORTED)
    with pytest.raises(UnavailableError), violations.collecting():
        raise UnavailableError("no business of a collector's")
    with pytest.raises(InvalidArgumentError) as caught:
        violations.check()
    assert [(found.field, found.reason) for found in caught.value.violations] == [
        ("a", "INVALID_VALUE"),
        ("b", "NOT_SUPPORTED"),
    ]


@pytest.mark.parametrize(
    ("sent", "taken"), [(math.nan, 0.0), (-1.0, 0.0), (math.inf, 3600.0), (1e300, 3600.0), (0.25, 0.25)]
)
def test_a_delay_of_another_service_is_not_believed_blindly(sent: float, taken: float) -> None:
    """Catches a number that no RetryInfo can hold, which would turn the status into another one."""
    error = from_code_number(8, "full", retry_delay_seconds=sent)
    assert isinstance(error, ResourceExhaustedError)
    assert error.retry_delay_seconds == taken


def test_an_error_that_says_ok_is_a_bug() -> None:
    assert isinstance(from_code_number(0, "fine"), InternalError)
