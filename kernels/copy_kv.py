"""Copy the keys and values of some slots of a KV cache to other slots, in all layers at once."""

from __future__ import annotations

import torch

from kernels.dispatch import runs_triton


def copy_kv(
    caches: torch.Tensor,  # [..., num_blocks, block_size, num_kv_heads, head_dim], contiguous: of any number of layers
    sources: torch.Tensor,  # [num_pairs] int64: block * block_size + offset, -1 for a pair that copies nothing
    destinations: torch.Tensor,  # [num_pairs] int64, as sources
) -> None:
    """Copy what each layer has in slot sources[i] to slot destinations[i], in place; pairs with a -1 do nothing.

    No destination may be another's, or a source. Runs a Triton kernel on CUDA tensors and plain torch on others; on a
    GPU it may be captured in a graph.
    """
    if runs_triton(caches):
        from kernels.copy_kv_triton import launch_copy_kv

        launch_copy_kv(caches, sources, destinations)
    else:
        copy_kv_reference(caches, sources, destinations)


def copy_kv_reference(
    caches: torch.Tensor,  # [..., num_blocks, block_size, num_kv_heads, head_dim], contiguous
    sources: torch.Tensor,  # [num_pairs] int64
    destinations: torch.Tensor,  # [num_pairs] int64
) -> None:
    """`copy_kv` in plain torch."""
    is_copied = (sources >= 0) & (destinations >= 0)
    sources, destinations = sources[is_copied], destinations[is_copied]
    num_slots, width = caches.shape[-4:-2].numel(), caches.shape[-2:].numel()
    for cache in caches.view(-1, num_slots, width):
        cache.index_copy_(0, destinations, cache.index_select(0, sources))
