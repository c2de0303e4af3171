"""Statistics of logits by vocabulary block: the pass over all logits that filters and candidates start with.

Sequence i's row j is row cu_num_draft_tokens[i] + i + j; without cu_num_draft_tokens each sequence has one row. Grids
are (sequences, rows of a sequence, blocks).
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# Triton's decorators and device functions carry no types.

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from kernels.integer_weights_triton import finite_or_zero, load_logits, weight_of

if TYPE_CHECKING:
    from kernels.shape_logits import PenalizedLogits

GROUP_SIZE = 32
"""Tokens whose maximum is kept where the largest logits are looked for: 64 bytes of bfloat16."""
# What a thread reads at once.
_VECTOR = tl.constexpr(8)


@dataclass(frozen=True)
class BlockStatistics:
    """What is known of each block of `block_size` tokens; -inf and 0 behind the vocabulary."""

    block_size: int
    maxima: torch.Tensor  # [num_rows, num_blocks] float32
    weights: torch.Tensor | None  # [num_rows, num_blocks] int64; only of rows with temperature
    group_size: int
    group_maxima: torch.Tensor  # [num_rows, num_groups] float32

    @property
    def num_blocks(self) -> int:
        """Blocks of a row."""
        return self.maxima.shape[1]

    @property
    def num_groups(self) -> int:
        """Groups of a row, those behind the vocabulary in its last block as well."""
        return self.num_blocks * self.block_size // self.group_size


@triton.jit
def _block_statistics_kernel(
    logits_ptr,  # [num_rows, vocab_size]
    logits_stride,
    replacements_ptr,  # [num_replaced, vocab_size] float32, or None
    replacement_rows_ptr,  # [num_rows] int32, or None
    temperature_ptr,  # [batch] float32
    is_left_out_ptr,  # [batch] int32, or None
    cu_num_draft_ptr,  # [batch + 1] int32, or None
    maxima_ptr,  # [num_rows, num_blocks] float32
    weights_ptr,  # [num_rows, num_blocks] int64, or None
    group_maxima_ptr,  # [num_rows, num_groups] float32
    vocab_size,
    num_blocks,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    NUM_GROUPS: tl.constexpr = BLOCK // GROUP
    sequence = tl.program_id(0)
    step = tl.program_id(1)
    block = tl.program_id(2)
    row, is_row = row_of(sequence, step, cu_num_draft_ptr)
    if not is_row:
        return
    temperature = tl.load(temperature_ptr + sequence)
    if is_left_out_ptr is not None and (temperature > 0.0) & (tl.load(is_left_out_ptr + sequence) != 0):
        return
    places = tl.arange(0, BLOCK // _VECTOR)[:, None] * _VECTOR + tl.arange(0, _VECTOR)[None, :]
    columns = block * BLOCK + places
    logits = load_logits(row, columns, logits_ptr, logits_stride, replacements_ptr, replacement_rows_ptr, vocab_size)
    maxima = tl.max(logits, axis=1)
    place = row * num_blocks + block
    group_maxima = tl.max(tl.reshape(maxima, [NUM_GROUPS, GROUP // _VECTOR]), axis=1)
    tl.store(group_maxima_ptr + place * NUM_GROUPS + tl.arange(0, NUM_GROUPS), group_maxima)
    maximum = tl.max(maxima, axis=0)
    tl.store(maxima_ptr + place, maximum)
    if weights_ptr is not None and temperature > 0.0:
        tl.store(weights_ptr + place, weight_of(logits, maximum, temperature))


@triton.jit
def row_of(sequence, step, cu_num_draft_ptr):
    """A sequence's row and whether the sequence has it."""
    row = sequence
    num_rows = 1
    if cu_num_draft_ptr is not None:
        first_draft = tl.load(cu_num_draft_ptr + sequence)
        row = first_draft + sequence + step
        num_rows = tl.load(cu_num_draft_ptr + sequence + 1) - first_draft + 1
    return row.to(tl.int64), step < num_rows


@triton.jit
def row_statistics(row, temperature, maxima_ptr, weights_ptr, num_blocks, NUM_BLOCKS: tl.constexpr):
    """The row's maximum, its blocks' weights and units, and the total in the unit of the maximum."""
    blocks = tl.arange(0, NUM_BLOCKS)
    mask = blocks < num_blocks
    maxima = tl.load(maxima_ptr + row * num_blocks + blocks, mask=mask, other=float("-inf"))
    weights = tl.load(weights_ptr + row * num_blocks + blocks, mask=mask, other=0)
    maximum = finite_or_zero(tl.max(maxima, axis=0))
    units = tl.exp((maxima - maximum) / temperature).to(tl.float64)
    return maximum, weights, units, tl.sum(weights.to(tl.float64) * units, axis=0)


def launch_block_statistics(
    logits: PenalizedLogits,  # [num_rows, vocab_size]
    temperature: torch.Tensor,  # [batch] float32, contiguous
    cu_num_draft_tokens: torch.Tensor | None,  # [batch + 1] int32, contiguous
    rows_per_sequence: int,  # at most
    block_size: int,
    *,
    has_weights: bool,
    is_left_out: torch.Tensor | None = None,  # [batch] int32, contiguous
) -> BlockStatistics:
    """Statistics of all rows that belong to sequences; of those left out only if they have no temperature."""
    num_rows, vocab_size = logits.logits.shape
    device = logits.logits.device
    num_blocks = triton.cdiv(vocab_size, block_size)
    shape = (num_rows, num_blocks)
    group_size = min(GROUP_SIZE, block_size)
    num_groups = num_blocks * block_size // group_size
    statistics = BlockStatistics(
        block_size,
        torch.empty(shape, dtype=torch.float32, device=device),
        torch.empty(shape, dtype=torch.int64, device=device) if has_weights else None,
        group_size,
        torch.empty((num_rows, num_groups), dtype=torch.float32, device=device),
    )
    # Sequences go on the grid's first axis, the only one that may pass 65,535.
    _block_statistics_kernel[(len(temperature), rows_per_sequence, num_blocks)](
        logits.logits,
        logits.logits.stride(0),
        logits.replacements,
        logits.replacement_rows,
        temperature,
        is_left_out,
        cu_num_draft_tokens,
        statistics.maxima,
        statistics.weights,
        statistics.group_maxima,
        vocab_size,
        num_blocks,
        BLOCK=block_size,
        GROUP=group_size,
        num_warps=4,
    )
    return statistics
