"""Rotary embedding fused with norms and the cache write: reference and Triton kernel against transformers' own."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kernels.rms_norm import NormParameters
from kernels.rotary import HeadNorms, rotary, rotary_cos_sin, rotary_store_kv
from tests.kernels.conftest import TritonDevice, poisoned_memory

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# num_heads, num_kv_heads, head_dim, rotary_dim: groupings, sizes that are no power of two, part of a head rotated.
SHAPES = [(3, 3, 64, 64), (4, 1, 80, 80), (14, 2, 96, 96), (8, 2, 128, 128), (5, 1, 80, 32), (2, 2, 256, 64)]
NUM_TOKENS = 11


class Case:
    """Arguments of `rotary`, and queries, keys and values as transformers computes them in float64."""

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        *,
        has_norms: bool = False,
    ) -> None:
        self.num_heads, self.num_kv_heads, self.head_dim, rotary_dim = shape
        generator = torch.Generator().manual_seed(sum(shape))
        num_all = self.num_heads + 2 * self.num_kv_heads
        width = num_all * self.head_dim
        # Rows of a wider tensor, as some other fusion might hand over.
        self.qkv = torch.randn(NUM_TOKENS, width + 16, generator=generator).to(device, dtype)[:, :width]
        positions = torch.randint(3000, (NUM_TOKENS, 1), generator=generator)
        angles = (positions * 10_000.0 ** (-torch.arange(rotary_dim // 2) / (rotary_dim // 2))).repeat(1, 2)
        self.cos, self.sin = (1.3 * angles.cos()).to(device, dtype), (1.3 * angles.sin()).to(device, dtype)
        self.norms = None
        if has_norms:
            weights = (1.0 + 0.5 * torch.randn(2, self.head_dim, generator=generator)).to(device, dtype)
            self.norms = HeadNorms(NormParameters(weights[0], 1e-5), NormParameters(weights[1], 1e-1))

        heads = self.qkv.double().cpu().view(NUM_TOKENS, num_all, self.head_dim)
        query, key, self.value = torch.split(heads, [self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        if self.norms is not None:
            query, key = self._normed(query, self.norms.query), self._normed(key, self.norms.key)
        rotated = apply_rotary_pos_emb(
            query[..., :rotary_dim], key[..., :rotary_dim], self.cos.double().cpu(), self.sin.double().cpu()
        )
        self.query = torch.cat([rotated[0], query[..., rotary_dim:]], dim=-1)
        self.key = torch.cat([rotated[1], key[..., rotary_dim:]], dim=-1)

    @staticmethod
    def _normed(heads: torch.Tensor, norm: NormParameters) -> torch.Tensor:
        scale = (heads.square().mean(dim=-1, keepdim=True) + norm.eps).rsqrt()
        return heads * scale * norm.weight.double().cpu()

    def check_rotary(self) -> None:
        result = rotary(
            self.qkv,
            self.cos,
            self.sin,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            norms=self.norms,
        )
        assert_rounded_once(result.query, self.query)
        assert_rounded_once(result.key, self.key)
        assert torch.equal(result.value.double().cpu(), self.value)

    def check_store(self) -> None:
        num_blocks, block_size = 3, 16
        shape = (num_blocks, block_size, self.num_kv_heads, self.head_dim)
        key_cache = torch.full(shape, float("nan"), dtype=self.qkv.dtype, device=self.qkv.device)
        value_cache = key_cache.clone()
        generator = torch.Generator().manual_seed(1)
        slots = torch.randperm(num_blocks * block_size, generator=generator)[:NUM_TOKENS]
        slots[[2, 7]] = -1
        query = rotary_store_kv(
            self.qkv,
            self.cos,
            self.sin,
            key_cache,
            value_cache,
            slots.to(self.qkv.device),
            num_heads=self.num_heads,
            norms=self.norms,
        )
        assert_rounded_once(query, self.query)
        stored = slots >= 0
        keys, values = key_cache.flatten(0, 1).cpu(), value_cache.flatten(0, 1).cpu()
        assert_rounded_once(keys[slots[stored]], self.key[stored])
        assert torch.equal(values[slots[stored]].double(), self.value[stored])
        untouched = torch.ones(num_blocks * block_size, dtype=torch.bool)
        untouched[slots[stored]] = False
        assert bool(keys[untouched].isnan().all())
        assert bool(values[untouched].isnan().all())


def assert_rounded_once(result: torch.Tensor, expected: torch.Tensor) -> None:
    assert result.shape == expected.shape
    eps = max(torch.finfo(result.dtype).eps, 2e-6)
    torch.testing.assert_close(result.double().cpu(), expected, rtol=eps, atol=eps)


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_reference(device: torch.device, shape: tuple[int, int, int, int], has_norms: bool) -> None:
    with poisoned_memory():
        case = Case(shape, device, has_norms=has_norms)
        case.check_rotary()
        case.check_store()


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel(triton_device: TritonDevice, shape: tuple[int, int, int, int], has_norms: bool) -> None:
    with triton_device() as device:
        case = Case(shape, device, has_norms=has_norms)
        case.check_rotary()
        case.check_store()


@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_in_every_type(triton_device: TritonDevice, dtype: torch.dtype) -> None:
    with triton_device() as device:
        case = Case((4, 2, 80, 80), device, dtype, has_norms=True)
        case.check_rotary()
        case.check_store()


def test_no_tokens(triton_device: TritonDevice) -> None:
    with triton_device() as device:
        nothing = torch.empty(0, 8 * 16, device=device)
        result = rotary(nothing, nothing[:, :16], nothing[:, :16], num_heads=4, num_kv_heads=2)
        assert result.query.shape == (0, 4, 16)


def check_cos_sin(device: torch.device, half: int, dtype: torch.dtype) -> None:
    positions = torch.tensor([0, 1, 77, 8191, 131_071], device=device)
    frequencies = 500_000.0 ** (-torch.arange(half, dtype=torch.float32) / half)
    cos, sin = rotary_cos_sin(positions, frequencies.to(device), scale=1.25, dtype=dtype)
    # The angle itself is a float32 product by definition: at large positions that is what a model was trained with.
    angles = (positions.cpu().float().unsqueeze(1) * frequencies).double().repeat(1, 2)
    for table, expected in ((cos, angles.cos()), (sin, angles.sin())):
        assert table.dtype == dtype
        assert_rounded_once(table, 1.25 * expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_cos_sin(device: torch.device, dtype: torch.dtype) -> None:
    check_cos_sin(device, 20, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("half", [40, 64])
def test_cos_sin_kernel(triton_device: TritonDevice, half: int, dtype: torch.dtype) -> None:
    with triton_device() as device:
        check_cos_sin(device, half, dtype)


def test_refuses_what_does_not_fit(device: torch.device) -> None:
    case = Case((4, 2, 16, 16), device)
    with pytest.raises(ValueError, match="qkv has shape"):
        rotary(case.qkv[:, 1:], case.cos, case.sin, num_heads=4, num_kv_heads=2)
    with pytest.raises(ValueError, match="cos has shape"):
        rotary(case.qkv, case.cos[1:], case.sin, num_heads=4, num_kv_heads=2)
    with pytest.raises(ValueError, match="even number"):
        rotary(case.qkv, case.cos[:, :15], case.sin[:, :15], num_heads=4, num_kv_heads=2)
    norms = HeadNorms(*(NormParameters(torch.ones(8, device=device), 1e-5) for _ in range(2)))
    with pytest.raises(ValueError, match=r"norms\.query\.weight"):
        rotary(case.qkv, case.cos, case.sin, num_heads=4, num_kv_heads=2, norms=norms)
