"""The text of a sequence: detokenization and stop strings together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.detokenizer import Detokenizer
from gateway.stop_strings import Scan, StopStrings


@dataclass(frozen=True)
class Piece:
    """What some tokens led to."""

    text: str
    # How many of the tokens belong to the output: all, or those up to the one that completed the stop string.
    num_tokens: int
    stop_string: str | None = None


class OutputText:
    """Text of one sequence as its tokens come; always empty without a detokenizer."""

    def __init__(
        self, detokenizer: Detokenizer | None, stop: Sequence[str], *, min_tokens: int = 0, includes_stop: bool = False
    ) -> None:
        """Stop strings that the first `min_tokens` tokens complete do not count.

        `includes_stop`: the text has what ended it, a stop string here and a token at the caller's.
        """
        self._detokenizer = detokenizer
        self._stop = StopStrings(stop) if stop else None
        self._num_unstoppable = min_tokens
        self.includes_stop = includes_stop

    def push(self, token_ids: Sequence[int]) -> Piece:
        """Take the tokens of a step. No push may follow a stop string."""
        if self._detokenizer is None:
            return Piece("", len(token_ids))
        if self._stop is None:
            return Piece(self._detokenizer.push(token_ids), len(token_ids))
        num_first = min(self._num_unstoppable, len(token_ids))
        if num_first == 0:
            return self._push(self._detokenizer, self._stop, token_ids)
        self._num_unstoppable -= num_first
        first = self._stop.push(self._detokenizer.push(token_ids[:num_first]), can_match=False)
        if num_first == len(token_ids):
            return Piece(first.text, num_first)
        rest = self._push(self._detokenizer, self._stop, token_ids[num_first:])
        return Piece(first.text + rest.text, num_first + rest.num_tokens, rest.stop_string)

    def _push(self, detokenizer: Detokenizer, stop: StopStrings, token_ids: Sequence[int]) -> Piece:
        # A step is decoded as a whole; only where it turns out to hold a stop string is it taken token by token, to
        # see which of them completed it.
        whole_detokenizer, whole_stop = detokenizer.copy(), stop.copy()
        scan = whole_stop.push(whole_detokenizer.push(token_ids))
        if scan.match is None:
            self._detokenizer, self._stop = whole_detokenizer, whole_stop
            return Piece(scan.text, len(token_ids))
        text = ""
        for num_tokens, token_id in enumerate(token_ids, start=1):
            scan = stop.push(detokenizer.push([token_id]))
            text += self._text(scan)
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
        scan = self._stop.push(text, can_match=self._num_unstoppable == 0)
        if scan.match is not None:
            return Piece(self._text(scan), 0, scan.match)
        return Piece(scan.text + self._stop.finish(), 0)

    def _text(self, scan: Scan) -> str:
        return scan.text + (scan.match or "") if self.includes_stop else scan.text
