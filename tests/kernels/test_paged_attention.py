"""Paged attention: reference and Triton kernel against attention computed from its definition."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from kernels.dispatch import interpreted_kernels
from kernels.paged_attention import paged_attention
from kernels.store_kv import store_kv
from tests.compiling import report_of
from tests.kernels.paged_cases import dense_attention, make_case

# Rows of a tile beyond its queries end as 0 / 0 and are not stored; a split in which a query sees no key has weight 0.
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value encountered in divide"),
    pytest.mark.filterwarnings("ignore:divide by zero encountered in log2"),
]

# Decoding, verify steps, whole prompts, chunks behind a context; ends on and off the edges of blocks and tiles.
MIXED = [(1, 1), (1, 63), (5, 111), (33, 33), (2, 64), (20, 47), (1, 16)]


@pytest.fixture(params=["reference", "interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Where the case runs; memory that nobody has written is NaN."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    if request.param == "interpreter":
        if torch.cuda.is_available():
            pytest.skip("Triton compiles where there is a GPU")
        assert os.environ.get("TRITON_INTERPRET") == "1", "tests/conftest.py sets it before Triton is imported"
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]  # the module is an object
    with interpreted_kernels() if request.param == "interpreter" else nullcontext():
        yield torch.device("cuda" if request.param == "cuda" else "cpu")
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(3, 3, 64), (4, 2, 80), (4, 1, 32), (14, 2, 96), (8, 2, 128)]
)
def test_equals_dense_attention_at_every_grouping(
    device: torch.device, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    case = make_case(MIXED, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, device=device)
    output = paged_attention(*case.arguments(), scale=head_dim**-0.5, max_query_len=case.max_query_len)
    expected = dense_attention(case, scale=head_dim**-0.5)
    torch.testing.assert_close(output.double().cpu(), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("query_len", [1, 4, 5, 33])
def test_uniform_steps(device: torch.device, query_len: int) -> None:
    """One tile a sequence and several take different ways to find their queries."""
    lens = [(query_len, query_len + behind) for behind in (0, 1, 30, 79)]
    case = make_case(lens, num_heads=4, num_kv_heads=2, head_dim=64, device=device, seed=query_len)
    output = paged_attention(*case.arguments(), scale=0.2, max_query_len=query_len)
    torch.testing.assert_close(output.double().cpu(), dense_attention(case, scale=0.2), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("sliding_window", [None, 1, 63, 100])
@pytest.mark.parametrize("query_len", [1, 5])
def test_splits_of_a_context(device: torch.device, query_len: int, sliding_window: int | None) -> None:
    """Contexts that end in their first tile and in others, at their edges too, and leave splits without a key.

    In one batch and one of them alone: the number of splits is another.
    """
    lens = [(query_len, context_len) for context_len in (5, 16, 64, 65, 333)] + [(0, 0)]
    case = make_case(lens, num_heads=4, num_kv_heads=1, head_dim=64, device=device, seed=query_len)
    output = paged_attention(*case.arguments(), scale=0.2, max_query_len=5, sliding_window=sliding_window)
    expected = dense_attention(case, scale=0.2, sliding_window=sliding_window)
    torch.testing.assert_close(output.double().cpu(), expected, atol=2e-6, rtol=1e-5)
    last = slice(-query_len, None)
    output = paged_attention(
        case.query[last],
        case.key_cache,
        case.value_cache,
        torch.tensor([0, query_len], dtype=torch.int32, device=device),
        case.context_lens[4:5],
        case.block_tables[4:5],
        scale=0.2,
        max_query_len=query_len,
        sliding_window=sliding_window,
    )
    torch.testing.assert_close(output.double().cpu(), expected[last], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("sliding_window", [1, 7, 16, 64, 1000])
def test_sliding_window(device: torch.device, sliding_window: int) -> None:
    case = make_case([*MIXED, (150, 203)], num_heads=4, num_kv_heads=2, head_dim=32, device=device)
    output = paged_attention(
        *case.arguments(), scale=0.3, max_query_len=case.max_query_len, sliding_window=sliding_window
    )
    expected = dense_attention(case, scale=0.3, sliding_window=sliding_window)
    torch.testing.assert_close(output.double().cpu(), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("sliding_window", [None, 20])
def test_softcap(device: torch.device, sliding_window: int | None) -> None:
    """The cap is low and the scale large: without it, or with it after the mask, the output is another."""
    case = make_case(MIXED, num_heads=4, num_kv_heads=2, head_dim=64, device=device)
    output = paged_attention(
        *case.arguments(), scale=0.5, max_query_len=case.max_query_len, sliding_window=sliding_window, softcap=3.0
    )
    expected = dense_attention(case, scale=0.5, sliding_window=sliding_window, softcap=3.0)
    torch.testing.assert_close(output.double().cpu(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("block_size", [16, 32, 128])
def test_block_sizes(device: torch.device, block_size: int) -> None:
    case = make_case(MIXED, num_heads=4, num_kv_heads=2, head_dim=64, block_size=block_size, device=device)
    output = paged_attention(*case.arguments(), scale=0.2, max_query_len=case.max_query_len)
    torch.testing.assert_close(output.double().cpu(), dense_attention(case, scale=0.2), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [80, 256])
def test_half_precision(
    device: torch.device, dtype: torch.dtype, head_dim: int, request: pytest.FixtureRequest
) -> None:
    if dtype == torch.bfloat16 and "interpreter" in request.node.name:
        pytest.skip("Triton's interpreter multiplies the bits of bfloat16 as integers")
    case = make_case(MIXED, num_heads=4, num_kv_heads=2, head_dim=head_dim, dtype=dtype, device=device)
    output = paged_attention(*case.arguments(), scale=head_dim**-0.5, max_query_len=case.max_query_len)
    assert output.dtype == dtype
    # Weights are rounded once, the output once more; the oracle sees the rounded inputs.
    atol = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(output.double().cpu(), dense_attention(case, scale=head_dim**-0.5), atol=atol, rtol=0.0)


def test_strided_queries(device: torch.device) -> None:
    """Models hand over transposed views."""
    case = make_case(MIXED, num_heads=4, num_kv_heads=2, head_dim=64, device=device)
    query = case.query.transpose(0, 1).contiguous().transpose(0, 1)
    assert not query.is_contiguous()
    output = paged_attention(query, *case.arguments()[1:], scale=0.2, max_query_len=case.max_query_len)
    assert output.is_contiguous()
    torch.testing.assert_close(output.double().cpu(), dense_attention(case, scale=0.2), atol=2e-6, rtol=1e-5)


def test_sequences_and_rows_without_queries(device: torch.device) -> None:
    """A step padded to a fixed size has empty sequences at its end and rows that belong to none."""
    case = make_case([(1, 40), (3, 9), (0, 0), (0, 0)], num_heads=4, num_kv_heads=2, head_dim=64, device=device)
    query = torch.cat([case.query, torch.full((4, 4, 64), float("nan"), device=device)])
    for max_query_len in (3, 300):
        output = paged_attention(query, *case.arguments()[1:], scale=0.2, max_query_len=max_query_len)
        assert output.shape == query.shape
        expected = dense_attention(case, scale=0.2)
        torch.testing.assert_close(output[:4].double().cpu(), expected, atol=2e-6, rtol=1e-5)


def test_result_does_not_depend_on_neighbours(device: torch.device) -> None:
    """The same sequence alone and in a batch: equal to the last bit where the tiling is the same."""
    alone = make_case([(5, 111)], num_heads=4, num_kv_heads=2, head_dim=64, device=device, seed=3)
    alone_output = paged_attention(*alone.arguments(), scale=0.2, max_query_len=5)
    num_blocks = alone.key_cache.shape[0]
    other = make_case([(4, 50)], num_heads=4, num_kv_heads=2, head_dim=64, device=device, seed=4)
    width = max(alone.block_tables.shape[1], other.block_tables.shape[1])
    tables = torch.zeros(2, width, dtype=torch.int32, device=device)
    tables[0, : other.block_tables.shape[1]] = other.block_tables[0] + num_blocks
    tables[1, : alone.block_tables.shape[1]] = alone.block_tables[0]
    output = paged_attention(
        torch.cat([other.query, alone.query]),
        torch.cat([alone.key_cache, other.key_cache]),
        torch.cat([alone.value_cache, other.value_cache]),
        torch.tensor([0, 4, 9], dtype=torch.int32, device=device),
        torch.cat([other.context_lens, alone.context_lens]),
        tables,
        scale=0.2,
        max_query_len=5,
    )
    atol = 0.0 if device.type == "cuda" else 1e-6  # torch's own products differ with the batch
    torch.testing.assert_close(output[4:], alone_output, atol=atol, rtol=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(1, 64), (3, 80)])
def test_store_kv(device: torch.device, dtype: torch.dtype, num_kv_heads: int, head_dim: int) -> None:
    generator = torch.Generator().manual_seed(0)
    num_tokens, num_blocks, block_size = 63, 7, 16
    # Strided as models hand them over: heads before tokens in memory.
    key = torch.randn(num_kv_heads, num_tokens, head_dim, generator=generator).to(device, dtype).transpose(0, 1)
    value = torch.randn(num_tokens, num_kv_heads, head_dim, generator=generator).to(device, dtype)
    key_cache = torch.full((num_blocks, block_size, num_kv_heads, head_dim), float("nan"), dtype=dtype, device=device)
    value_cache = key_cache.clone()
    slots = torch.randperm(num_blocks * block_size, generator=generator)[:num_tokens].to(device)
    slots[[0, 11, 62]] = -1
    store_kv(key, value, key_cache, value_cache, slots)
    for cache, written in ((key_cache, key), (value_cache, value)):
        rows = cache.flatten(0, 1)
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                assert torch.equal(rows[slot], written[token])
        untouched = torch.ones(num_blocks * block_size, dtype=torch.bool)
        untouched[slots[slots >= 0].cpu()] = False
        assert bool(rows[untouched.to(device)].isnan().all())


def test_kernels_compile_for_hopper(tmp_path: Path) -> None:
    """Each kernel becomes a cubin that fits an SM's shared memory: the interpreter also runs what does not compile."""
    shared_bytes = report_of("tests.kernels.compile_paged_attention", cache=tmp_path)
    assert len(shared_bytes) >= 35
    assert max(shared_bytes.values()) <= 227 * 1024
