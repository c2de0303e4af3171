"""Which keys of a tree's nodes attention reads: a dense list for each sequence, made once for all layers of a pass.

A sequence's node area has a place for every node that it may have, and a pass reads few of them: the ancestors of the
nodes that it computes. In a list of these, a tile of keys is full of keys that somebody sees, and a word says who.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.dispatch import runs_triton

# Who sees a key is one bit a query in a word of 32.
MAX_QUERIES = 32


@dataclass(frozen=True)
class NodeKeys:
    """For each sequence the nodes that any of its queries sees, in the order of its node area.

    What stands behind a sequence's `counts` means nothing.
    """

    slots: torch.Tensor  # [batch, area_size] int32, where the cache has their keys and values
    seen_by: torch.Tensor  # [batch, area_size] int32, bit w: query w sees it
    positions: torch.Tensor | None  # [batch, area_size] int32; None: no sliding window cuts nodes off
    counts: torch.Tensor  # [batch] int32
    num_queries: int  # of each sequence


def collect_node_keys(
    is_ancestor: torch.Tensor,  # [batch, num_queries, area_size] bool, contiguous: query w sees what this place holds
    node_starts: torch.Tensor,  # [batch] int64, the cache slot of each sequence's first place
    node_positions: torch.Tensor | None = None,  # [batch, area_size] int32 or int64, contiguous; read where seen
) -> NodeKeys:
    """List the places that are seen. Never waits for the device.

    Raises ValueError for more than 32 queries a sequence. Runs a Triton kernel on CUDA tensors, plain torch on others.
    """
    if is_ancestor.shape[1] > MAX_QUERIES:
        raise ValueError(f"at most {MAX_QUERIES} queries a sequence can attend to nodes, not {is_ancestor.shape[1]}")
    if runs_triton(is_ancestor):
        from kernels.node_keys_triton import launch_collect_node_keys

        return launch_collect_node_keys(is_ancestor, node_starts, node_positions)
    return collect_node_keys_reference(is_ancestor, node_starts, node_positions)


def collect_node_keys_reference(
    is_ancestor: torch.Tensor,  # [batch, num_queries, area_size] bool
    node_starts: torch.Tensor,  # [batch] int64
    node_positions: torch.Tensor | None = None,  # [batch, area_size] int32 or int64
) -> NodeKeys:
    """`collect_node_keys` in plain torch."""
    num_queries = is_ancestor.shape[1]
    query_bits = 1 << torch.arange(num_queries, device=is_ancestor.device)
    seen_by = (is_ancestor * query_bits.unsqueeze(1)).sum(dim=1)  # [batch, area_size] int64
    is_seen = seen_by > 0
    # Places that are seen come first, in their order.
    place = torch.argsort(~is_seen, dim=1, stable=True)
    seen_by = seen_by.gather(1, place)
    return NodeKeys(
        slots=(node_starts.unsqueeze(1) + place).int(),
        # Bit 31 is the sign.
        seen_by=torch.where(seen_by >= 1 << 31, seen_by - (1 << 32), seen_by).int(),
        positions=None if node_positions is None else node_positions.gather(1, place).int(),
        counts=is_seen.sum(dim=1, dtype=torch.int32),
        num_queries=num_queries,
    )
