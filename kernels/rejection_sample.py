"""Verification of draft tokens: keeps exactly as many as leave the target's distribution unchanged.

By a test of p against q: Leviathan, Kalman, Matias, "Fast Inference from Transformers via Speculative Decoding" (arXiv
2211.17192); Chen et al., "Accelerating Large Language Model Decoding with Speculative Sampling" (arXiv 2302.01318). By
coupling: Daliri, Musco, Suresh, "Coupling without Communication and Drafter-Invariant Speculative Decoding" (arXiv
2408.07978).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.arguments import check_logits, check_shaping, check_tensor
from kernels.dispatch import runs_triton
from kernels.integer_weights import BLOCK_SIZE
from kernels.limits import MAX_DRAFT_TOKENS
from kernels.penalties import Penalties
from kernels.rejection_sample_reference import reference_rejection_sample
from kernels.shape_logits import apply_penalties, logit_thresholds


@dataclass(frozen=True)
class RejectionSample:
    """What a step commits: num_accepted + 1 tokens a sequence, the last one recovered, bonus or plain."""

    token_ids: torch.Tensor  # [batch, max_num_draft_tokens + 1] int32, -1 behind the last token
    num_accepted: torch.Tensor  # [batch] int32


def rejection_sample(
    target_logits: torch.Tensor,  # [num_rows, vocab_size] float32, bfloat16 or float16
    cu_num_draft_tokens: torch.Tensor,  # [batch + 1] int32, starts at 0
    draft_token_ids: torch.Tensor,  # [total_draft] int32
    candidate_ids: torch.Tensor,  # [total_draft, m] int32
    candidate_weights: torch.Tensor,  # [total_draft, m] int32, in units of 1/65,536
    temperature: torch.Tensor,  # [batch] float32, finite; 0: greedy
    seeds: torch.Tensor,  # [batch] int64, the bit pattern of a uint64
    positions: torch.Tensor,  # [batch] int64: of the token that each sequence's first row decides
    *,
    max_num_draft_tokens: int,
    is_coupled: torch.Tensor | None = None,  # [batch] int32; not 0: verified by coupling; None: no sequence is
    top_k: torch.Tensor | None = None,  # [batch] int32; 0: off
    top_p: torch.Tensor | None = None,  # [batch] float32; 1: off
    min_p: torch.Tensor | None = None,  # [batch] float32; 0: off
    penalties: Penalties | None = None,
    _block_size: int = BLOCK_SIZE,  # tests see many blocks in a small vocabulary
) -> RejectionSample:
    """Accept draft tokens and sample the token after them, for a ragged batch of sequences.

    Sequence i owns the num_draft + 1 consecutive rows of target_logits from row cu_num_draft_tokens[i] + i on: row j is
    the target's distribution at the position of its draft token j, the last row at the position behind them. A sequence
    without draft tokens has its one row sampled. num_draft is at most max_num_draft_tokens, itself at most 32. Rows and
    draft tokens behind those of the last sequence are ignored, so that buffers may be longer than the batch.

    Temperature 0 accepts while the draft token is the argmax, lowest id among ties, and ends with the argmax. A coupled
    sequence accepts while the draft token is the one that the target draws at its position, and ends with the target's:
    the tokens are the same whatever was drafted, and candidates are not looked at. Otherwise draft token x is accepted
    with probability min(1, p(x) / q(x)); at the first rejection a token is drawn from the normalised positive part of
    p - q, after full acceptance from p. q(x) is the candidate's weight / 65,536. Where no candidate of positive weight
    is the draft token, q is one-hot on it, which is exact however the token was found. Candidates of weight 0 and ids
    outside the vocabulary count as absent; ids of positive weight must be distinct.

    Randomness depends on seed and position alone: ACCEPT tests the draft token at its position; whatever is drawn from
    p or p - q is the token that minimises E / p or E / (p - q), E being TARGET noise of token and position, the lowest
    id among equals (`kernels.random`). NaN logits count as -inf, +inf as the largest float32; a row without any finite
    logit yields token 0.
    Nothing here waits for the GPU. Raises ValueError, naming the argument, when shapes or types do not fit.
    """
    device, batch_size = target_logits.device, temperature.shape[0]
    check_logits("target_logits", target_logits)
    check_tensor("cu_num_draft_tokens", cu_num_draft_tokens, (batch_size + 1,), (torch.int32,), device)
    check_tensor("draft_token_ids", draft_token_ids, (None,), (torch.int32,), device)
    check_tensor("candidate_ids", candidate_ids, (len(draft_token_ids), None), (torch.int32,), device)
    check_tensor("candidate_weights", candidate_weights, candidate_ids.shape, (torch.int32,), device)
    check_shaping(batch_size, device, temperature, top_k, top_p, min_p)
    check_tensor("seeds", seeds, (batch_size,), (torch.int64,), device)
    check_tensor("positions", positions, (batch_size,), (torch.int64,), device)
    if is_coupled is not None:
        check_tensor("is_coupled", is_coupled, (batch_size,), (torch.int32,), device)
    if not 0 <= max_num_draft_tokens <= MAX_DRAFT_TOKENS:
        raise ValueError(f"max_num_draft_tokens is {max_num_draft_tokens}, expected 0 to {MAX_DRAFT_TOKENS}")

    logits = apply_penalties(target_logits, penalties, draft_token_ids)
    drafts = (cu_num_draft_tokens, draft_token_ids, candidate_ids, candidate_weights)
    if runs_triton(target_logits):
        from kernels.rejection_sample_triton import launch_rejection_sample

        return RejectionSample(
            *launch_rejection_sample(
                logits,
                *drafts,
                temperature,
                seeds,
                positions,
                is_coupled,
                (top_k, top_p, min_p),
                max_num_draft_tokens,
                _block_size,
            )
        )
    thresholds = None
    if top_k is not None or top_p is not None or min_p is not None:
        row_sequences = _row_sequences(cu_num_draft_tokens, len(target_logits))
        thresholds = logit_thresholds(logits, temperature, top_k, top_p, min_p, row_sequences)
    return RejectionSample(
        *reference_rejection_sample(
            logits, thresholds, *drafts, temperature, seeds, positions, is_coupled, max_num_draft_tokens, _block_size
        )
    )


def _row_sequences(
    cu_num_draft_tokens: torch.Tensor,  # [batch + 1] int32
    num_rows: int,
) -> torch.Tensor:  # [num_rows] int32
    """Which sequence each row belongs to; rows behind the last sequence's go to the last."""
    batch_size = len(cu_num_draft_tokens) - 1
    device = cu_num_draft_tokens.device
    ends = cu_num_draft_tokens[1:] + torch.arange(1, batch_size + 1, dtype=torch.int32, device=device)
    rows = torch.arange(num_rows, dtype=torch.int32, device=device)
    return torch.searchsorted(ends, rows, right=True, out_int32=True).clamp_(max=batch_size - 1)
