"""Triton kernel of `kernels.draft_sample`."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# Triton's decorators and device functions carry no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.integer_weights_triton import exponential_weights
from kernels.random import Purpose
from kernels.random_triton import philox_words

_DRAFT = tl.constexpr(int(Purpose.DRAFT))


@triton.jit
def _draft_sample_kernel(
    top_logits_ptr,  # [batch, num_top], in any order
    top_ids_ptr,  # [batch, num_top] int64
    thresholds_ptr,  # [batch] float32, or None
    temperature_ptr,  # [batch] float32
    seeds_ptr,  # [batch] int64
    positions_ptr,  # [batch] int64
    token_ids_ptr,  # [batch] int32
    candidate_ids_ptr,  # [batch, num_candidates] int32
    candidate_weights_ptr,  # [batch, num_candidates] int32
    num_top,
    num_candidates,
    SLOTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slots = tl.arange(0, SLOTS)
    mask = slots < num_top
    logits = tl.load(top_logits_ptr + row * num_top + slots, mask=mask, other=float("-inf")).to(tl.float32)
    logits = tl.where(logits == logits, logits, float("-inf"))
    logits = tl.minimum(logits, 3.4028234663852886e38)
    # Empty slots come behind all tokens.
    ids = tl.load(top_ids_ptr + row * num_top + slots, mask=mask, other=0).to(tl.int32)
    ids = tl.where(mask, ids, 2147483647 - SLOTS + slots)

    # rank[i]: how many candidates come before i, by [i, j] comparisons; a sort would need its payload to follow.
    is_before = (logits[None, :] > logits[:, None]) | (
        (logits[None, :] == logits[:, None]) & (ids[None, :] < ids[:, None])
    )
    ranks = tl.sum(is_before.to(tl.int32), axis=1)

    maximum = tl.max(logits, axis=0)
    temperature = tl.load(temperature_ptr + row)
    is_random = (temperature > 0.0) & (maximum > float("-inf"))
    weights = exponential_weights(logits, maximum, tl.where(temperature > 0.0, temperature, 1.0))
    if thresholds_ptr is not None:
        weights = tl.where(logits >= tl.load(thresholds_ptr + row), weights, 0)

    # Largest remainders, in exact integers.
    total = tl.maximum(tl.sum(weights, axis=0), 1)
    floors = weights * 65536 // total
    remainders = weights * 65536 - floors * total
    is_larger = (remainders[None, :] > remainders[:, None]) | (
        (remainders[None, :] == remainders[:, None]) & (ranks[None, :] < ranks[:, None])
    )
    num_larger = tl.sum(is_larger.to(tl.int64), axis=1)
    rounded = floors + (num_larger < 65536 - tl.sum(floors, axis=0)).to(tl.int64)
    # A token that takes everything is certain, which is written as no weight at all: 65,536 does not fit in 16 bits.
    is_random = is_random & (tl.max(rounded, axis=0) < 65536)
    rounded = tl.where(is_random, rounded, 0)

    word, _, _, _ = philox_words(tl.load(seeds_ptr + row), tl.load(positions_ptr + row), _DRAFT)
    draw = (word >> 16).to(tl.int64)
    cumulative = tl.sum(tl.where(ranks[None, :] <= ranks[:, None], rounded[None, :], 0), axis=1)
    is_drawn = (cumulative - rounded <= draw) & (draw < cumulative)
    is_chosen = tl.where(is_random, is_drawn, ranks == 0)
    tl.store(token_ids_ptr + row, tl.sum(tl.where(is_chosen, ids, 0), axis=0))

    tl.store(candidate_ids_ptr + row * num_candidates + ranks, ids, mask=mask)
    tl.store(candidate_weights_ptr + row * num_candidates + ranks, rounded.to(tl.int32), mask=mask)
    is_padding = (slots >= num_top) & (slots < num_candidates)
    tl.store(candidate_ids_ptr + row * num_candidates + slots, slots * 0, mask=is_padding)
    tl.store(candidate_weights_ptr + row * num_candidates + slots, slots * 0, mask=is_padding)


def launch_draft_sample(
    top_logits: torch.Tensor,  # [batch, k] in any order
    top_ids: torch.Tensor,  # [batch, k] int64
    thresholds: torch.Tensor | None,  # [batch] float32
    temperature: torch.Tensor,  # [batch] float32
    seeds: torch.Tensor,  # [batch] int64
    positions: torch.Tensor,  # [batch] int64
    num_candidates: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # [batch] int32, [batch, m] int32, [batch, m] int32
    """Token ids, candidate ids and candidate weights, as `DraftSample` describes them."""
    batch_size, num_top = top_logits.shape
    device = top_logits.device
    token_ids = torch.empty(batch_size, dtype=torch.int32, device=device)
    candidate_ids = torch.empty((batch_size, num_candidates), dtype=torch.int32, device=device)
    candidate_weights = torch.empty_like(candidate_ids)
    if batch_size:
        _draft_sample_kernel[(batch_size,)](
            top_logits.contiguous(),
            top_ids.contiguous(),
            thresholds,
            temperature.contiguous(),
            seeds.contiguous(),
            positions.contiguous(),
            token_ids,
            candidate_ids,
            candidate_weights,
            num_top,
            num_candidates,
            SLOTS=triton.next_power_of_2(num_candidates),
        )
    return token_ids, candidate_ids, candidate_weights
