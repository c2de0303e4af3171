"""The Triton kernel of `kernels.rms_norm`."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# Triton's decorators and device functions carry no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from kernels.dependent_launch import has_dependent_launch
from kernels.rms_norm import AddedAndNormed, NormParameters


def launch_rms_norm(x: torch.Tensor, norm: NormParameters) -> torch.Tensor:  # [..., size], contiguous
    """`rms_norm` on the GPU, one program a row."""
    rows = x.reshape(-1, x.shape[-1])
    normed = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch(rows, None, None, norm, None, normed)
    return normed


def launch_add_rms_norm(
    x: torch.Tensor,  # [num_tokens, size], dense rows
    residual: torch.Tensor,  # [num_tokens, size], dense rows
    output_norm: NormParameters | None,
    next_norm: NormParameters | None,
) -> AddedAndNormed:
    """`add_rms_norm` on the GPU, one program a row."""
    added = torch.empty_like(x, memory_format=torch.contiguous_format)
    normed = None if next_norm is None else torch.empty_like(added)
    _launch(x, residual, output_norm, next_norm, added, normed)
    return AddedAndNormed(added, added if normed is None else normed)


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    output_norm: NormParameters | None,
    next_norm: NormParameters | None,
    added: torch.Tensor | None,
    normed: torch.Tensor | None,
) -> None:
    num_rows, size = x.shape
    if num_rows == 0:
        return
    block = triton.next_power_of_2(size)
    is_following = has_dependent_launch(x.device)
    _rms_norm_kernel[(num_rows,)](
        x,
        residual,
        None if output_norm is None else output_norm.weight,
        None if next_norm is None else next_norm.weight,
        added,
        normed,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        0.0 if output_norm is None else output_norm.eps,
        0.0 if next_norm is None else next_norm.eps,
        SIZE=size,
        BLOCK=block,
        IS_FOLLOWING=is_following,
        # 16 elements a thread: two loads of 16 bytes of each 16-bit operand, all under way at once.
        num_warps=min(16, max(1, block // 512)),
        launch_pdl=is_following,
    )


@triton.jit
def _rms_norm_kernel(
    x_ptr,  # [num_rows, SIZE], dense rows
    residual_ptr,  # [num_rows, SIZE], dense rows, or None
    output_weight_ptr,  # [SIZE], or None: x is not normalised before it is added
    next_weight_ptr,  # [SIZE], or None: the sum is not normalised
    added_ptr,  # [num_rows, SIZE] contiguous, or None
    normed_ptr,  # [num_rows, SIZE] contiguous, or None
    x_stride,
    residual_stride,
    output_eps,
    next_eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_FOLLOWING: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_column = column < SIZE
    # All loads come before the first sum over the row, so that they wait for memory together; the weights, which nobody
    # writes, before the end of the kernel ahead.
    if output_weight_ptr is not None:
        output_weight = tl.load(output_weight_ptr + column, mask=is_column, other=0.0).to(tl.float32)
    if next_weight_ptr is not None:
        next_weight = tl.load(next_weight_ptr + column, mask=is_column, other=0.0).to(tl.float32)
    if IS_FOLLOWING:
        gdc_wait()
    values = tl.load(x_ptr + row * x_stride + column, mask=is_column, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row * residual_stride + column, mask=is_column, other=0.0).to(tl.float32)

    if output_weight_ptr is not None:
        values = values * tl.rsqrt(tl.sum(values * values, axis=0) / SIZE + output_eps) * output_weight
    if residual_ptr is not None:
        values += residual
    if added_ptr is not None:
        tl.store(added_ptr + row * SIZE + column, values, mask=is_column)
    if next_weight_ptr is not None:
        values = values * tl.rsqrt(tl.sum(values * values, axis=0) / SIZE + next_eps) * next_weight
        tl.store(normed_ptr + row * SIZE + column, values, mask=is_column)
