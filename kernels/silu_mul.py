"""The middle of a gated MLP: activation(gate) * up, read from one tensor that holds both.

SwiGLU and GeGLU (Shazeer, arXiv 2002.05202). Computed in float32 and rounded once.
"""

from __future__ import annotations

from enum import IntEnum

import torch
import torch.nn.functional as F

from kernels.arguments import FLOAT_DTYPES, check_tensor
from kernels.dispatch import runs_triton


class Activation(IntEnum):
    """What is applied to the gate."""

    SILU = 0  # x * sigmoid(x)
    GELU_TANH = 1  # GELU in its tanh form (Hendrycks and Gimpel, arXiv 1606.08415)
    GELU = 2  # x * Phi(x), Phi the normal distribution's cumulative function

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The activation in plain torch, in the type of x."""
        if self is Activation.SILU:
            return F.silu(x)
        return F.gelu(x, approximate="tanh" if self is Activation.GELU_TANH else "none")


def act_mul(
    gate_up: torch.Tensor,  # [num_tokens, 2 * size], dense rows: gate in the first half of a row, up in the second
    activation: Activation = Activation.SILU,
) -> torch.Tensor:  # [num_tokens, size], contiguous
    """activation(gate) * up. Raises ValueError when the shape or type does not fit.

    Runs a Triton kernel on CUDA tensors and plain torch on others.
    """
    check_tensor("gate_up", gate_up, (None, None), FLOAT_DTYPES, gate_up.device)
    if gate_up.shape[1] % 2:
        raise ValueError(f"gate_up has {gate_up.shape[1]} columns, expected an even number")
    if runs_triton(gate_up):
        from kernels.silu_mul_triton import launch_act_mul

        return launch_act_mul(gate_up, activation)
    return act_mul_reference(gate_up, activation)


def act_mul_reference(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:  # [num_tokens, size]
    """`act_mul` in plain torch."""
    gate, up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, dim=1)
    return (activation(gate) * up).to(gate_up.dtype)
