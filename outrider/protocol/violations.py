"""Collects what is wrong with a request, so that a caller is told everything at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from outrider.protocol.errors import InvalidArgumentError, Reason, Violation


class Violations:
    """The bad fields found so far, in the order in which they were found."""

    def __init__(self) -> None:
        self._found: list[Violation] = []

    def add(self, field: str, problem: str, reason: Reason = Reason.INVALID_VALUE) -> None:
        """Note a bad field."""
        self._found.append(Violation(field, problem, reason))

    def extend(self, violations: Iterable[Violation]) -> None:
        """Note several."""
        self._found.extend(violations)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Takes the InvalidArgumentError that the block may raise, and goes on behind it."""
        try:
            yield
        except InvalidArgumentError as error:
            self._found += error.violations

    def check(self) -> None:
        """Raise InvalidArgumentError with all of them, if there are any."""
        if self._found:
            raise InvalidArgumentError.of(self._found)
