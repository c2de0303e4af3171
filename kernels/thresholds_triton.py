"""Triton kernel of `kernels.shape_logits.logit_thresholds`.

One program a row. It never reads the whole row: the maxima of groups of tokens, which the pass over all logits left
behind, say where logits above a bound can be, and the threshold is searched for in those groups alone.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# Triton's decorators and device functions carry no types.

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from kernels.block_statistics_triton import BlockStatistics, launch_block_statistics, row_of, row_statistics
from kernels.integer_weights import BLOCK_SIZE
from kernels.integer_weights_triton import exponential_weights, load_logits
from kernels.ordered_keys_triton import ABSENT, KEY_OF_MINUS_INFINITY, key_bits, key_of_rank, ordered_keys, value_of_key

if TYPE_CHECKING:
    from kernels.shape_logits import PenalizedLogits

Filters = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""Top-k [batch] int32, top-p and min-p [batch] float32; None where no sequence uses it."""

# Groups that top-p alone looks into first, and how many times more each time that they weigh too little.
_FIRST_GROUPS = tl.constexpr(128)
_MORE_GROUPS = tl.constexpr(8)


@triton.jit
def _list_groups(keys, rank, num_filled, groups_ptr, KEY_BITS: tl.constexpr):
    """List the groups from the rank-th largest on, ties included; returns a bound and the number of groups.

    No logit at or above the bound is in another group: it is the rank-th largest maximum, -inf once all are listed.
    """
    bound = key_of_rank(keys, rank)
    is_listed = keys >= bound
    places = tl.cumsum(is_listed.to(tl.int32), axis=0) - 1
    tl.debug_barrier()  # whoever still reads the last list
    tl.store(groups_ptr + places, tl.arange(0, keys.shape[0]), mask=is_listed)
    tl.debug_barrier()
    num_listed = tl.sum(is_listed.to(tl.int32), axis=0)
    return tl.where(num_listed == num_filled, KEY_OF_MINUS_INFINITY >> (32 - KEY_BITS), bound), num_listed


@triton.jit
def _amount_from(
    key,
    groups_ptr,
    num_listed,
    maximum,
    temperature,
    row,
    logits_ptr,
    logits_stride,
    replacements_ptr,
    replacement_rows_ptr,
    vocab_size,
    num_groups,
    BY_COUNT: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    KEY_BITS: tl.constexpr,
):
    """The number or the weight of the listed groups' logits from a key on."""
    amounts = tl.zeros([CHUNK], dtype=tl.int64)
    for start in range(0, num_listed, CHUNK):
        slots = start + tl.arange(0, CHUNK)
        # Empty slots name a group behind the vocabulary.
        groups = tl.load(groups_ptr + slots, mask=slots < num_listed, other=num_groups)
        values = load_logits(
            row,
            groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :],
            logits_ptr,
            logits_stride,
            replacements_ptr,
            replacement_rows_ptr,
            vocab_size,
        )
        is_counted = ordered_keys(values, KEY_BITS) >= key
        if BY_COUNT:
            amounts += tl.sum(is_counted.to(tl.int32), axis=1)
        else:
            amounts += tl.sum(tl.where(is_counted, exponential_weights(values, maximum, temperature), 0), axis=1)
    return tl.sum(amounts, axis=0)


@triton.jit
def _largest_key(
    needed,  # float64
    low,
    high,
    groups_ptr,
    num_listed,
    maximum,
    temperature,
    row,
    logits_ptr,
    logits_stride,
    replacements_ptr,
    replacement_rows_ptr,
    vocab_size,
    num_groups,
    BY_COUNT: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    KEY_BITS: tl.constexpr,
):
    """The largest key such that the logits from it on are at least `needed`; those from `low` on must be."""
    low = low.to(tl.int64)
    high = high.to(tl.int64)
    while low < high:
        middle = (low + high + 1) >> 1
        amount = _amount_from(
            middle.to(tl.int32),
            groups_ptr,
            num_listed,
            maximum,
            temperature,
            row,
            logits_ptr,
            logits_stride,
            replacements_ptr,
            replacement_rows_ptr,
            vocab_size,
            num_groups,
            BY_COUNT,
            GROUP,
            CHUNK,
            KEY_BITS,
        )
        if amount.to(tl.float64) >= needed:
            low = middle
        else:
            high = middle - 1
    return low.to(tl.int32)


