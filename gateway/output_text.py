"""The text of a sequence: detokenization and stop strings together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.detokenizer import Detokenizer
from gateway.stop_strings import StopStrings


@dataclass(frozen=True)
class Piece:
    """What some tokens led to."""

    text: str
    # How many of the tokens belong to the output: all, or those up to the one that completed the stop string.
    num_tokens: int
    stop_string: str | None = None


class OutputText:
    """Text of one sequence as its tokens come; always empty without a detokenizer."""

    def __init__(self, detokenizer: Detokenizer | None, stop: Sequence[str]) -> None:
        self._detokenizer = detokenizer
        self._stop = StopStrings(stop) if stop else None

    def push(self, token_ids: Sequence[int]) -> Piece:
        """Take the tokens of a step. No push may follow a stop string."""
        if self._detokenizer is None:
            return Piece("", len(token_ids))
        if self._stop is None:
            return Piece(self._detokenizer.push(token_ids), len(token_ids))
        # A step is decoded as a whole; only where it turns out to hold a stop string is it taken token by token, to
        # see which of them completed it.
        detokenizer, stop = self._detokenizer.copy(), self._stop.copy()
        scan = stop.push(detokenizer.push(token_ids))
        if scan.match is None:
            self._detokenizer, self._stop = detokenizer, stop
            return Piece(scan.text, len(token_ids))
        text = ""
        for num_tokens, token_id in enumerate(token_ids, start=1):
            scan = self._stop.push(self._detokenizer.push([token_id]))
            text += scan.text
            if scan.match is not None:
                return Piece(text, num_tokens, scan.match)
        raise AssertionError("a stop string of the whole step is in its parts as well")

    def push_each(self, token_ids: Sequence[int]) -> tuple[Piece, list[str]]:
        """The same, and what each of the piece's tokens added to its text."""
        texts: list[str] = []
        for token_id in token_ids:
            piece = self.push([token_id])
            texts.append(piece.text)
            if piece.stop_string is not None:
                return Piece("".join(texts), len(texts), piece.stop_string), texts
        return Piece("".join(texts), len(texts)), texts

    def finish(self) -> Piece:
        """What was held back, at the end of a sequence that no stop string ended so far."""
        if self._detokenizer is None:
            return Piece("", 0)
        text = self._detokenizer.finish()
        if self._stop is None:
            return Piece(text, 0)
        scan = self._stop.push(text)
        if scan.match is not None:
            return Piece(scan.text, 0, scan.match)
        return Piece(scan.text + self._stop.finish(), 0)
