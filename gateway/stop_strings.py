"""Finds the first stop string in text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class Scan:
    """What a piece of text led to."""

    # Text that is certain to lie before any stop string.
    text: str
    # The stop string that was found; everything behind `text` is then dropped.
    match: str | None = None


class StopStrings:
    """Holds back text that may begin a stop string.

    The match is the stop string that is complete first, the longest where several end at the same character. That is a
    property of the text alone: cutting it into other pieces changes nothing.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        # Longest first, so that the first to be complete at a character is the one that counts.
        self._stop = tuple(sorted(set(stop), key=len, reverse=True))
        self._borders = tuple(_borders(string) for string in self._stop)
        # How many of each string's characters the text ends with.
        self._matched = [0] * len(self._stop)
        self._held = ""

    def push(self, text: str, *, can_match: bool = True) -> Scan:
        """Take more text. No push may follow a match. Without `can_match`, a stop string that it completes is text."""
        buffer = self._held + text
        for offset, character in enumerate(text, start=len(self._held) + 1):
            for index, string in enumerate(self._stop):
                length = self._matched[index]
                while length and string[length] != character:
                    length = self._borders[index][length - 1]
                length += string[length] == character
                self._matched[index] = length
                if length == len(string):
                    if can_match:
                        return Scan(text=buffer[: offset - length], match=string)
                    self._matched[index] = self._borders[index][-1]
        num_safe = len(buffer) - max(self._matched, default=0)
        self._held = buffer[num_safe:]
        return Scan(text=buffer[:num_safe])

    def finish(self) -> str:
        """The text that was held back, for a sequence that ended without a match."""
        return self._held

    def copy(self) -> Self:
        """An independent copy in the same state."""
        twin = type(self)(())
        twin._stop, twin._borders = self._stop, self._borders
        twin._matched, twin._held = self._matched.copy(), self._held
        return twin


def _borders(string: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix (Knuth, Morris and Pratt)."""
    borders = [0] * len(string)
    length = 0
    for index in range(1, len(string)):
        while length and string[length] != string[index]:
            length = borders[length - 1]
        length += string[length] == string[index]
        borders[index] = length
    return borders
