"""The Triton kernel of `kernels.silu_mul`."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# Triton's decorators and device functions carry no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from kernels.dependent_launch import has_dependent_launch
from kernels.silu_mul import Activation

_GELU_TANH = tl.constexpr(int(Activation.GELU_TANH))
_GELU = tl.constexpr(int(Activation.GELU))

# Eight elements a thread: one load of 16 bytes of each 16-bit operand, and enough programs even for one token.
_BLOCK = 1024
_NUM_WARPS = 4


def launch_act_mul(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:  # [num_tokens, size]
    """`act_mul` on the GPU, a program for each 1,024 columns of a token."""
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    output = torch.empty(num_tokens, size, dtype=gate_up.dtype, device=gate_up.device)
    if output.numel() == 0:
        return output
    is_following = has_dependent_launch(gate_up.device)
    _act_mul_kernel[(num_tokens, triton.cdiv(size, _BLOCK))](
        output,
        gate_up,
        gate_up.stride(0),
        size,
        ACTIVATION=int(activation),
        BLOCK=_BLOCK,
        IS_FOLLOWING=is_following,
        num_warps=_NUM_WARPS,
        launch_pdl=is_following,
    )
    return output


@triton.jit
def _act_mul_kernel(
    output_ptr,  # [num_tokens, size] contiguous
    gate_up_ptr,  # [num_tokens, 2 * size], dense rows
    gate_up_stride,
    size,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_FOLLOWING: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < size
    if IS_FOLLOWING:
        gdc_wait()
    row = gate_up_ptr + token * gate_up_stride
    gate = tl.load(row + column, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(row + size + column, mask=is_column, other=0.0).to(tl.float32)
    if ACTIVATION == _GELU:
        activated = gate * 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        slope = gate
        if ACTIVATION == _GELU_TANH:
            # 0.5 * (1 + tanh(z)) = sigmoid(2z), with 2z = sqrt(8 / pi) * (x + 0.044715 x³).
            slope = 1.5957691216057308 * gate * (1.0 + 0.044715 * gate * gate)
        activated = gate / (1.0 + tl.exp(-slope))
    tl.store(output_ptr + token * size + column, activated * up, mask=is_column)