@triton.jit
def _thresholds_kernel(
    logits_ptr,  # [num_rows, vocab_size]
    logits_stride,
    replacements_ptr,  # [num_replaced, vocab_size] float32, or None
    replacement_rows_ptr,  # [num_rows] int32, or None
    temperature_ptr,  # [batch] float32
    cu_num_draft_ptr,  # [batch + 1] int32, or None
    top_k_ptr,  # [batch] int32, or None
    top_p_ptr,  # [batch] float32, or None
    min_p_ptr,  # [batch] float32, or None
    block_maxima_ptr,  # [num_rows, num_blocks] float32
    block_weights_ptr,  # [num_rows, num_blocks] int64
    group_maxima_ptr,  # [num_rows, num_groups] float32
    groups_ptr,  # [num_rows, num_groups] int32, room for lists
    thresholds_ptr,  # [num_rows] float32
    vocab_size,
    num_blocks,
    num_groups,
    NUM_BLOCKS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    KEY_BITS: tl.constexpr,
):
    sequence = tl.program_id(0)
    row, is_row = row_of(sequence, tl.program_id(1), cu_num_draft_ptr)
    if not is_row:
        return
    temperature = tl.load(temperature_ptr + sequence)
    top_k = vocab_size
    if top_k_ptr is not None:
        top_k = tl.load(top_k_ptr + sequence)
    top_p = 1.0
    if top_p_ptr is not None:
        top_p = tl.load(top_p_ptr + sequence)
    min_p = 0.0
    if min_p_ptr is not None:
        min_p = tl.load(min_p_ptr + sequence)
    has_top_k = (top_k > 0) & (top_k < vocab_size)
    has_top_p = top_p < 1.0
    has_min_p = min_p > 0.0
    threshold = tl.full([], float("-inf"), tl.float32)
    if (temperature > 0.0) & (has_top_k | has_top_p | has_min_p):
        maximum, _, _, total = row_statistics(
            row, temperature, block_maxima_ptr, block_weights_ptr, num_blocks, NUM_BLOCKS
        )
        if has_top_k | has_top_p:
            groups_ptr += row * num_groups
            groups = tl.arange(0, NUM_GROUPS)
            num_filled = tl.cdiv(vocab_size, GROUP)
            is_filled = groups < num_filled
            group_maxima = tl.load(group_maxima_ptr + row * num_groups + groups, mask=is_filled, other=0.0)
            keys = tl.where(is_filled, ordered_keys(group_maxima, KEY_BITS), ABSENT)
            largest = tl.max(keys, axis=0)
            # The k largest group maxima are k tokens, so the k largest tokens are in groups with maxima that large.
            rank = tl.minimum(tl.where(has_top_k, top_k, _FIRST_GROUPS), num_filled)
            key, num_listed = _list_groups(keys, rank, num_filled, groups_ptr, KEY_BITS)
            if has_top_k:
                key = _largest_key(
                    top_k.to(tl.float64),
                    key,
                    largest,
                    groups_ptr,
                    num_listed,
                    maximum,
                    temperature,
                    row,
                    logits_ptr,
                    logits_stride,
                    replacements_ptr,
                    replacement_rows_ptr,
                    vocab_size,
                    num_groups,
                    True,
                    GROUP,
                    CHUNK,
                    KEY_BITS,
                )
            if has_top_p:
                weight = _amount_from(
                    key,
                    groups_ptr,
                    num_listed,
                    maximum,
                    temperature,
                    row,
                    logits_ptr,
                    logits_stride,
                    replacements_ptr,
                    replacement_rows_ptr,
                    vocab_size,
                    num_groups,
                    False,
                    GROUP,
                    CHUNK,
                    KEY_BITS,
                ).to(tl.float64)
                if has_top_k:
                    total = weight
                needed = tl.maximum(total * top_p, 1.0)
                while (weight < needed) & (num_listed < num_filled):
                    rank = tl.minimum(rank * _MORE_GROUPS, num_filled)
                    key, num_listed = _list_groups(keys, rank, num_filled, groups_ptr, KEY_BITS)
                    weight = _amount_from(
                        key,
                        groups_ptr,
                        num_listed,
                        maximum,
                        temperature,
                        row,
                        logits_ptr,
                        logits_stride,
                        replacements_ptr,
                        replacement_rows_ptr,
                        vocab_size,
                        num_groups,
                        False,
                        GROUP,
                        CHUNK,
                        KEY_BITS,
                    ).to(tl.float64)
                key = _largest_key(
                    needed,
                    key,
                    largest,
                    groups_ptr,
                    num_listed,
                    maximum,
                    temperature,
                    row,
                    logits_ptr,
                    logits_stride,
                    replacements_ptr,
                    replacement_rows_ptr,
                    vocab_size,
                    num_groups,
                    False,
                    GROUP,
                    CHUNK,
                    KEY_BITS,
                )
            threshold = value_of_key(key, KEY_BITS)
        if has_min_p:
            threshold = tl.maximum(threshold, maximum + temperature * tl.log(min_p))
    tl.store(thresholds_ptr + row, threshold)


