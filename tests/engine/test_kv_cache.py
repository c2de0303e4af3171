"""The memory of the KV cache: layers of several shapes, and slots that are reserved behind the blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.kv_cache import KVCache, LayerShape, bytes_per_block, num_blocks_within
from engine.model_runner import ModelRunner
from tests.engine.small_models import FAMILIES, save_model

CPU = torch.device("cpu")
WIDE, NARROW = LayerShape(4, 32), LayerShape(1, 64)


def make_cache(layers: list[LayerShape], **options: int) -> KVCache:
    settings = {"num_blocks": 3, "block_size": 16} | options
    return KVCache(layers, dtype=torch.float32, device=CPU, **settings)


def test_layers_of_one_shape_lie_in_one_tensor() -> None:
    cache = make_cache([WIDE, NARROW, WIDE, WIDE])
    assert [tuple(stack.shape) for stack in cache.stacks] == [(6, 3, 16, 4, 32), (2, 3, 16, 1, 64)]
    caches = [*cache.keys, *cache.values]
    for index, (layer, key, value) in enumerate(zip([WIDE, NARROW, WIDE, WIDE], cache.keys, cache.values, strict=True)):
        assert key.shape == value.shape == (3, 16, layer.num_kv_heads, layer.head_dim)
        assert key.is_contiguous()
        assert value.is_contiguous()
        key.fill_(index + 1.0)
        value.fill_(-index - 1.0)
    # None of them is another's memory, and together they are all of it.
    assert [float(part.mean()) for part in caches] == [1.0, 2.0, 3.0, 4.0, -1.0, -2.0, -3.0, -4.0]
    assert sum(stack.numel() for stack in cache.stacks) == sum(part.numel() for part in caches)
    assert all(bool((stack != 0).all()) for stack in cache.stacks)


def test_reserved_slots_stand_behind_the_blocks() -> None:
    cache = make_cache([WIDE], num_reserved_slots=33)
    assert (cache.num_blocks, cache.first_reserved_slot) == (3, 48)
    assert cache.keys[0].shape == (6, 16, 4, 32)  # rounded up to blocks
    assert make_cache([WIDE]).keys[0].shape == (3, 16, 4, 32)
    with pytest.raises(ValueError, match="num_reserved_slots must not be negative"):
        make_cache([WIDE], num_reserved_slots=-1)


def test_blocks_within_a_budget() -> None:
    """Whatever the budget holds beside the reserved slots, and not a byte more."""
    layers = [WIDE, NARROW]
    block_bytes = bytes_per_block(layers, 16, torch.float32)
    assert block_bytes == 2 * (4 * 32 + 64) * 16 * 4

    def num_blocks(num_bytes: int, num_reserved_slots: int) -> int:
        return num_blocks_within(num_bytes, layers, 16, torch.float32, num_reserved_slots=num_reserved_slots)

    assert num_blocks(10 * block_bytes, 0) == 10
    assert num_blocks(10 * block_bytes, 33) == 7
    assert num_blocks(10 * block_bytes - 1, 32) == 7
    assert num_blocks(4 * block_bytes, 48) == 1
    with pytest.raises(
        MemoryError, match=r"takes 24,576 bytes and 98,303 are left, of which 48 reserved tokens take 73,728"
    ):
        num_blocks(4 * block_bytes - 1, 48)
    with pytest.raises(MemoryError, match=r"takes 24,576 bytes and 24,575 are left$"):
        num_blocks(block_bytes - 1, 0)


def test_runner_counts_reserved_slots(tmp_path: Path) -> None:
    # 4 layers, keys and values, 2 kv heads of 16 in float32: 1,024 bytes a token, 16,384 a block.
    path = save_model(FAMILIES["llama"](), tmp_path)
    runner = ModelRunner(path, device=CPU, dtype=torch.float32, cpu_cache_bytes=10 * 16_384, num_reserved_slots=6 * 16)
    assert (runner.num_blocks, runner.first_reserved_slot, runner.max_length) == (4, 64, 64)
    assert sum(stack.numel() for stack in runner._cache.stacks) * 4 == 10 * 16_384
    with pytest.raises(MemoryError, match="of which 160 reserved tokens take 163,840"):
        ModelRunner(path, device=CPU, dtype=torch.float32, cpu_cache_bytes=10 * 16_384, num_reserved_slots=160)
    runner = ModelRunner(path, device=CPU, dtype=torch.float32, num_blocks=5, num_reserved_slots=160)
    assert (runner.num_blocks, runner.first_reserved_slot, runner.max_length) == (5, 80, 80)
