"""Attention of a tree's nodes: each sees what is committed, in a paged cache, and its own ancestors.

Tree attention as in SpecInfer (Miao et al., arXiv 2305.09781): several continuations of one text are computed in one
pass, where a mask in place of causality keeps them apart. The keys and values of nodes lie in an area of the cache of
the sequence's own, in any order, so that no block is shared between branches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from kernels.dense_attention import GatheredCache
from kernels.dispatch import runs_triton
from kernels.node_keys import NodeKeys


@dataclass(frozen=True)
class TreeKeys:
    """What the queries of a pass see, the same in all layers; not to be changed while the pass is computed."""

    prefix_lens: torch.Tensor  # [batch] int32, committed tokens in the blocks, all of them before any node
    block_tables: torch.Tensor  # [batch, max_blocks] int32; entries beyond a sequence's prefix may be anything
    node_keys: NodeKeys  # of the batch; nodes' own keys among them
    positions: torch.Tensor  # [batch * num_queries] int64; read for a sliding window only
    # What the reference makes of them once a pass, by block size and window.
    _dense: dict[tuple[int, int | None], _DenseKeys] = field(default_factory=dict, init=False, repr=False)

    def dense(self, block_size: int, sliding_window: int | None) -> _DenseKeys:
        """The same as slots and masks."""
        if (block_size, sliding_window) not in self._dense:
            self._dense[block_size, sliding_window] = _DenseKeys.of(self, block_size, sliding_window)
        return self._dense[block_size, sliding_window]


def tree_attention(
    query: torch.Tensor,  # [batch * num_queries, num_heads, head_dim], sequence after sequence
    key_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim], contiguous
    value_cache: torch.Tensor,  # as key_cache
    keys: TreeKeys,
    *,
    scale: float,
    sliding_window: int | None = None,  # a query sees so many positions, its own included; None for all before it
    softcap: float | None = None,  # scores become softcap * tanh(score / softcap)
    is_after_store: bool = False,
) -> torch.Tensor:  # [batch * num_queries, num_heads, head_dim]
    """Attend each query to the whole prefix of its sequence and to the nodes that it sees, all of them in the cache.

    num_heads is a multiple of num_kv_heads and query head h reads kv head h // (num_heads // num_kv_heads). A sliding
    window cuts nodes off only where `keys` has their positions. A query that sees no key comes back finite and
    meaningless. What no query of its sequence sees may hold anything, NaN included.

    `is_after_store` tells that the kernel directly ahead on the stream stores this pass's keys and values and writes
    nothing of `keys`: a GPU may then read those before that kernel has ended.

    Runs a Triton kernel on CUDA tensors and plain torch on others.
    """
    attend: Callable[..., torch.Tensor] = tree_attention_reference
    if runs_triton(query):
        from kernels.tree_attention_triton import launch_tree_attention

        attend = partial(launch_tree_attention, is_after_store=is_after_store)
    return attend(query, key_cache, value_cache, keys, scale=scale, sliding_window=sliding_window, softcap=softcap)


def tree_attention_reference(
    query: torch.Tensor,  # [batch * num_queries, num_heads, head_dim]
    key_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_cache: torch.Tensor,  # as key_cache
    keys: TreeKeys,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:  # [batch * num_queries, num_heads, head_dim]
    """`tree_attention` in plain torch; what runs on a CPU.

    A few sequences of similar length at a time have their keys gathered from the cache, and are attended to densely.
    """
    block_size, num_kv_heads = key_cache.shape[1:3]
    batched = query.view(-1, keys.node_keys.num_queries, *query.shape[1:])
    output = torch.zeros_like(batched, memory_format=torch.contiguous_format)
    dense = keys.dense(block_size, sliding_window)
    if dense.lens:
        # The query heads of a kv head become rows of one matrix, so that its keys are read once for all of them.
        rows = batched[dense.sequences]
        rows = rows.view(*rows.shape[:2], num_kv_heads, -1, query.shape[2]).permute(0, 2, 3, 1, 4)
        cache = GatheredCache(key_cache, value_cache, dense.lens[-1])
        for start, end, longest in cache.runs(dense.lens):
            attended = cache.attend(
                rows[start:end], dense.slot[start:end, :longest], dense.is_seen[start:end, :, :longest], scale, softcap
            )
            output[dense.sequences[start:end]] = attended.permute(0, 3, 1, 2, 4).flatten(2, 3)
    return output.flatten(0, 1)


@dataclass(frozen=True)
class _DenseKeys:
    """The keys of each sequence that has any: those of its prefix and behind them those of its nodes."""

    sequences: torch.Tensor  # [rows] int64, sorted by number of keys
    lens: list[int]  # keys of each
    slot: torch.Tensor  # [rows, keys] int64, in the cache; a sequence's last key where it has no more
    is_seen: torch.Tensor  # [rows, queries, keys] bool, at least one key a query

    @classmethod
    def of(cls, keys: TreeKeys, block_size: int, sliding_window: int | None) -> _DenseKeys:
        node_keys, device = keys.node_keys, keys.prefix_lens.device
        lens, sequences = (keys.prefix_lens + node_keys.counts).sort()
        num_empty = int((lens == 0).sum())
        lens, sequences = lens[num_empty:].unsqueeze(1), sequences[num_empty:]  # [rows, 1] and [rows]
        index = torch.arange(int(lens[-1]) if len(lens) else 0, device=device)
        # Padding repeats a sequence's last key: only what the sequence sees is ever read.
        key_index = torch.minimum(index, lens - 1)  # [rows, keys]
        prefix_len = keys.prefix_lens[sequences].unsqueeze(1)
        is_prefix = key_index < prefix_len
        prefix_index = torch.minimum(key_index, (prefix_len - 1).clamp(min=0))
        node_index = (key_index - prefix_len).clamp(min=0)

        block = keys.block_tables[sequences].gather(1, prefix_index // block_size).long()
        slot = torch.where(
            is_prefix,
            block * block_size + prefix_index % block_size,
            node_keys.slots[sequences].gather(1, node_index),
        )
        seen_by = node_keys.seen_by[sequences].gather(1, node_index)
        seen_by = seen_by.masked_fill(is_prefix, -1).masked_fill(index >= lens, 0).unsqueeze(1)
        query_index = torch.arange(node_keys.num_queries, device=device).unsqueeze(1)
        is_seen = (seen_by >> query_index & 1).bool()  # [rows, queries, keys]
        if sliding_window is not None:
            first_position = keys.positions.view(-1, node_keys.num_queries)[sequences] - sliding_window + 1
            if node_keys.positions is not None:
                node_position = node_keys.positions[sequences].gather(1, node_index)
                position = torch.where(is_prefix, key_index, node_position)
                is_seen &= position.unsqueeze(1) >= first_position.unsqueeze(2)
            else:
                is_seen &= (key_index.unsqueeze(1) >= first_position.unsqueeze(2)) | ~is_prefix.unsqueeze(1)
        # A query without keys takes all, or it would become NaN.
        is_seen |= ~is_seen.any(dim=2, keepdim=True)
        return cls(sequences, lens.flatten().tolist(), slot, is_seen)
