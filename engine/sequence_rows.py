"""What a graph's inputs hold of each sequence from step to step: how it is sampled, and its blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.block_manager import BlockTable
from outrider.protocol.sampling_parameters import SamplingParameters


class SequenceRows:
    """Writes a row for each sequence, and of sequences that the rows hold already only their new blocks.

    Belongs to one copy of the inputs on the host, which nobody else writes these rows of.
    """

    def __init__(self, *, is_filtered: bool, vocab_size: int) -> None:
        self._is_filtered = is_filtered
        self._vocab_size = vocab_size
        # Numbers and no sequences, which would outlive their end here.
        self._serials: list[int] = []
        self._versions: list[int] = []

    def fill(
        self,
        host: Mapping[str, npt.NDArray[Any]],  # temperature, seeds, top_k, top_p, min_p and block_tables, a row each
        serials: list[int],  # no two sequences of the process ever have the same
        sampling: Sequence[SamplingParameters],
        block_tables: Sequence[BlockTable],
    ) -> None:
        """Fill the first rows, one for each sequence; the temperature of the others is 0."""
        num_sequences = len(serials)
        if serials != self._serials:
            self._serials, self._versions = serials, [-1] * num_sequences
            host["temperature"][:num_sequences] = [p.temperature for p in sampling]
            host["temperature"][num_sequences:] = 0.0
            host["seeds"].view(np.uint64)[:num_sequences] = [p.seed for p in sampling]
            if self._is_filtered:
                host["top_k"][:num_sequences] = [min(p.top_k, self._vocab_size) for p in sampling]
                host["top_p"][:num_sequences] = [p.top_p for p in sampling]
                host["min_p"][:num_sequences] = [p.min_p for p in sampling]
        for row, (table, version) in enumerate(zip(block_tables, self._versions, strict=True)):
            if table.version != version:
                self._versions[row] = table.version
                host["block_tables"][row, : len(table)] = table.array
