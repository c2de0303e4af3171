"""Integer weights: their sums fit, and both implementations give the same ones."""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton's decorators and device functions carry no types.

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from kernels import integer_weights
from kernels.integer_weights import BLOCK_SIZE, WEIGHT_BITS, exponential_weights
from kernels.integer_weights_triton import exponential_weights as triton_exponential_weights
from tests.kernels.conftest import TritonDevice


def test_weights_are_exact_integers_and_sums_fit_float64() -> None:
    assert BLOCK_SIZE * 2**WEIGHT_BITS <= 2**53
    logits = torch.tensor([[3.0, 3.0 - 27.0, 3.0 - 28.45, 3.0 - 28.6, -torch.inf]])
    weights = exponential_weights(logits, torch.tensor([3.0]), torch.tensor([1.0]))
    assert torch.equal(weights, weights.floor())
    assert weights[0].tolist() == [2.0**40, pytest.approx(2.0**40 * 1.8795e-12, abs=1.0), 0.0, 0.0, 0.0]


@triton.jit
def _weights_kernel(logits_ptr, weights_ptr, maximum, temperature, BLOCK: tl.constexpr):
    slots = tl.arange(0, BLOCK)
    tl.store(weights_ptr + slots, triton_exponential_weights(tl.load(logits_ptr + slots), maximum, temperature))


def test_triton_weights_equal_the_reference(triton_device: TritonDevice) -> None:
    """Rounded by parts, but the same integers where exp is the same: powers of two, halves of a unit among them."""
    exponents = torch.cat([torch.arange(48.0), 45 * torch.rand(464, generator=torch.Generator().manual_seed(1))])
    logits = 2.5 - 0.7 * float(np.log(2)) * exponents
    expected = exponential_weights(logits[None], torch.tensor([2.5]), torch.tensor([0.7]))[0].long()
    with triton_device() as device:
        weights = torch.empty(512, dtype=torch.int64, device=device)
        _weights_kernel[(1,)](logits.to(device), weights, 2.5, 0.7, BLOCK=512)
    differences = (weights.cpu() - expected).abs()
    assert int(weights[0]) == 2**40
    # The error of exp grows with its argument.
    assert bool((differences <= 1 + expected * exponents * 2e-7).all())


def test_clamped_exponents_weigh_nothing() -> None:
    """The clamp that keeps exp fast must lie below the smallest weight."""
    smallest = torch.tensor(integer_weights._SMALLEST_EXPONENT)
    assert float(smallest.exp() * 2.0**WEIGHT_BITS) < 0.5
