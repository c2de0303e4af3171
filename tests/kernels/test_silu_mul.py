"""activation(gate) * up: reference and Triton kernel against float64, and every new kernel compiled for sm_90."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers.activations import ACT2FN

from kernels.silu_mul import Activation, act_mul
from tests.compiling import report_of
from tests.kernels.conftest import TritonDevice, poisoned_memory

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAMES = {Activation.SILU: "silu", Activation.GELU_TANH: "gelu_pytorch_tanh", Activation.GELU: "gelu"}


def expected(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """The definition, in float64 on the CPU."""
    gate, up = gate_up.double().cpu().chunk(2, dim=1)
    if activation is Activation.SILU:
        return gate / (1.0 + (-gate).exp()) * up
    if activation is Activation.GELU:
        return gate * 0.5 * (1.0 + torch.erf(gate / math.sqrt(2.0))) * up
    return gate * 0.5 * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (gate + 0.044715 * gate**3))) * up


def check(device: torch.device, size: int, dtype: torch.dtype, activation: Activation) -> None:
    generator = torch.Generator().manual_seed(size)
    wide = torch.randn(5, 2 * size + 3, generator=generator) * 4.0
    wide[0, :size] *= 30.0  # far out on both sides, where exp overflows
    gate_up = wide.to(device, dtype)[:, : 2 * size]  # rows need not follow one another
    result = act_mul(gate_up, activation)
    assert result.dtype == dtype
    assert result.shape == (5, size)
    eps = max(torch.finfo(dtype).eps, 4e-6)
    # In float32 the negative tail of GELU is a difference of nearly equal numbers, times up.
    atol = max(eps, 1e-4)
    # Through the type of the result: what is too large for it is infinite on both sides.
    wanted = expected(gate_up, activation).to(dtype).double()
    torch.testing.assert_close(result.double().cpu(), wanted, rtol=2 * eps, atol=atol)


@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize("dtype", DTYPES)
def test_reference(device: torch.device, dtype: torch.dtype, activation: Activation) -> None:
    with poisoned_memory():
        check(device, 111, dtype, activation)


@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 63, 1024, 3000])
def test_kernel(triton_device: TritonDevice, size: int, dtype: torch.dtype, activation: Activation) -> None:
    with triton_device() as device:
        check(device, size, dtype, activation)


@pytest.mark.parametrize("activation", list(Activation))
def test_equals_transformers(activation: Activation) -> None:
    x = torch.linspace(-9.0, 9.0, 333)
    torch.testing.assert_close(activation(x), ACT2FN[NAMES[activation]](x))


def test_no_tokens(triton_device: TritonDevice) -> None:
    with triton_device() as device:
        assert act_mul(torch.empty(0, 20, device=device)).shape == (0, 10)


def test_refuses_an_odd_width(device: torch.device) -> None:
    with pytest.raises(ValueError, match="even number"):
        act_mul(torch.zeros(2, 7, device=device))


def test_kernels_compile_for_hopper(tmp_path: Path) -> None:
    """Every kernel of the fused modules becomes a cubin without spills: interpreted, more would run than compiles."""
    report = report_of("tests.kernels.compile_fused_modules", cache=tmp_path)
    assert set(report["kernels"]) == {"_rms_norm_kernel", "_rotary_kernel", "_cos_sin_kernel", "_act_mul_kernel"}
    # The exact cosine of a large angle needs a table in local memory; nothing else does.
    assert {key.split()[0] for key in report["local"]} <= {"_cos_sin_kernel"}
    # In the shapes of an 8B model everything is read and written 8 or 16 bytes at a time.
    assert report["narrow"] == []
    assert report["early"] == {}
