"""Root-mean-square normalisation, alone and fused with the residual additions around it.

RMSNorm (Zhang and Sennrich, arXiv 1910.07467): y = x / sqrt(mean(x²) + eps) * weight, over the last dimension.
Everything is computed in float32 and rounded once, when it is stored; a model that rounds in between differs by that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from kernels.arguments import FLOAT_DTYPES, check_tensor
from kernels.dispatch import runs_triton


@dataclass(frozen=True)
class NormParameters:
    """What one RMSNorm multiplies with. A model that multiplies with 1 + w has that sum here, in float32.

    A GPU reads the weight while the kernel before the norm still runs: it is not to be what that kernel writes.
    """

    weight: torch.Tensor  # [size], dense
    eps: float


class AddedAndNormed(NamedTuple):
    """A residual stream after an addition, and its norm."""

    added: torch.Tensor  # [num_tokens, size]
    normed: torch.Tensor  # [num_tokens, size]


def rms_norm(
    x: torch.Tensor,  # [..., size]
    norm: NormParameters,
) -> torch.Tensor:  # [..., size], contiguous, in the type of x
    """Normalise each row. Raises ValueError when the weight does not fit.

    Runs a Triton kernel on CUDA tensors and plain torch on others.
    """
    _check_norm("norm", norm, x)
    if runs_triton(x):
        from kernels.rms_norm_triton import launch_rms_norm

        return launch_rms_norm(x, norm)
    return rms_norm_reference(x, norm)


def add_rms_norm(
    x: torch.Tensor,  # [num_tokens, size], dense rows: what attention or the MLP put out
    residual: torch.Tensor,  # [num_tokens, size], dense rows; not changed
    *,
    output_norm: NormParameters | None,  # of x before it is added; None: x as it is
    next_norm: NormParameters | None,  # of the sum; None: no norm
) -> AddedAndNormed:
    """added = residual + output_norm(x), normed = next_norm(added), in one pass.

    The norm is taken of the sum before the sum is rounded. Without `next_norm` both results are the same tensor. Raises
    ValueError when shapes or types do not fit. Runs a Triton kernel on CUDA tensors and plain torch on others.
    """
    check_tensor("x", x, (None, None), FLOAT_DTYPES, x.device)
    check_tensor("residual", residual, x.shape, (x.dtype,), x.device)
    for name, norm in (("output_norm", output_norm), ("next_norm", next_norm)):
        if norm is not None:
            _check_norm(name, norm, x)
    if runs_triton(x):
        from kernels.rms_norm_triton import launch_add_rms_norm

        return launch_add_rms_norm(x, residual, output_norm, next_norm)
    return add_rms_norm_reference(x, residual, output_norm=output_norm, next_norm=next_norm)


def rms_norm_reference(x: torch.Tensor, norm: NormParameters) -> torch.Tensor:  # [..., size], as x
    """`rms_norm` in plain torch."""
    return _normed(_wide(x), norm).to(x.dtype)


def add_rms_norm_reference(
    x: torch.Tensor,  # [num_tokens, size]
    residual: torch.Tensor,  # [num_tokens, size]
    *,
    output_norm: NormParameters | None,
    next_norm: NormParameters | None,
) -> AddedAndNormed:
    """`add_rms_norm` in plain torch."""
    wide = _wide(x) if output_norm is None else _normed(_wide(x), output_norm)
    wide = residual + wide
    added = wide.to(x.dtype)
    return AddedAndNormed(added, added if next_norm is None else _normed(wide, next_norm).to(x.dtype))


def _normed(wide: torch.Tensor, norm: NormParameters) -> torch.Tensor:  # float32 or wider, as `wide`
    return wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + norm.eps) * norm.weight


def _wide(x: torch.Tensor) -> torch.Tensor:  # as x, float32 or wider
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _check_norm(name: str, norm: NormParameters, x: torch.Tensor) -> None:
    check_tensor(f"{name}.weight", norm.weight, (x.shape[-1],), FLOAT_DTYPES, x.device)