def launch_thresholds(
    logits: PenalizedLogits,  # [num_rows, vocab_size]
    statistics: BlockStatistics,  # with weights and groups
    temperature: torch.Tensor,  # [batch] float32, contiguous
    filters: Filters,
    cu_num_draft_tokens: torch.Tensor | None,  # [batch + 1] int32, contiguous
    rows_per_sequence: int,
) -> torch.Tensor:  # [num_rows] float32
    """`logit_thresholds` behind the pass over all logits; rows without filters end at once."""
    num_rows, vocab_size = logits.logits.shape
    num_blocks, num_groups = statistics.num_blocks, statistics.num_groups
    device = logits.logits.device
    thresholds = torch.empty(num_rows, dtype=torch.float32, device=device)
    _thresholds_kernel[(len(temperature), rows_per_sequence)](
        logits.logits,
        logits.logits.stride(0),
        logits.replacements,
        logits.replacement_rows,
        temperature,
        cu_num_draft_tokens,
        *(None if values is None else values.contiguous() for values in filters),
        statistics.maxima,
        statistics.weights,
        statistics.group_maxima,
        torch.empty((num_rows, num_groups), dtype=torch.int32, device=device),
        thresholds,
        vocab_size,
        num_blocks,
        num_groups,
        NUM_BLOCKS=triton.next_power_of_2(num_blocks),
        NUM_GROUPS=triton.next_power_of_2(num_groups),
        GROUP=statistics.group_size,
        CHUNK=128,
        KEY_BITS=key_bits(logits.logits, logits.replacements),
        num_warps=8,
    )
    return thresholds


def thresholds_of_rows(
    logits: PenalizedLogits,  # [num_rows, vocab_size]
    temperatures: torch.Tensor,  # [num_rows] float32
    filters: Filters,  # of each row
) -> torch.Tensor:  # [num_rows] float32
    """`logit_thresholds` on the GPU, with the parameters expanded to rows."""
    temperatures = temperatures.contiguous()
    statistics = launch_block_statistics(logits, temperatures, None, 1, BLOCK_SIZE, has_weights=True)
    return launch_thresholds(logits, statistics, temperatures, filters, None, 1)
