"""Attention whose keys are dealt out to programs: what kernels of few queries a sequence share.

How a sequence's keys are split (Flash-Decoding), what a program does with a tile of them (online softmax: Dao et al.,
arXiv 2205.14135), and how what the splits found becomes one.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# Triton's decorators and device functions carry no types.

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

# Measured on an H200 of 132 multiprocessors, each of which holds two programs of 64 keys an iteration or four of 32.
# One program a multiprocessor reads nearly as fast as two, and a second split costs more to merge than it saves, unless
# there are so few sequences that merging is cheap.
NUM_MULTIPROCESSORS = 132
_MOST_PAIRS_TO_SPLIT_FINELY = 16
MOST_KEYS = 64  # in an iteration, at most
MOST_SPLITS = 32


@dataclass(frozen=True)
class SplitTiling:
    """How much of the problem one program holds, and how many share a sequence's kv head."""

    num_rows: int  # queries times query heads of a kv head, padded to a power of two
    num_keys: int  # in one iteration
    num_splits: int
    num_warps: int
    num_stages: int

    @staticmethod
    def choose(
        num_queries: int, group_size: int, head_dim: int, dtype: torch.dtype, *, num_pairs: int, max_context_len: int
    ) -> SplitTiling:
        """For so many queries of a sequence. A pair is what has the same queries and a kv head."""
        few_keys, many_keys = (16, 16) if dtype.itemsize > 2 else (32, MOST_KEYS)
        num_keys = many_keys if num_pairs <= 2 * NUM_MULTIPROCESSORS else few_keys
        enough_programs = NUM_MULTIPROCESSORS * (2 if num_pairs <= _MOST_PAIRS_TO_SPLIT_FINELY else 1)
        most_splits = min(MOST_SPLITS, triton.cdiv(max_context_len, num_keys))
        return SplitTiling(
            num_rows=max(16, triton.next_power_of_2(num_queries * group_size)),
            num_keys=num_keys,
            num_splits=max(1, min(most_splits, enough_programs // num_pairs)),
            num_warps=4,
            num_stages=3 if head_dim <= 128 else 2,
        )


def most_queries(group_size: int, head_dim: int, dtype: torch.dtype) -> int:
    """How many queries one program can hold, 0 where not even one's heads fit.

    They have to fit its registers: float32 is multiplied without tensor cores.
    """
    most_rows = 32 if dtype.itemsize > 2 else 64
    if head_dim > 128:
        most_rows //= 2
    return most_rows // group_size


@triton.jit
def attend_to_tile(
    key,  # [num_keys, head_dim], finite
    value,  # as key
    query,  # [head_dim, num_rows]
    is_seen,  # [num_keys, num_rows]
    largest,  # [num_rows] the largest score so far, times log2(e)
    totals,  # [num_keys, num_rows] the weights so far, in units of exp2(largest), yet to be summed over keys
    attended,  # [head_dim, num_rows] the weighted values so far, in the same units
    scale,
    SOFTCAP: tl.constexpr,
):  # largest, totals and attended with these keys in them
    LOG2_E: tl.constexpr = 1.4426950408889634
    # Queries are columns and keys are rows of the products: a handful of queries would waste most of a matrix unit's
    # rows, and of its columns only a few are needed.
    scores = tl.dot(key, query, input_precision="ieee")
    if SOFTCAP is not None:
        # tanh(x) = 1 - 2 / (exp(2x) + 1), right at both ends, where exp is 0 or infinite.
        scores = 1.0 - 2.0 / (tl.exp2(scores * (scale * (2.0 * LOG2_E / SOFTCAP))) + 1.0)
        factor = SOFTCAP * LOG2_E
    else:
        factor = scale * LOG2_E
    scores = tl.where(is_seen, scores, float("-inf"))

    new_largest = tl.maximum(largest, tl.max(scores, axis=0) * factor)
    # A query that has seen no key yet: any finite number keeps inf - inf out.
    pivot = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    weights = tl.exp2(scores * factor - pivot[None, :])
    decay = tl.exp2(largest - pivot)
    # Summed over keys only at the end: a sum across warps costs a barrier, and the largest score needs one already.
    totals = totals * decay[None, :] + weights
    attended *= decay[None, :]
    attended = tl.dot(tl.trans(value), weights.to(value.dtype), attended, input_precision="ieee")
    return new_largest, totals, attended


@triton.jit
def merge_splits(
    output_ptr,  # [HEAD_DIM], of one query's head
    partial_ptr,  # [rows, HEAD_DIM] float32: what each split found for it
    log_totals_ptr,  # [rows] float32, log2 of the summed weights
    row,  # [num_splits]
    is_written,  # [num_splits] whether this split has left anything; one has
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
):
    dim = tl.arange(0, HEAD_DIM_PADDED)
    log_totals = tl.load(log_totals_ptr + row, mask=is_written, other=float("-inf"))
    partial = tl.load(
        partial_ptr + row[:, None] * HEAD_DIM + dim[None, :],
        mask=is_written[:, None] & (dim < HEAD_DIM)[None, :],
        other=0.0,
    )
    weights = tl.exp2(log_totals - tl.max(log_totals, axis=0))
    merged = tl.sum(partial * weights[:, None], axis=0) / tl.sum(weights, axis=0)
    tl.store(output_ptr + dim, merged, mask=dim < HEAD_DIM)
