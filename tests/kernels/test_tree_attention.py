"""Attention of a tree's nodes: reference and Triton kernels against attention computed from its definition."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.dispatch import interpreted_kernels
from kernels.node_keys import collect_node_keys
from kernels.tree_attention import tree_attention
from tests.compiling import report_of
from tests.kernels.conftest import poisoned_memory
from tests.kernels.tree_cases import TreeCase, dense_tree_attention, make_tree_case

# A split in which a query sees no key has weight 0.
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log2")

# Committed tokens and nodes computed: ends on and off the edges of blocks and tiles; nothing of the one or the other.
MIXED = [(63, 4), (0, 3), (16, 1), (111, 4), (1, 2), (33, 0)]


@pytest.fixture(params=["reference", "interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Where the case runs; memory that nobody has written is NaN."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    if request.param == "interpreter":
        if torch.cuda.is_available():
            pytest.skip("Triton compiles where there is a GPU")
        assert os.environ.get("TRITON_INTERPRET") == "1", "tests/conftest.py sets it before Triton is imported"
    with poisoned_memory(), interpreted_kernels() if request.param == "interpreter" else nullcontext():
        yield torch.device("cuda" if request.param == "cuda" else "cpu")


def attend(case: TreeCase, *, has_positions: bool = True, **options: Any) -> torch.Tensor:
    arguments: Any = case.arguments(has_positions=has_positions)
    return tree_attention(*arguments, **options)


def assert_attends(
    case: TreeCase, *, has_positions: bool = True, atol: float = 2e-6, rtol: float = 1e-5, **options: Any
) -> None:
    """What sees a key gets what the definition says; the rest is finite."""
    output = attend(case, has_positions=has_positions, **options)
    assert output.shape == case.query.shape
    assert output.dtype == case.query.dtype
    assert output.is_contiguous()
    assert bool(output.isfinite().all())
    expected = dense_tree_attention(case, cuts_nodes=has_positions, **options)
    sees = ~expected[:, 0, 0].isnan()
    assert int(sees.sum()) > 0
    torch.testing.assert_close(output.double().cpu()[sees], expected[sees], atol=atol, rtol=rtol)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(3, 3, 64), (4, 2, 80), (4, 1, 32), (14, 2, 96), (8, 2, 128)]
)
def test_equals_dense_attention_at_every_grouping(
    device: torch.device, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    case = make_tree_case(
        MIXED, 4, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, device=device, seed=head_dim
    )
    assert_attends(case, scale=head_dim**-0.5)


@pytest.mark.parametrize("num_queries", [1, 5, 8, 16, 32])
def test_queries_of_a_sequence(device: torch.device, num_queries: int) -> None:
    """Some fit one program and others are several tiles; the last query has the sign's bit."""
    case = make_tree_case(
        [(40, num_queries), (0, 0), (7, (num_queries + 1) // 2)], num_queries, device=device, seed=num_queries
    )
    assert_attends(case, scale=0.2)


def test_more_heads_of_a_kv_head_than_rows_of_a_tile(device: torch.device) -> None:
    case = make_tree_case([(20, 2)], 2, num_heads=40, num_kv_heads=1, head_dim=32, device=device)
    assert_attends(case, scale=0.2)


@pytest.mark.parametrize("sliding_window", [None, 9])
def test_splits(device: torch.device, sliding_window: int | None) -> None:
    """A sequence alone is split finely; so many that nothing is split."""
    for batch in (1, 2, 140):
        sequences = [(333 // batch + index % 7, 1 + index % 2) for index in range(batch)]
        case = make_tree_case(
            sequences, 2, num_heads=2, num_kv_heads=1, head_dim=32, area_size=33, device=device, seed=batch
        )
        assert_attends(case, scale=0.3, sliding_window=sliding_window)


@pytest.mark.parametrize("sliding_window", [1, 7, 64])
@pytest.mark.parametrize("has_positions", [True, False])
def test_sliding_window(device: torch.device, sliding_window: int, has_positions: bool) -> None:
    """It cuts the prefix, and nodes where their positions are known."""
    case = make_tree_case(MIXED, 4, head_dim=32, device=device, seed=sliding_window)
    assert_attends(case, has_positions=has_positions, scale=0.3, sliding_window=sliding_window)


@pytest.mark.parametrize("sliding_window", [None, 20])
def test_softcap(device: torch.device, sliding_window: int | None) -> None:
    """The cap is low and the scale large: without it, or with it after the mask, the output is another."""
    case = make_tree_case(MIXED, 4, device=device)
    assert_attends(case, scale=0.5, sliding_window=sliding_window, softcap=3.0, atol=1e-5)


@pytest.mark.parametrize("block_size", [32, 128])
def test_block_sizes(device: torch.device, block_size: int) -> None:
    assert_attends(make_tree_case(MIXED, 4, block_size=block_size, device=device), scale=0.2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [80, 256])
def test_half_precision(
    device: torch.device, dtype: torch.dtype, head_dim: int, request: pytest.FixtureRequest
) -> None:
    if dtype == torch.bfloat16 and "interpreter" in request.node.name:
        pytest.skip("Triton's interpreter multiplies the bits of bfloat16 as integers")
    case = make_tree_case(MIXED, 4, head_dim=head_dim, dtype=dtype, device=device)
    # Weights are rounded once, the output once more; the oracle sees the rounded inputs.
    assert_attends(case, scale=head_dim**-0.5, atol=4 * torch.finfo(dtype).eps, rtol=0.0)


def test_strided_queries(device: torch.device) -> None:
    """Models hand over transposed views."""
    case = make_tree_case(MIXED, 4, device=device)
    case = dataclasses.replace(case, query=case.query.transpose(0, 1).contiguous().transpose(0, 1))
    assert not case.query.is_contiguous()
    assert_attends(case, scale=0.2)


def test_nobody_sees_anything(device: torch.device) -> None:
    """A pass of padding alone, split and not split."""
    for batch in (1, 140):
        case = make_tree_case([(0, 0)] * batch, 2, num_heads=2, num_kv_heads=1, head_dim=32, device=device)
        assert bool(attend(case, scale=0.2).isfinite().all())


def test_result_does_not_depend_on_neighbours(device: torch.device) -> None:
    """A sequence's nodes get the same, to the last bit where the tiling is the same, whatever the others are."""
    case = make_tree_case([(50, 5), (111, 5)], 5, device=device, seed=3)
    other = dataclasses.replace(
        case,
        query=torch.cat([case.query[:5] + 1.0, case.query[5:]]),
        prefix_lens=torch.tensor([3, 111], dtype=torch.int32, device=device),
        is_ancestor=torch.stack([case.is_ancestor[0].roll(1, dims=0), case.is_ancestor[1]]),
    )
    torch.testing.assert_close(attend(other, scale=0.2)[5:], attend(case, scale=0.2)[5:], atol=1e-6, rtol=0.0)


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "num_queries"), [(1, 32), (8, 16), (32, 8), (64, 4), (256, 1)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_shapes_that_are_served(batch: int, num_queries: int, head_dim: int) -> None:
    """Long contexts and full areas in bfloat16, which the interpreter has no time for."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    sequences = [(300 + 37 * index % 700, num_queries) for index in range(min(batch, 32))]
    sequences += [(17 * index % 50, num_queries) for index in range(32, batch)]
    case = make_tree_case(
        sequences,
        num_queries,
        num_older=200,
        area_size=512,
        num_heads=16,
        num_kv_heads=4,
        head_dim=head_dim,
        dtype=torch.bfloat16,
        device="cuda",
    )
    with poisoned_memory():
        assert_attends(case, scale=head_dim**-0.5, atol=4 * torch.finfo(torch.bfloat16).eps, rtol=0.0)


@pytest.mark.parametrize("num_queries", [1, 3, 32])
@pytest.mark.parametrize("area_size", [1, 64, 111, 1100])
def test_lists_of_nodes(device: torch.device, num_queries: int, area_size: int) -> None:
    """Exactly the places that somebody sees, in their order, each with its word."""
    generator = torch.Generator().manual_seed(area_size)
    is_ancestor = torch.rand(4, num_queries, area_size, generator=generator) < 0.05
    is_ancestor[1] = False
    is_ancestor[2] = True
    node_starts = torch.tensor([5000, 100, 3, 70_000])
    node_positions = torch.randint(100, (4, area_size), generator=generator)
    keys = collect_node_keys(is_ancestor.to(device), node_starts.to(device), node_positions.to(device))
    assert keys.positions is not None
    assert keys.num_queries == num_queries
    for sequence, count in enumerate(keys.counts.tolist()):
        places = is_ancestor[sequence].any(dim=0).nonzero().flatten()
        assert count == len(places)
        assert keys.slots[sequence, :count].tolist() == (node_starts[sequence] + places).tolist()
        assert keys.positions[sequence, :count].tolist() == node_positions[sequence, places].tolist()
        for place, word in zip(places.tolist(), keys.seen_by[sequence, :count].tolist(), strict=True):
            seen_by = [query for query in range(32) if word >> query & 1]
            assert seen_by == is_ancestor[sequence, :, place].nonzero().flatten().tolist()


def test_too_many_queries_for_a_word() -> None:
    with pytest.raises(ValueError, match="at most 32 queries a sequence"):
        collect_node_keys(torch.zeros(1, 33, 64, dtype=torch.bool), torch.zeros(1, dtype=torch.int64))


def test_kernels_compile_for_hopper(tmp_path: Path) -> None:
    """Each kernel becomes a cubin that fits an SM's shared memory: the interpreter also runs what does not compile."""
    shared_bytes = report_of("tests.kernels.compile_tree_attention", cache=tmp_path)
    assert len(shared_bytes) >= 19
    assert max(shared_bytes.values()) <= 227 * 1024
