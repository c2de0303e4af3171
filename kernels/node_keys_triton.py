"""The Triton kernel of `kernels.node_keys`."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# Triton's decorators and device functions carry no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.node_keys import NodeKeys

# A program holds so many places for each query at a time.
_NUM_PLACES = 512


def launch_collect_node_keys(
    is_ancestor: torch.Tensor,  # [batch, num_queries, area_size] bool
    node_starts: torch.Tensor,  # [batch] int64
    node_positions: torch.Tensor | None,  # [batch, area_size] int32 or int64
) -> NodeKeys:
    """`collect_node_keys` on the GPU, one program a sequence."""
    batch, num_queries, area_size = is_ancestor.shape
    slots = torch.empty(batch, area_size, dtype=torch.int32, device=is_ancestor.device)
    seen_by = torch.empty_like(slots)
    positions = None if node_positions is None else torch.empty_like(slots)
    counts = torch.empty(batch, dtype=torch.int32, device=is_ancestor.device)
    if batch > 0:
        _collect_node_keys_kernel[(batch,)](
            is_ancestor.view(torch.int8),
            node_starts,
            node_positions,
            slots,
            seen_by,
            positions,
            counts,
            num_queries,
            area_size,
            NUM_QUERIES_PADDED=triton.next_power_of_2(num_queries),
            NUM_PLACES=min(triton.next_power_of_2(area_size), _NUM_PLACES),
            num_warps=8,
        )
    return NodeKeys(slots, seen_by, positions, counts, num_queries)


@triton.jit(do_not_specialize=["num_queries"])
def _collect_node_keys_kernel(
    is_ancestor_ptr,  # [batch, num_queries, area_size] int8
    node_starts_ptr,  # [batch] int64
    node_positions_ptr,  # [batch, area_size] int32 or int64, or None
    slots_ptr,  # [batch, area_size] int32
    seen_by_ptr,  # [batch, area_size] int32
    positions_ptr,  # [batch, area_size] int32, or None
    counts_ptr,  # [batch] int32
    num_queries,
    area_size,
    NUM_QUERIES_PADDED: tl.constexpr,
    NUM_PLACES: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    node_start = tl.load(node_starts_ptr + sequence)
    query = tl.arange(0, NUM_QUERIES_PADDED)
    row = (sequence * num_queries + query) * area_size
    count = 0
    for first in range(0, area_size, NUM_PLACES):
        place = first + tl.arange(0, NUM_PLACES)
        is_place = place < area_size
        sees = tl.load(
            is_ancestor_ptr + row[:, None] + place[None, :],
            mask=(query < num_queries)[:, None] & is_place[None, :],
            other=0,
        )
        # Bits of their own add up to the word that has them all, the sign's included.
        seen_by = tl.sum(sees.to(tl.int32) << query[:, None], axis=0)
        is_seen = seen_by != 0
        rank = tl.cumsum(is_seen.to(tl.int32), axis=0)
        listed = sequence * area_size + count + rank - 1
        tl.store(slots_ptr + listed, (node_start + place).to(tl.int32), mask=is_seen)
        tl.store(seen_by_ptr + listed, seen_by, mask=is_seen)
        if positions_ptr is not None:
            position = tl.load(node_positions_ptr + sequence * area_size + place, mask=is_seen, other=0)
            tl.store(positions_ptr + listed, position.to(tl.int32), mask=is_seen)
        count += tl.sum(is_seen.to(tl.int32), axis=0)
    tl.store(counts_ptr + sequence, count)
