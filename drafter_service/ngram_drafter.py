"""Prompt lookup: propose what followed the last few tokens when they stood in the sequence before. No model, no GPU.

Source: A. Saxena, "Prompt Lookup Decoding", 2023; the same idea as LLMA (Yang et al., arXiv 2304.04487).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from drafter_service.chain_drafter import ChainDrafter
from drafter_service.sequence import DraftSequence


class NgramDrafter(ChainDrafter):
    """Looks for the longest recent n-gram, from `max_ngram` tokens down to `min_ngram`, at its latest earlier place."""

    kind = "ngram"
    name = "ngram"

    def __init__(self, *, min_ngram: int = 2, max_ngram: int = 4) -> None:
        super().__init__()
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"min_ngram: must be from 1 to max_ngram ({max_ngram}), is {min_ngram}")
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self._texts: dict[DraftSequence, _Text] = {}

    def release(self, sequence: DraftSequence) -> None:
        """Forget the sequence and its tokens."""
        super().release(sequence)
        self._texts.pop(sequence, None)

    def find(self, sequence: DraftSequence) -> Sequence[int]:
        """What followed the last few tokens when they stood there before; nothing where they never did."""
        tokens = self._texts.setdefault(sequence, _Text()).follow(sequence.token_ids)
        # Where the last token stood before: every match of a longer n-gram ends at one of these places.
        ends = np.flatnonzero(tokens[:-1] == tokens[-1])
        for size in self._sizes:
            places = ends[ends >= size - 1]
            for back in range(1, min(size, len(tokens))):
                places = places[tokens[places - back] == tokens[-1 - back]]
            if len(places):
                start = int(places[-1]) + 1
                found: list[int] = tokens[start : start + sequence.max_draft_tokens].tolist()
                return found
        return ()


class _Text:
    """A sequence's tokens as an array that grows with it, so that a step costs no copy of the whole."""

    def __init__(self) -> None:
        self._tokens = np.empty(0, dtype=np.uint32)
        self._length = 0

    def follow(self, token_ids: Sequence[int]) -> npt.NDArray[np.uint32]:
        """All tokens, of which those of the last call come first."""
        if len(token_ids) > len(self._tokens):
            grown = np.empty(2 * len(token_ids), dtype=np.uint32)
            grown[: self._length] = self._tokens[: self._length]
            self._tokens = grown
        self._tokens[self._length : len(token_ids)] = token_ids[self._length :]
        self._length = len(token_ids)
        return self._tokens[: self._length]
