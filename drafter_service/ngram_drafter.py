"""Prompt lookup: propose what followed the last few tokens when they stood in the sequence before. No model, no GPU.

Source: A. Saxena, "Prompt Lookup Decoding", 2023; the same idea as LLMA (Yang et al., arXiv 2304.04487).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from drafter_service.drafter import Draft, NoDraft
from drafter_service.sequence import DraftSequence
from outrider.v1 import drafter_pb2


class NgramDrafter:
    """Looks for the longest recent n-gram, from `max_ngram` tokens down to `min_ngram`, at its latest earlier place."""

    kind = "ngram"
    name = "ngram"
    revision = ""
    vocabulary_size = 0
    max_length = 0
    tokenizer_fingerprint = ""
    num_kv_blocks = 0
    num_free_kv_blocks = 0

    def __init__(self, *, min_ngram: int = 2, max_ngram: int = 4) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"min_ngram: must be from 1 to max_ngram ({max_ngram}), is {min_ngram}")
        self._sizes = range(max_ngram, min_ngram - 1, -1)

    def load(self) -> None:
        """Nothing to load."""

    def draft(self, wanting: Sequence[DraftSequence]) -> Sequence[Draft | NoDraft]:
        """One answer for each sequence: a one-hot draft, or NO_MATCH."""
        return [self._draft_one(sequence) for sequence in wanting]

    def release(self, sequence: DraftSequence) -> None:
        """Nothing is held."""

    def _draft_one(self, sequence: DraftSequence) -> Draft | NoDraft:
        tokens = np.asarray(sequence.token_ids, dtype=np.int64)
        for size in self._sizes:
            if len(tokens) <= size:
                continue
            # Every window but the last one, which is the n-gram that is looked for.
            windows = np.lib.stride_tricks.sliding_window_view(tokens[:-1], size)
            matches = np.flatnonzero((windows == tokens[-size:]).all(axis=1))
            if len(matches):
                start = int(matches[-1]) + size
                found = tokens[start : start + sequence.max_draft_tokens].tolist()
                return Draft(sequence, found)
        return NoDraft(sequence, drafter_pb2.NO_PROPOSAL_REASON_NO_MATCH)
