"""Random ragged batches for the sampling kernels, and the distributions that they should produce."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from kernels.draft_sample import draft_sample
from kernels.penalties import PenalizedSequence, Penalties, TokenHistory
from kernels.rejection_sample import RejectionSample, rejection_sample


@dataclass(frozen=True)
class Case:
    """The arguments of one `rejection_sample`."""

    target_logits: torch.Tensor
    cu_num_draft_tokens: torch.Tensor
    draft_token_ids: torch.Tensor
    candidate_ids: torch.Tensor
    candidate_weights: torch.Tensor
    temperature: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor
    max_num_draft_tokens: int
    is_coupled: torch.Tensor | None = None
    top_k: torch.Tensor | None = None
    top_p: torch.Tensor | None = None
    min_p: torch.Tensor | None = None
    penalties: Penalties | None = None

    def on(self, device: torch.device) -> Case:
        return replace(self, **{field.name: moved(getattr(self, field.name), device) for field in fields(self)})

    def run(self, **private: Any) -> RejectionSample:
        return rejection_sample(**{field.name: getattr(self, field.name) for field in fields(self)}, **private)


def moved(value: Any, device: torch.device) -> Any:
    """Tensors, and the tensors in penalties, on another device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, Penalties):
        return replace(value, **{field.name: moved(getattr(value, field.name), device) for field in fields(Penalties)})
    return value


def make_case(
    num_draft: Sequence[int],
    vocab_size: int,
    *,
    dtype: torch.dtype = torch.float32,
    num_candidates: int = 8,
    seed: int = 0,
    has_filters: bool = False,
    has_penalties: bool = False,
    has_coupled: bool = True,
) -> Case:
    """A batch in which greedy, random, coupled and one-hot drafts mix, with draft logits not far from the target's."""
    generator = torch.Generator().manual_seed(seed)
    batch_size, total = len(num_draft), sum(num_draft)
    counts = torch.tensor(num_draft, dtype=torch.int64)
    sequences = torch.arange(batch_size)
    draft_sequences = sequences.repeat_interleave(counts)
    cu = torch.zeros(batch_size + 1, dtype=torch.int32)
    cu[1:] = counts.cumsum(0)
    logits = 3 * torch.randn(total + batch_size, vocab_size, generator=generator)
    draft_logits = logits[torch.arange(total) + draft_sequences] + 0.4 * torch.randn(
        total, vocab_size, generator=generator
    )
    temperature = torch.tensor([0.0, 0.7, 1.0, 1.3])[sequences % 4]
    seeds = torch.randint(-(2**63), 2**63 - 1, (batch_size,), generator=generator)
    positions = torch.randint(0, 2**33, (batch_size,), generator=generator)
    steps = torch.arange(total) - cu[draft_sequences]
    # Neither in step with the temperatures nor with the filters.
    is_coupled = (sequences % 5 % 2).int() if has_coupled else None
    drafts = draft_sample(
        draft_logits,
        temperature[draft_sequences],
        seeds[draft_sequences],
        positions[draft_sequences] + steps,
        num_candidates=num_candidates,
        is_coupled=None if is_coupled is None else is_coupled[draft_sequences],
    )
    weights = drafts.candidate_weights
    weights[::5] = 0
    penalties = None
    if has_penalties:
        history = torch.randint(0, vocab_size, (batch_size, 12), generator=generator).tolist()
        penalties = Penalties.build(
            [
                PenalizedSequence(
                    index,
                    TokenHistory(history[index][:7], history[index][7:], {history[index][0]: 1.5, 3: -2.0}),
                    repetition_penalty=1.3,
                    presence_penalty=0.4,
                    frequency_penalty=0.3,
                )
                for index in range(0, batch_size, 2)
            ],
            cu.numpy(),
            drafts.token_ids.numpy(),
        )
    return Case(
        logits.to(dtype),
        cu,
        drafts.token_ids,
        drafts.candidate_ids,
        weights,
        temperature,
        seeds,
        positions,
        max(num_draft, default=0),
        is_coupled,
        torch.tensor([0, 5, 0, 9], dtype=torch.int32)[sequences % 4] if has_filters else None,
        torch.tensor([1.0, 0.9, 0.8])[sequences % 3] if has_filters else None,
        torch.tensor([0.0, 0.0, 0.0, 0.0, 0.05])[sequences % 5] if has_filters else None,
        penalties,
    )


def shaped_probabilities(
    logits: np.ndarray[Any, Any],  # [n, vocab_size]
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> np.ndarray[Any, Any]:  # [n, vocab_size] float64
    """p by its definition, row by row, without any of the code under test."""
    rows = []
    for row in np.asarray(logits, dtype=np.float64):
        probabilities = np.exp((row - row.max()) / temperature)
        if 0 < top_k < len(row):
            probabilities[row < np.sort(row)[-top_k]] = 0
        probabilities /= probabilities.sum()
        if top_p < 1:
            order = np.argsort(-row)
            last = order[np.searchsorted(np.cumsum(probabilities[order]), top_p)]
            probabilities[row < row[last]] = 0
        probabilities[probabilities < min_p * probabilities.max()] = 0
        rows.append(probabilities / probabilities.sum())
    return np.stack(rows)
