"""Write the keys and values of a step's tokens into a paged KV cache."""

from __future__ import annotations

import torch

from kernels.dispatch import runs_triton


def store_kv(
    key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim], any strides with a dense last dimension
    value: torch.Tensor,  # as key
    key_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim], contiguous
    value_cache: torch.Tensor,  # as key_cache
    slot_mapping: torch.Tensor,  # [num_tokens] int64: block * block_size + offset, -1 for a token not to be stored
) -> None:
    """Copy each token's key and value to its slot of the caches, in place.

    Two tokens must not share a slot. Runs a Triton kernel on CUDA tensors and plain torch on others.
    """
    if runs_triton(key):
        from kernels.store_kv_triton import launch_store_kv

        launch_store_kv(key, value, key_cache, value_cache, slot_mapping)
    else:
        store_kv_reference(key, value, key_cache, value_cache, slot_mapping)


def store_kv_reference(
    key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    value: torch.Tensor,  # as key
    key_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim], contiguous
    value_cache: torch.Tensor,  # as key_cache
    slot_mapping: torch.Tensor,  # [num_tokens] int64
) -> None:
    """`store_kv` in plain torch."""
    if bool((slot_mapping < 0).any()):
        stored = slot_mapping >= 0
        key, value, slot_mapping = key[stored], value[stored], slot_mapping[stored]
    key_cache.flatten(0, 1).index_copy_(0, slot_mapping, key)
    value_cache.flatten(0, 1).index_copy_(0, slot_mapping, value)
