"""Attention of a tree's nodes: each sees what is committed, in a paged cache, and its own ancestors.

Tree attention as in SpecInfer (Miao et al., arXiv 2305.09781): several continuations of one text are computed in one
pass, where a mask in place of causality keeps them apart. The keys and values of nodes lie in an area of the cache of
the sequence's own, in any order, so that no block is shared between branches.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from kernels.dense_attention import GatheredCache
from kernels.dispatch import runs_triton
from kernels.node_keys import NodeKeys


def tree_attention(
    query: torch.Tensor,  # [batch * num_queries, num_heads, head_dim], sequence after sequence
    key_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim], contiguous
    value_cache: torch.Tensor,  # as key_cache
    prefix_lens: torch.Tensor,  # [batch] int32, committed tokens in the blocks, all of them before any node
    block_tables: torch.Tensor,  # [batch, max_blocks] int32; entries beyond a sequence's prefix may be anything
    node_keys: NodeKeys,  # of the batch; nodes' own keys among them, in the cache already
    positions: torch.Tensor,  # [batch * num_queries] int64; read for a sliding window only
    *,
    scale: float,
    sliding_window: int | None = None,  # a query sees so many positions, its own included; None for all before it
    softcap: float | None = None,  # scores become softcap * tanh(score / softcap)
    is_after_store: bool = False,
) -> torch.Tensor:  # [batch * num_queries, num_heads, head_dim]
    """Attend each query to the whole prefix of its sequence and to the nodes that it sees.

    num_heads is a multiple of num_kv_heads and query head h reads kv head h // (num_heads // num_kv_heads). A sliding
    window cuts nodes off only where `node_keys` has their positions. A query that sees no key comes back finite and
    meaningless. What no query of its sequence sees may hold anything, NaN included.

    `is_after_store` tells that the kernel directly ahead on the stream stores this pass's keys and values and writes
    none of the other arguments: a GPU may then read those before that kernel has ended.

    Runs a Triton kernel on CUDA tensors and plain torch on others.
    """
    attend: Callable[..., torch.Tensor] = tree_attention_reference
    if runs_triton(query):
        from kernels.tree_attention_triton import launch_tree_attention

        attend = partial(launch_tree_attention, is_after_store=is_after_store)
    return attend(
        query,
        key_cache,
        value_cache,
        prefix_lens,
        block_tables,
        node_keys,
        positions,
        scale=scale,
        sliding_window=sliding_window,
        softcap=softcap,
    )


def tree_attention_reference(
    query: torch.Tensor,  # [batch * num_queries, num_heads, head_dim]
    key_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_cache: torch.Tensor,  # as key_cache
    prefix_lens: torch.Tensor,  # [batch] int32
    block_tables: torch.Tensor,  # [batch, max_blocks] int32
    node_keys: NodeKeys,
    positions: torch.Tensor,  # [batch * num_queries] int64
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:  # [batch * num_queries, num_heads, head_dim]
    """`tree_attention` in plain torch; what runs on a CPU.

    The keys of a sequence are those of its prefix and behind them those of its nodes; a few sequences of similar length
    at a time are gathered from the cache and attended to densely.
    """
    block_size, num_kv_heads = key_cache.shape[1:3]
    num_queries = node_keys.num_queries
    batched = query.view(-1, num_queries, *query.shape[1:])
    output = torch.zeros_like(batched, memory_format=torch.contiguous_format)
    all_lens, order = (prefix_lens + node_keys.counts).sort()
    num_empty = int((all_lens == 0).sum())
    row, lens = order[num_empty:], all_lens[num_empty:].tolist()
    if not lens:
        return output.flatten(0, 1)

    num_keys = all_lens[num_empty:].unsqueeze(1)  # [rows, 1]
    prefix_len = prefix_lens[row].unsqueeze(1)
    index = torch.arange(lens[-1], device=query.device)
    # Padding repeats a sequence's last key: only what the sequence sees is ever read.
    key_index = torch.minimum(index, num_keys - 1)  # [rows, keys]
    is_prefix = key_index < prefix_len
    prefix_index = torch.minimum(key_index, (prefix_len - 1).clamp(min=0))
    block = block_tables[row].gather(1, prefix_index // block_size).long()
    node_index = (key_index - prefix_len).clamp(min=0)
    slot = torch.where(
        is_prefix,
        block * block_size + prefix_index % block_size,
        node_keys.slots[row].gather(1, node_index),
    )
    seen_by = node_keys.seen_by[row].gather(1, node_index).masked_fill(is_prefix, -1).masked_fill(index >= num_keys, 0)
    query_index = torch.arange(num_queries, device=query.device).unsqueeze(1)
    is_seen = (seen_by.unsqueeze(1) >> query_index & 1).bool()  # [rows, queries, keys]
    if sliding_window is not None:
        first_position = positions.view(-1, num_queries)[row] - sliding_window + 1  # [rows, queries]
        if node_keys.positions is not None:
            key_position = torch.where(is_prefix, key_index, node_keys.positions[row].gather(1, node_index))
            is_seen &= key_position.unsqueeze(1) >= first_position.unsqueeze(2)
        else:
            is_seen &= (key_index.unsqueeze(1) >= first_position.unsqueeze(2)) | ~is_prefix.unsqueeze(1)
    # A query without keys takes all, or it would become NaN.
    is_seen |= ~is_seen.any(dim=2, keepdim=True)

    # The query heads of a kv head become rows of one matrix, so that its keys are read once for all of them.
    rows = batched[row].unflatten(2, (num_kv_heads, -1)).permute(0, 2, 3, 1, 4)
    cache = GatheredCache(key_cache, value_cache, lens[-1])
    for start, end, longest in cache.runs(lens):
        attended = cache.attend(
            rows[start:end], slot[start:end, :longest], is_seen[start:end, :, :longest], scale, softcap
        )
        output[row[start:end]] = attended.permute(0, 3, 1, 2, 4).flatten(2, 3)
    return output.flatten(0, 1)
