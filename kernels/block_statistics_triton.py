"""Statistics of target logits by vocabulary block: the one pass over all logits that every verification starts with.

Sequence i's row j is row cu_num_draft_tokens[i] + i + j.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# Triton's decorators and device functions carry no types.

from __future__ import annotations

import triton
import triton.language as tl

from kernels.integer_weights_triton import exponential_weights, finite_or_zero, load_logits


@triton.jit
def block_statistics_kernel(
    logits_ptr,  # [num_rows, vocab_size]
    logits_stride,
    replacements_ptr,  # [num_replaced, vocab_size] float32, or None
    replacement_rows_ptr,  # [num_rows] int32, or None
    thresholds_ptr,  # [num_rows] float32, or None
    temperature_ptr,  # [batch] float32
    cu_num_draft_ptr,  # [batch + 1] int32
    block_maxima_ptr,  # [num_rows, num_blocks] float32
    block_argmax_ptr,  # [num_rows, num_blocks] int32
    block_weights_ptr,  # [num_rows, num_blocks] int64
    vocab_size,
    num_blocks,
    BLOCK: tl.constexpr,
):
    sequence = tl.program_id(0)
    step = tl.program_id(1)
    block = tl.program_id(2)
    first_draft = tl.load(cu_num_draft_ptr + sequence)
    if step > tl.load(cu_num_draft_ptr + sequence + 1) - first_draft:
        return
    row = (first_draft + sequence + step).to(tl.int64)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    logits = load_logits(
        row,
        columns,
        logits_ptr,
        logits_stride,
        replacements_ptr,
        replacement_rows_ptr,
        vocab_size,
    )
    maximum, argmax = tl.max(logits, axis=0, return_indices=True)
    place = row * num_blocks + block
    tl.store(block_maxima_ptr + place, maximum)
    tl.store(block_argmax_ptr + place, block * BLOCK + argmax)
    temperature = tl.load(temperature_ptr + sequence)
    if temperature > 0.0:
        weights = exponential_weights(logits, maximum, temperature)
        if thresholds_ptr is not None:
            weights = tl.where(logits >= tl.load(thresholds_ptr + row), weights, 0)
        tl.store(block_weights_ptr + place, tl.sum(weights, axis=0))


@triton.jit
def row_statistics(row, temperature, block_maxima_ptr, block_weights_ptr, num_blocks, NUM_BLOCKS: tl.constexpr):
    """The row's maximum, its blocks' weights and units, and the total in the unit of the maximum."""
    blocks = tl.arange(0, NUM_BLOCKS)
    mask = blocks < num_blocks
    maxima = tl.load(block_maxima_ptr + row * num_blocks + blocks, mask=mask, other=float("-inf"))
    weights = tl.load(block_weights_ptr + row * num_blocks + blocks, mask=mask, other=0)
    maximum = finite_or_zero(tl.max(maxima, axis=0))
    units = tl.exp((maxima - maximum) / temperature).to(tl.float64)
    return maximum, weights, units, tl.sum(weights.to(tl.float64) * units, axis=0)


@triton.jit
def row_argmax(row, block_maxima_ptr, block_argmax_ptr, num_blocks, NUM_BLOCKS: tl.constexpr):
    """The row's most likely token, the lowest id among ties."""
    blocks = tl.arange(0, NUM_BLOCKS)
    maxima = tl.load(block_maxima_ptr + row * num_blocks + blocks, mask=blocks < num_blocks, other=float("-inf"))
    return tl.load(block_argmax_ptr + row * num_blocks + tl.argmax(maxima, axis=0))


@triton.jit
def token_weights(
    token_ids,
    row,
    temperature,
    logits_ptr,
    logits_stride,
    replacements_ptr,
    replacement_rows_ptr,
    thresholds_ptr,
    block_maxima_ptr,
    vocab_size,
    num_blocks,
    BLOCK: tl.constexpr,
):
    """Integer weights of single tokens, each in the unit of its block, and the maxima of their blocks.

    Ids outside the vocabulary have weight 0.
    """
    logits = load_logits(row, token_ids, logits_ptr, logits_stride, replacements_ptr, replacement_rows_ptr, vocab_size)
    mask = (token_ids >= 0) & (token_ids < vocab_size)
    maxima = tl.load(block_maxima_ptr + row * num_blocks + token_ids // BLOCK, mask=mask, other=0.0)
    weights = exponential_weights(logits, maxima, temperature)
    if thresholds_ptr is not None:
        weights = tl.where(logits >= tl.load(thresholds_ptr + row), weights, 0)
    return weights, maxima
