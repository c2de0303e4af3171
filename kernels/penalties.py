"""Penalties and logit bias: which logits they touch and by how much, as ragged lists of the few tokens concerned."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

IntArray = npt.NDArray[np.integer]


class Entries(NamedTuple):
    """What penalties count of some tokens of one sequence, each token once."""

    token_ids: IntArray  # [e]
    in_prompt: npt.NDArray[np.bool_]  # [e]
    output_counts: IntArray  # [e]
    biases: npt.NDArray[np.float32]  # [e]


class TokenHistory:
    """The tokens of one sequence as penalties count them; append what is committed and it stays up to date."""

    def __init__(
        self,
        prompt_token_ids: Iterable[int],
        output_token_ids: Iterable[int] = (),
        logit_bias: Mapping[int, float] | None = None,
        *,
        banned_token_ids: Iterable[int] = (),
        min_output: int = 0,
    ) -> None:
        """`banned_token_ids` have probability 0 until the output has `min_output` tokens."""
        self._slots: dict[int, int] = {}
        self._token_ids: list[int] = []
        self._in_prompt: list[bool] = []
        self._output_counts: list[int] = []
        self._biases: list[float] = []
        self._outputs: list[int] = []
        self._min_output = min_output
        for token_id in dict.fromkeys(prompt_token_ids):
            self._in_prompt[self._slot(int(token_id))] = True
        for token_id, bias in (logit_bias or {}).items():
            self._biases[self._slot(int(token_id))] = float(bias)
        self._banned_slots = [self._slot(token_id) for token_id in banned_token_ids]
        self.append(output_token_ids)

    @property
    def num_outputs(self) -> int:
        """Output tokens counted so far."""
        return len(self._outputs)

    def append(self, token_ids: Iterable[int]) -> None:
        """Count committed output tokens."""
        for token_id in token_ids:
            slot = self._slot(int(token_id))
            self._output_counts[slot] += 1
            self._outputs.append(slot)

    def copy(self) -> TokenHistory:
        """A history that goes on by itself."""
        other = copy(self)
        other._slots = self._slots.copy()
        other._token_ids = self._token_ids.copy()
        other._in_prompt = self._in_prompt.copy()
        other._output_counts = self._output_counts.copy()
        other._biases = self._biases.copy()
        other._outputs = self._outputs.copy()
        return other

    def _slot(self, token_id: int) -> int:
        slot = self._slots.setdefault(token_id, len(self._token_ids))
        if slot == len(self._token_ids):
            self._token_ids.append(token_id)
            self._in_prompt.append(False)
            self._output_counts.append(0)
            self._biases.append(0.0)
        return slot

    def entries(self, draft_token_ids: Iterable[int] = ()) -> Entries:
        """All entries; drafted tokens included, which count for nothing yet.

        What is banned is so for all rows of a step: its draft tokens must not reach the minimum of the output.
        """
        added = [token_id for token_id in dict.fromkeys(map(int, draft_token_ids)) if token_id not in self._slots]
        absent = [False] * len(added)
        biases = np.array(self._biases + absent, dtype=np.float32)
        if self.num_outputs < self._min_output:
            biases[self._banned_slots] = -np.inf
        return Entries(
            np.array(self._token_ids + added, dtype=np.int32),
            np.array(self._in_prompt + absent, dtype=np.bool_),
            np.array(self._output_counts + absent, dtype=np.int32),
            biases,
        )

    def entries_since(self, num_outputs: int) -> Entries:
        """The entries that have changed since so many output tokens had been counted."""
        slots = set(self._outputs[num_outputs:])
        banned = set(self._banned_slots) if self.num_outputs < self._min_output else set()
        if num_outputs < self._min_output <= self.num_outputs:
            slots.update(self._banned_slots)
        return Entries(
            np.array([self._token_ids[slot] for slot in slots], dtype=np.int32),
            np.array([self._in_prompt[slot] for slot in slots], dtype=np.bool_),
            np.array([self._output_counts[slot] for slot in slots], dtype=np.int32),
            np.array([-np.inf if slot in banned else self._biases[slot] for slot in slots], dtype=np.float32),
        )


@dataclass(frozen=True)
class PenalizedSequence:
    """One sequence of the batch that has penalties or a bias."""

    index: int
    """Its place in the batch."""
    history: TokenHistory
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0


@dataclass(frozen=True)
class Penalties:
    """The penalties of a step, s sequences with n rows and e entries in all; nothing is stored for other sequences.

    An entry is a token of a sequence that is in its prompt, its output, its bias or its draft tokens of this step. A
    token has one entry a sequence.
    """

    rows: torch.Tensor  # [n] int64: the rows of the batch's logits that are concerned
    replacement_rows: torch.Tensor  # [num_rows] int32: place in `rows` of each row of the batch's logits, or -1
    row_sequences: torch.Tensor  # [n] int32: which of the s sequences
    row_steps: torch.Tensor  # [n] int32: how many draft tokens of the sequence come before the row
    draft_starts: torch.Tensor  # [s] int32: place of the sequence's first draft token in the batch's draft tokens
    cu_entries: torch.Tensor  # [s + 1] int32
    token_ids: torch.Tensor  # [e] int32
    in_prompt: torch.Tensor  # [e] bool
    output_counts: torch.Tensor  # [e] int32: without the draft tokens of this step
    biases: torch.Tensor  # [e] float32
    repetition_penalties: torch.Tensor  # [s] float32
    presence_penalties: torch.Tensor  # [s] float32
    frequency_penalties: torch.Tensor  # [s] float32
    max_entries: int  # of one sequence

    @classmethod
    def build(
        cls,
        sequences: Sequence[PenalizedSequence],
        cu_num_draft_tokens: IntArray,  # [batch + 1]
        draft_token_ids: IntArray,  # [total_draft]
        device: torch.device | str = "cpu",
    ) -> Penalties | None:
        """Lay out the penalties of one step from host data; None when no sequence has any.

        Raises ValueError when a sequence's index is outside the batch or occurs twice.
        """
        if not sequences:
            return None
        cu = np.asarray(cu_num_draft_tokens, dtype=np.int64)
        indices = np.array([sequence.index for sequence in sequences], dtype=np.int64)
        if len(np.unique(indices)) != len(indices) or indices.min() < 0 or indices.max() >= len(cu) - 1:
            raise ValueError("sequences: each index must be inside the batch and occur once")
        starts = cu[indices]
        num_rows = cu[indices + 1] - starts + 1
        row_sequences = np.repeat(np.arange(len(indices)), num_rows)
        row_steps = np.arange(num_rows.sum()) - np.repeat(num_rows.cumsum() - num_rows, num_rows)
        rows = (starts + indices)[row_sequences] + row_steps
        replacement_rows = np.full(cu[-1] + len(cu) - 1, -1, dtype=np.int32)
        replacement_rows[rows] = np.arange(len(rows), dtype=np.int32)
        entries = [
            sequence.history.entries(draft_token_ids[cu[sequence.index] : cu[sequence.index + 1]])
            for sequence in sequences
        ]
        num_entries = [len(entry.token_ids) for entry in entries]

        def put(array: npt.ArrayLike, dtype: npt.DTypeLike) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(array, dtype=dtype)).to(device, non_blocking=True)

        return cls(
            rows=put(rows, np.int64),
            replacement_rows=put(replacement_rows, np.int32),
            row_sequences=put(row_sequences, np.int32),
            row_steps=put(row_steps, np.int32),
            draft_starts=put(starts, np.int32),
            cu_entries=put(np.cumsum([0, *num_entries]), np.int32),
            token_ids=put(np.concatenate([entry.token_ids for entry in entries]), np.int32),
            in_prompt=put(np.concatenate([entry.in_prompt for entry in entries]), np.bool_),
            output_counts=put(np.concatenate([entry.output_counts for entry in entries]), np.int32),
            biases=put(np.concatenate([entry.biases for entry in entries]), np.float32),
            repetition_penalties=put([sequence.repetition_penalty for sequence in sequences], np.float32),
            presence_penalties=put([sequence.presence_penalty for sequence in sequences], np.float32),
            frequency_penalties=put([sequence.frequency_penalty for sequence in sequences], np.float32),
            max_entries=max(num_entries),
        )
