"""RMSNorm alone and with residual additions: reference and Triton kernel against float64 and transformers' modules."""

from __future__ import annotations

import pytest
import torch
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from kernels.rms_norm import NormParameters, add_rms_norm, rms_norm
from tests.kernels.conftest import TritonDevice, poisoned_memory

SIZES = [1, 63, 111, 1000, 4096]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def norm_parameters(size: int, device: torch.device, dtype: torch.dtype, eps: float = 1e-5) -> NormParameters:
    return NormParameters((1.0 + 0.5 * random(size, seed=size)).to(device, dtype), eps)


def normed(x: torch.Tensor, norm: NormParameters | None) -> torch.Tensor:
    """The definition, in float64 on the CPU."""
    x = x.double().cpu()
    if norm is None:
        return x
    return x / (x.square().mean(dim=-1, keepdim=True) + norm.eps).sqrt() * norm.weight.double().cpu()


def assert_rounded_once(result: torch.Tensor, expected: torch.Tensor) -> None:
    assert not bool(result.isnan().any())
    eps = max(torch.finfo(result.dtype).eps, 2e-6)
    torch.testing.assert_close(result.double().cpu(), expected, rtol=eps, atol=eps)


def check_norm(device: torch.device, size: int, dtype: torch.dtype) -> None:
    x = random(7, size).to(device, dtype)
    x[3] = 0.0
    x[4] *= 1e-3  # here epsilon counts
    norm = norm_parameters(size, device, dtype)
    result = rms_norm(x, norm)
    assert result.dtype == dtype
    assert_rounded_once(result, normed(x, norm))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_norm(device: torch.device, size: int, dtype: torch.dtype) -> None:
    with poisoned_memory():
        check_norm(device, size, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_norm_kernel(triton_device: TritonDevice, size: int, dtype: torch.dtype) -> None:
    with triton_device() as device:
        check_norm(device, size, dtype)


def check_add(device: torch.device, size: int, dtype: torch.dtype, *, output_norm: bool, next_norm: bool) -> None:
    x, residual = random(5, size, seed=1).to(device, dtype), 3.0 * random(5, size + 9, seed=2).to(device, dtype)
    residual = residual[:, :size]  # rows need not follow one another
    before = residual.clone()
    first = norm_parameters(size, device, torch.float32) if output_norm else None
    second = norm_parameters(size, device, dtype, eps=1e-2) if next_norm else None
    added, result = add_rms_norm(x, residual, output_norm=first, next_norm=second)
    total = residual.double().cpu() + normed(x, first)
    assert added.dtype == result.dtype == dtype
    assert torch.equal(residual, before)
    assert_rounded_once(added, total)
    assert_rounded_once(result, normed(total, second))
    assert (added is result) == (second is None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("output_norm", [False, True])
@pytest.mark.parametrize("next_norm", [False, True])
def test_add(device: torch.device, dtype: torch.dtype, output_norm: bool, next_norm: bool) -> None:
    with poisoned_memory():
        check_add(device, 111, dtype, output_norm=output_norm, next_norm=next_norm)


@pytest.mark.parametrize("size", [63, 1000])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("output_norm", [False, True])
@pytest.mark.parametrize("next_norm", [False, True])
def test_add_kernel(
    triton_device: TritonDevice, size: int, dtype: torch.dtype, output_norm: bool, next_norm: bool
) -> None:
    with triton_device() as device:
        check_add(device, size, dtype, output_norm=output_norm, next_norm=next_norm)


def test_more_dimensions_and_no_rows(triton_device: TritonDevice) -> None:
    with triton_device() as device:
        norm = norm_parameters(40, device, torch.float32)
        x = random(2, 3, 5, 40).to(device).transpose(1, 2)
        result = rms_norm(x, norm)
        assert result.shape == (2, 5, 3, 40)
        assert_rounded_once(result, normed(x, norm))
        nothing = torch.empty(0, 40, device=device)
        assert rms_norm(nothing, norm).shape == (0, 40)
        assert add_rms_norm(nothing, nothing, output_norm=norm, next_norm=norm).normed.shape == (0, 40)


def test_equals_transformers() -> None:
    """Llama multiplies with the weight, Gemma with one more than it."""
    x = random(9, 111)
    llama, gemma = LlamaRMSNorm(111, eps=1e-3), Gemma2RMSNorm(111, eps=1e-3)
    with torch.no_grad():
        llama.weight.copy_(random(111, seed=1))
        gemma.weight.copy_(random(111, seed=1))
        torch.testing.assert_close(rms_norm(x, NormParameters(llama.weight, 1e-3)), llama(x))
        torch.testing.assert_close(rms_norm(x, NormParameters(1.0 + gemma.weight, 1e-3)), gemma(x))


def test_refuses_what_does_not_fit(device: torch.device) -> None:
    x = random(3, 8).to(device)
    with pytest.raises(ValueError, match=r"norm\.weight has shape \(7,\)"):
        rms_norm(x, norm_parameters(7, device, torch.float32))
    with pytest.raises(ValueError, match="residual has shape"):
        add_rms_norm(x, x[:2], output_norm=None, next_norm=None)
    with pytest.raises(ValueError, match="residual has type"):
        add_rms_norm(x, x.double(), output_norm=None, next_norm=None)
