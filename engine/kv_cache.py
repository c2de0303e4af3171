"""The paged KV cache: for each layer one tensor of keys and one of values, cut into blocks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LayerShape:
    """What one layer keeps for a token: a key and a value for each of its kv heads."""

    num_kv_heads: int
    head_dim: int


class KVCache:
    """Keys and values of all layers, on one device.

    A block is `block_size` consecutive tokens of one sequence, in every layer; its number is the same in all layers.
    Layers of one shape lie in one tensor, so that one kernel can reach all of them.

    Behind the blocks there is room for `num_reserved_slots` tokens that no block table names, for whoever asked for it:
    cache slots from `first_reserved_slot` on.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        num_reserved_slots: int = 0,
    ) -> None:
        check_block_size(block_size)
        if num_blocks < 1:
            raise ValueError(f"a KV cache needs at least one block, not {num_blocks}")
        num_all_blocks = num_blocks + num_reserved_blocks(num_reserved_slots, block_size)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.first_reserved_slot = num_blocks * block_size
        stacks = {
            # Keys and values of each layer.
            shape: torch.zeros(
                2 * num_layers,
                num_all_blocks,
                block_size,
                shape.num_kv_heads,
                shape.head_dim,
                dtype=dtype,
                device=device,
            )
            for shape, num_layers in Counter(layers).items()
        }
        self.stacks = tuple(
            stacks.values()
        )  # each [2 * num_layers, num_all_blocks, block_size, num_kv_heads, head_dim]
        caches = {shape: iter(stack) for shape, stack in stacks.items()}
        pairs = [(next(caches[shape]), next(caches[shape])) for shape in layers]
        # A layer each: [num_all_blocks, block_size, num_kv_heads, head_dim], contiguous.
        self.keys = tuple(key for key, _ in pairs)
        self.values = tuple(value for _, value in pairs)


def bytes_per_block(layers: Sequence[LayerShape], block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes in all layers together."""
    return sum(2 * layer.num_kv_heads * layer.head_dim for layer in layers) * block_size * dtype.itemsize


def num_reserved_blocks(num_reserved_slots: int, block_size: int) -> int:
    """How many blocks hold so many cache slots. Raises ValueError for a negative number."""
    if num_reserved_slots < 0:
        raise ValueError(f"num_reserved_slots must not be negative, but is {num_reserved_slots}")
    return -(-num_reserved_slots // block_size)


def num_blocks_within(
    num_bytes: int, layers: Sequence[LayerShape], block_size: int, dtype: torch.dtype, *, num_reserved_slots: int = 0
) -> int:
    """How many blocks fit into so many bytes, beside what is reserved.

    Raises MemoryError when not even one does.
    """
    block_bytes = bytes_per_block(layers, block_size, dtype)
    reserved_bytes = num_reserved_blocks(num_reserved_slots, block_size) * block_bytes
    num_blocks = (num_bytes - reserved_bytes) // block_bytes
    if num_blocks < 1:
        reserved = (
            f", of which {num_reserved_slots:,} reserved tokens take {reserved_bytes:,}" if reserved_bytes else ""
        )
        raise MemoryError(
            f"no room for the KV cache: a block of {block_size} tokens takes {block_bytes:,} bytes and {num_bytes:,} "
            f"are left{reserved}"
        )
    return num_blocks


def check_block_size(block_size: int) -> None:
    """Raise ValueError unless the kernels can serve this block size."""
    if block_size < 16 or not math.log2(block_size).is_integer():
        raise ValueError(f"block_size must be a power of two and at least 16, not {block_size}")
