"""Device functions of `kernels.draft_sample` that rank what may follow by log q + g.

The F best of all tokens are in the F groups with the best tokens: the pass over all logits leaves the best of each
group behind, and only the tokens of F groups are looked at again.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# Triton's decorators and device functions carry no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.block_draw_triton import CHUNK, visit_block
from kernels.block_statistics_triton import BlockStatistics
from kernels.integer_weights_triton import finite_or_zero, load_logits
from kernels.ordered_keys_triton import ABSENT, ordered_keys, value_of_key
from kernels.random_triton import log2_of_exponentials

_LN_2 = tl.constexpr(0.6931471805599453)
_LOG2_E = tl.constexpr(1.4426950408889634)
# Before every score's key.
_FIRST = tl.constexpr(2147483647)


@triton.jit
def _group_keys_kernel(
    logits_ptr,  # [batch, vocab_size]
    logits_stride,
    thresholds_ptr,  # [batch] float32, or None
    group_maxima_ptr,  # [batch, num_groups] float32, or None
    groups_ptr,  # [batch, num_groups] int32, room for lists, or None
    temperature_ptr,  # [batch] float32
    is_coupled_ptr,  # [batch] int32
    seeds_ptr,  # [batch] int64
    positions_ptr,  # [batch] int64
    maxima_ptr,  # [batch, num_blocks] float32; there already where there are thresholds
    group_keys_ptr,  # [batch, num_groups] float32
    vocab_size,
    num_blocks,
    num_groups,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The smallest key of each group of coupled rows."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    if (temperature > 0.0) & (tl.load(is_coupled_ptr + row) != 0):
        threshold = tl.full([], float("-inf"), tl.float32)
        if thresholds_ptr is not None:
            threshold = tl.load(thresholds_ptr + row)
        visit_block(
            row,
            tl.program_id(1),
            temperature,
            False,
            tl.load(seeds_ptr + row),
            tl.load(positions_ptr + row),
            threshold,
            None,
            0,
            logits_ptr,
            logits_stride,
            None,
            None,
            group_maxima_ptr,
            groups_ptr,
            maxima_ptr,
            group_keys_ptr,
            vocab_size,
            num_blocks,
            num_groups,
            BLOCK,
            GROUP,
            CHUNK,
        )


@triton.jit
def store_best_of_all(
    row,
    temperature,
    threshold,
    seed,
    position,
    logits_ptr,  # [batch, vocab_size]
    logits_stride,
    maxima_ptr,  # [batch, num_blocks] float32
    group_keys_ptr,  # [batch, num_groups] float32
    token_ids_ptr,  # [batch] int32
    outcome_ids_ptr,  # [batch, NUM_BEST] int32, or None
    outcome_scores_ptr,  # [batch, NUM_BEST] float32, or None
    vocab_size,
    num_blocks,
    num_groups,
    NUM_BEST: tl.constexpr,
    SLOTS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Store a coupled row's best tokens, lower ids first among equals: the best one as its draft token."""
    scale = _LOG2_E / temperature
    groups = tl.arange(0, NUM_GROUPS)
    is_filled = groups * GROUP < vocab_size
    maxima = tl.load(maxima_ptr + row * num_blocks + groups // (BLOCK // GROUP), mask=is_filled, other=float("-inf"))
    maximum = finite_or_zero(tl.max(maxima, axis=0))
    keys = tl.load(group_keys_ptr + row * num_groups + groups, mask=is_filled, other=float("inf"))
    keys = tl.where(is_filled, ordered_keys((maxima - maximum) * scale - keys, 32), ABSENT)
    slots = tl.arange(0, SLOTS)
    chosen = tl.zeros([SLOTS], dtype=tl.int32)
    for index in range(NUM_BEST):
        group = tl.argmax(keys, axis=0)
        keys = tl.where(groups == group, ABSENT, keys)
        chosen = tl.where(slots == index, group, chosen)

    ids = tl.reshape(chosen[:, None] * GROUP + tl.arange(0, GROUP)[None, :], [SLOTS * GROUP])
    is_token = (tl.arange(0, SLOTS * GROUP) < NUM_BEST * GROUP) & (ids < vocab_size)
    logits = load_logits(row, ids, logits_ptr, logits_stride, None, None, vocab_size, is_token)
    logits = tl.where(logits >= threshold, logits, float("-inf"))
    scores = (logits - maximum) * scale - log2_of_exponentials(seed, position, ids)
    keys = tl.where(is_token, ordered_keys(scores, 32), ABSENT)
    for index in range(NUM_BEST):
        key = tl.max(keys, axis=0)
        token = tl.min(tl.where(keys == key, ids, 2147483647), axis=0)
        keys = tl.where(ids == token, ABSENT, keys)
        if index == 0:
            tl.store(token_ids_ptr + row, token)
        if outcome_ids_ptr is not None:
            tl.store(outcome_ids_ptr + row * NUM_BEST + index, token)
            tl.store(outcome_scores_ptr + row * NUM_BEST + index, value_of_key(key, 32) * _LN_2)


@triton.jit
def store_best_candidates(
    row,
    temperature,
    seed,
    position,
    ids,  # [SLOTS], the most likely first
    logits,  # [SLOTS], -inf where filtered
    maximum,
    is_candidate,
    is_drawn,
    outcome_ids_ptr,  # [batch, NUM_BEST] int32
    outcome_scores_ptr,  # [batch, NUM_BEST] float32
    NUM_BEST: tl.constexpr,
):
    """Store the drawn token and the best of the other candidates: of log q + g, without temperature of the logits."""
    scores = logits - finite_or_zero(maximum)
    if temperature > 0.0:
        scores *= _LOG2_E / temperature
        total = tl.sum(tl.where(is_candidate, tl.exp2(scores), 0.0), axis=0)
        scores -= tl.log2(tl.where(total > 0.0, total, 1.0))
        scores = (scores - log2_of_exponentials(seed, position, tl.where(is_candidate, ids, 0))) * _LN_2
    keys = tl.where(is_candidate, ordered_keys(scores, 32), ABSENT)
    keys = tl.where(is_drawn, _FIRST, keys)
    slots = tl.arange(0, ids.shape[0])
    for index in range(NUM_BEST):
        slot = tl.argmax(keys, axis=0)
        is_chosen = slots == slot
        keys = tl.where(is_chosen, ABSENT, keys)
        tl.store(outcome_ids_ptr + row * NUM_BEST + index, tl.sum(tl.where(is_chosen, ids, 0), axis=0))
        score = tl.sum(tl.where(is_chosen, scores, 0.0), axis=0)
        tl.store(outcome_scores_ptr + row * NUM_BEST + index, score)


def launch_group_keys(
    logits: torch.Tensor,  # [batch, vocab_size]
    statistics: BlockStatistics,  # its maxima are set where there are no thresholds
    thresholds: torch.Tensor | None,  # [batch] float32
    temperature: torch.Tensor,  # [batch] float32, contiguous
    is_coupled: torch.Tensor,  # [batch] int32, contiguous
    seeds: torch.Tensor,  # [batch] int64, contiguous
    positions: torch.Tensor,  # [batch] int64, contiguous
) -> torch.Tensor:  # [batch, num_groups] float32
    """The smallest key of each group of the coupled rows."""
    group_keys = torch.empty_like(statistics.group_maxima)
    is_filtered = thresholds is not None
    _group_keys_kernel[(len(logits), statistics.num_blocks)](
        logits,
        logits.stride(0),
        thresholds,
        statistics.group_maxima if is_filtered else None,
        torch.empty_like(group_keys, dtype=torch.int32) if is_filtered else None,
        temperature,
        is_coupled,
        seeds,
        positions,
        statistics.maxima,
        group_keys,
        logits.shape[1],
        statistics.num_blocks,
        statistics.num_groups,
        BLOCK=statistics.block_size,
        GROUP=statistics.group_size,
        CHUNK=min(CHUNK, statistics.block_size // statistics.group_size),
        num_warps=4,
    )
    return group_keys
