"""The paged KV cache: for each layer one tensor of keys and one of values, cut into blocks."""

from __future__ import annotations

import math
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
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        check_block_size(block_size)
        if num_blocks < 1:
            raise ValueError(f"a KV cache needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.keys = tuple(_allocate(layer, num_blocks, block_size, dtype, device) for layer in layers)
        self.values = tuple(_allocate(layer, num_blocks, block_size, dtype, device) for layer in layers)


def bytes_per_block(layers: Sequence[LayerShape], block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes in all layers together."""
    return sum(2 * layer.num_kv_heads * layer.head_dim for layer in layers) * block_size * dtype.itemsize


def num_blocks_within(num_bytes: int, layers: Sequence[LayerShape], block_size: int, dtype: torch.dtype) -> int:
    """How many blocks fit into so many bytes.

    Raises MemoryError when not even one does.
    """
    num_blocks = num_bytes // bytes_per_block(layers, block_size, dtype)
    if num_blocks < 1:
        raise MemoryError(
            f"no room for the KV cache: a block of {block_size} tokens takes "
            f"{bytes_per_block(layers, block_size, dtype):,} bytes and {num_bytes:,} are left"
        )
    return num_blocks


def check_block_size(block_size: int) -> None:
    """Raise ValueError unless the kernels can serve this block size."""
    if block_size < 16 or not math.log2(block_size).is_integer():
        raise ValueError(f"block_size must be a power of two and at least 16, not {block_size}")


def _allocate(
    layer: LayerShape, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:  # [num_blocks, block_size, num_kv_heads, head_dim]
    return torch.zeros(num_blocks, block_size, layer.num_kv_heads, layer.head_dim, dtype=dtype, device=device)
