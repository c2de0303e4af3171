"""Output tokens to text, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import Protocol, Self

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Bytes that an unfinished UTF-8 character can have. A token has at least one byte, so that many tokens and one more
# before them decide how the text behind them reads.
MAX_UNFINISHED_BYTES = 3


class TokenKind(Enum):
    """What a token means to the incremental decoder."""

    TEXT = auto()
    # One raw byte, `<0x0A>`, in a vocabulary with byte fallback.
    BYTE = auto()
    # A special token, or an id without one: contributes no text.
    SILENT = auto()


class Vocabulary(Protocol):
    """What the detokenizer asks of a tokenizer."""

    has_byte_fallback: bool

    def kind(self, token_id: int) -> TokenKind: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


class Detokenizer:
    """Turns the tokens of one sequence into text as they come.

    All pieces together are exactly what decoding all tokens at once gives, special tokens skipped. `tokenizers` has a
    `DecodeStream` for this, which does not keep that promise: it never flushes the end, and where raw bytes turn out to
    be no UTF-8 it raises and is dead.

    Decoding starts anew behind each token that ended cleanly; that token stays in front as an anchor, because decoders
    treat the first token of a text in their own way (most drop its leading space). Text is held back while it can still
    change: in a byte-level vocabulary a last replacement character, which may be the beginning of a real one; with byte
    fallback a whole run of byte tokens, since one bad byte turns every character of its run into replacements.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._window: list[int] = []
        # Length of what `_window` decodes to that was handed out, or lies before the window.
        self._num_sent = 0
        # Byte tokens whose run has not ended.
        self._run: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete, possibly empty."""
        num_before = len(self._window)
        for token_id in token_ids:
            match self._vocabulary.kind(token_id):
                case TokenKind.TEXT:
                    self._window += self._run
                    self._run.clear()
                    self._window.append(token_id)
                case TokenKind.BYTE:
                    self._run.append(token_id)
                case TokenKind.SILENT:
                    pass
        if len(self._window) == num_before:
            return ""
        text = self._vocabulary.decode(self._window)
        num_held = int(text.endswith(REPLACEMENT) and not self._vocabulary.has_byte_fallback)
        new_text = text[self._num_sent : len(text) - num_held]
        self._num_sent = max(self._num_sent, len(text) - num_held)
        # A last replacement character may belong to the window's last few tokens only; without a bound, a model that
        # emits nothing else would make each step decode all of them.
        self._shrink(1 if num_held == 0 else MAX_UNFINISHED_BYTES + 2, num_held)
        return new_text

    def finish(self) -> str:
        """The text that was held back, an unfinished character as the tokenizer shows it. No push may follow."""
        self._window += self._run
        self._run.clear()
        return self._vocabulary.decode(self._window)[self._num_sent :]

    def copy(self) -> Self:
        """An independent detokenizer in the same state."""
        twin = type(self)(self._vocabulary)
        twin._window = self._window.copy()
        twin._num_sent = self._num_sent
        twin._run = self._run.copy()
        return twin

    def _shrink(self, num_kept: int, num_held: int) -> None:
        if len(self._window) > num_kept:
            self._window = self._window[-num_kept:]
            self._num_sent = len(self._vocabulary.decode(self._window)) - num_held
