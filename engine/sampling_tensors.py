"""Sampling parameters of a batch as the tensors that the kernels take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kernels.penalties import PenalizedSequence, TokenHistory
from outrider.protocol.sampling_parameters import SamplingParameters


@dataclass(frozen=True)
class SamplingTensors:
    """One entry a sequence. The filters are None, and cost nothing, where no sequence uses any of them.

    All of them or none: kernels are compiled for either, and not for each combination.
    """

    temperature: torch.Tensor  # [batch] float32
    seeds: torch.Tensor  # [batch] int64, the bit pattern of a uint64
    positions: torch.Tensor  # [batch] int64
    is_coupled: torch.Tensor  # [batch] int32: 0 or 1
    top_k: torch.Tensor | None  # [batch] int32
    top_p: torch.Tensor | None  # [batch] float32
    min_p: torch.Tensor | None  # [batch] float32

    @classmethod
    def build(
        cls,
        parameters: Sequence[SamplingParameters],
        *,
        positions: Sequence[int],
        is_coupled: Sequence[bool],
        vocabulary_size: int,
        device: torch.device,
    ) -> SamplingTensors:
        """Upload the parameters of a batch; `positions` are of the tokens that each sequence samples first."""

        def put(values: npt.ArrayLike, dtype: npt.DTypeLike) -> torch.Tensor:
            return torch.from_numpy(np.asarray(values, dtype=dtype)).to(device, non_blocking=True)

        has_filters = any(p.has_filters for p in parameters)
        return cls(
            temperature=put([p.temperature for p in parameters], np.float32),
            seeds=put(np.array([p.seed for p in parameters], dtype=np.uint64).view(np.int64), np.int64),
            positions=put(positions, np.int64),
            is_coupled=put(is_coupled, np.int32),
            # A top_k beyond the vocabulary keeps everything, and need not fit the kernel's 32 bits.
            top_k=put([min(p.top_k, vocabulary_size) for p in parameters], np.int32) if has_filters else None,
            top_p=put([p.top_p for p in parameters], np.float32) if has_filters else None,
            min_p=put([p.min_p for p in parameters], np.float32) if has_filters else None,
        )


def new_history(sampling: SamplingParameters, token_ids: Sequence[int], num_prompt_tokens: int) -> TokenHistory | None:
    """The token counts of a sequence that has penalties or a bias, None for others."""
    if not sampling.has_penalties:
        return None
    return TokenHistory(token_ids[:num_prompt_tokens], token_ids[num_prompt_tokens:], sampling.logit_bias)


def penalized(index: int, sampling: SamplingParameters, history: TokenHistory) -> PenalizedSequence:
    """What the kernels need of a penalised sequence at place `index` of the batch."""
    return PenalizedSequence(
        index=index,
        history=history,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
    )
