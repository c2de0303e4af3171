"""Sampling of draft tokens from a distribution that fits on the wire exactly.

The drafter's shaped distribution is cut to its most likely candidates and rounded to integers, and the token is drawn
from those integers: the verifier's test then knows q without error (`kernels.rejection_sample`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.arguments import check_logits, check_shaping, check_tensor
from kernels.dispatch import runs_triton
from kernels.integer_weights import exponential_weights, sanitized
from kernels.limits import NUM_CANDIDATES, WEIGHT_TOTAL
from kernels.random import Purpose, keyed_words
from kernels.shape_logits import logit_thresholds

MAX_CANDIDATES = 1024


@dataclass(frozen=True)
class DraftSample:
    """One draft token a sequence and the distribution that it was drawn from."""

    token_ids: torch.Tensor  # [batch] int32
    candidate_ids: torch.Tensor  # [batch, m] int32, most likely first, lower id first among equals
    candidate_weights: torch.Tensor  # [batch, m] below 65,536 and summing to it; all 0: the token was certain
    # int32, or int16 with the bits of a uint16


def draft_sample(
    logits: torch.Tensor,  # [batch, vocab_size] float32, bfloat16 or float16
    temperature: torch.Tensor,  # [batch] float32, finite; 0: greedy
    seeds: torch.Tensor,  # [batch] int64, the bit pattern of a uint64
    positions: torch.Tensor,  # [batch] int64: of the token to be drawn
    *,
    top_k: torch.Tensor | None = None,  # [batch] int32; 0: off
    top_p: torch.Tensor | None = None,  # [batch] float32; 1: off
    min_p: torch.Tensor | None = None,  # [batch] float32; 0: off
    num_candidates: int = NUM_CANDIDATES,
    max_candidates: torch.Tensor | None = None,  # [batch] int32, at least 1; None: num_candidates
    out: DraftSample | None = None,  # contiguous tensors to write to, weights in either type
) -> DraftSample:
    """Draw one token a sequence, with DRAFT noise, from the most likely num_candidates tokens, at most 1,024.

    A sequence with a lower `max_candidates` gets what it would get if that were num_candidates, and has no weight
    behind: unlike top-k, which keeps all ties at its edge, this bounds how many columns have any.

    The candidates' probabilities are rounded to integers that sum to 65,536 by largest remainders. Slots that the
    vocabulary cannot fill have id 0 and weight 0. At temperature 0, where no logit is finite and where one candidate
    would take all the weight, the token is the most likely candidate and all weights are 0. Of equal logits the one
    with the lower id counts as more likely. NaN logits count as impossible. Raises ValueError, naming the argument,
    when shapes or types do not fit.
    """
    check_logits("logits", logits)
    batch_size = len(logits)
    check_shaping(batch_size, logits.device, temperature, top_k, top_p, min_p)
    check_tensor("seeds", seeds, (batch_size,), (torch.int64,), logits.device)
    check_tensor("positions", positions, (batch_size,), (torch.int64,), logits.device)
    if max_candidates is not None:
        check_tensor("max_candidates", max_candidates, (batch_size,), (torch.int32,), logits.device)
    if not 1 <= num_candidates <= MAX_CANDIDATES:
        raise ValueError(f"num_candidates is {num_candidates}, expected 1 to {MAX_CANDIDATES}")
    if out is None:
        out = DraftSample(
            seeds.new_empty(batch_size, dtype=torch.int32),
            seeds.new_empty((batch_size, num_candidates), dtype=torch.int32),
            seeds.new_empty((batch_size, num_candidates), dtype=torch.int32),
        )
    else:
        _check_out(out, batch_size, num_candidates, logits.device)
    if runs_triton(logits):
        from kernels.draft_sample_triton import launch_draft_sample

        launch_draft_sample(out, logits, temperature, seeds, positions, (top_k, top_p, min_p), max_candidates)
        return out
    thresholds = logit_thresholds(logits, temperature, top_k, top_p, min_p)
    token_ids, candidate_ids, weights = reference_draft_sample(
        logits, thresholds, temperature, seeds, positions, num_candidates, max_candidates
    )
    out.token_ids.copy_(token_ids)
    out.candidate_ids.copy_(candidate_ids)
    out.candidate_weights.copy_(weights)
    return out


def _check_out(out: DraftSample, batch_size: int, num_candidates: int, device: torch.device) -> None:
    i32, shape = (torch.int32,), (batch_size, num_candidates)
    check_tensor("out.token_ids", out.token_ids, shape[:1], i32, device)
    check_tensor("out.candidate_ids", out.candidate_ids, shape, i32, device)
    check_tensor("out.candidate_weights", out.candidate_weights, shape, (torch.int16, torch.int32), device)
    for name in ("token_ids", "candidate_ids", "candidate_weights"):
        if not getattr(out, name).is_contiguous():
            raise ValueError(f"out.{name} must be contiguous")


def reference_draft_sample(
    logits: torch.Tensor,  # [batch, vocab_size]
    thresholds: torch.Tensor | None,  # [batch] float32
    temperature: torch.Tensor,  # [batch] float32
    seeds: torch.Tensor,  # [batch] int64
    positions: torch.Tensor,  # [batch] int64
    num_candidates: int,
    max_candidates: torch.Tensor | None = None,  # [batch] int32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # [batch] int32, [batch, m] int32, [batch, m] int32
    """Token ids, candidate ids and candidate weights, as `DraftSample` describes them."""
    values, ids = _most_likely(logits, min(num_candidates, logits.shape[1]))
    maxima = values[:, 0]
    if thresholds is not None:
        values = torch.where(values >= thresholds.unsqueeze(1), values, -torch.inf)
    weights = exponential_weights(values, maxima, torch.where(temperature > 0, temperature, 1.0)).long()
    if max_candidates is not None:
        slots = torch.arange(weights.shape[1], device=weights.device)
        weights = torch.where(slots < max_candidates.unsqueeze(1), weights, 0)
    weights = _rounded(weights)
    # A token that takes everything is certain, which is written as no weight at all: 65,536 does not fit in 16 bits.
    is_random = (temperature > 0) & (maxima > -torch.inf) & (weights[:, 0] < WEIGHT_TOTAL)
    weights = torch.where(is_random.unsqueeze(1), weights, 0)

    words = keyed_words(seeds, positions, torch.full_like(positions, Purpose.DRAFT))
    draws = words[:, :1] >> 16
    places = (weights.cumsum(dim=1) <= draws).sum(dim=1)
    token_ids = ids.gather(1, torch.where(is_random, places, 0).unsqueeze(1)).squeeze(1)

    padding = (0, num_candidates - ids.shape[1])
    pad = torch.nn.functional.pad
    return token_ids.int(), pad(ids.int(), padding), pad(weights.int(), padding)


def _most_likely(
    logits: torch.Tensor,  # [batch, vocab_size]
    num_top: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # [batch, num_top] float32, sanitized, and int64
    """The largest logits in descending order and their ids, lower ids first among equals."""
    values = sanitized(logits)
    top_values, top_ids = values.topk(num_top, dim=1)
    # Which of the tokens equal to the last one are among the largest, topk leaves open.
    bounds = top_values[:, -1:]
    num_from_bound = (values >= bounds).sum(dim=1)
    for row in torch.nonzero(num_from_bound > num_top).flatten().tolist():
        num_above = int((top_values[row] > bounds[row]).sum())
        top_ids[row, num_above:] = torch.nonzero(values[row] == bounds[row]).flatten()[: num_top - num_above]
    top_ids, _ = top_ids.sort(dim=1)
    top_values, order = values.gather(1, top_ids).sort(dim=1, descending=True, stable=True)
    return top_values, top_ids.gather(1, order)


def _rounded(
    weights: torch.Tensor,  # [batch, k] int64, at most 2**40
) -> torch.Tensor:  # [batch, k] int64
    """Integers in proportion to the weights that sum to WEIGHT_TOTAL: rounded down, and the units that are then missing
    go to the largest remainders, the first among equals. Integer division leaves the remainders exact."""
    totals = weights.sum(dim=1, keepdim=True).clamp_min_(1)
    scaled = weights * WEIGHT_TOTAL
    floors = scaled // totals
    order = (scaled - floors * totals).argsort(dim=1, descending=True, stable=True)
    ranks = torch.empty_like(order).scatter_(1, order, torch.arange(weights.shape[1]).expand_as(order))
    return floors + (ranks < WEIGHT_TOTAL - floors.sum(dim=1, keepdim=True))
