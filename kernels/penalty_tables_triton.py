"""Triton kernel of `kernels.penalty_tables`, a program for each stretch of a row."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# Triton's decorators and device functions carry no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.penalty_tables import PenaltyTables

_COLUMNS = 2048


def launch_penalty_tables(
    logits: torch.Tensor,  # [num_rows, vocab_size], changed in place
    places: torch.Tensor,  # [num_rows] int32
    tables: PenaltyTables,
) -> None:
    """`apply_penalty_tables` on the GPU."""
    num_rows, vocab_size = logits.shape
    if num_rows:
        _penalty_tables_kernel[(num_rows, triton.cdiv(vocab_size, _COLUMNS))](
            logits,
            places,
            tables.factors,
            tables.additions,
            vocab_size,
            logits.stride(0),
            tables.factors.stride(0),
            tables.additions.stride(0),
            COLUMNS=_COLUMNS,
            num_warps=4,
        )


@triton.jit
def _penalty_tables_kernel(
    logits_ptr,  # [num_rows, vocab_size], changed in place
    places_ptr,  # [num_rows] int32
    factors_ptr,  # [num_places, vocab_size] float32
    additions_ptr,  # [num_places, vocab_size] float32
    vocab_size,
    logits_stride,
    factors_stride,
    additions_stride,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(places_ptr + row).to(tl.int64)
    if place >= 0:
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        is_inside = columns < vocab_size
        logits = tl.load(logits_ptr + row * logits_stride + columns, mask=is_inside, other=0.0).to(tl.float32)
        factors = tl.load(factors_ptr + place * factors_stride + columns, mask=is_inside, other=1.0)
        additions = tl.load(additions_ptr + place * additions_stride + columns, mask=is_inside, other=0.0)
        penalized = tl.where(logits > 0, logits / factors, logits * factors) + additions
        tl.store(logits_ptr + row * logits_stride + columns, penalized.to(logits_ptr.dtype.element_ty), mask=is_inside)
