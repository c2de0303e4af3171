"""Causal attention of ragged queries over a paged KV cache.

The cache is cut into blocks of `block_size` tokens that a sequence owns in any order, named by its block table
(PagedAttention: Kwon et al., arXiv 2309.06180). Prefill chunks, single-token decoding and the several tokens of a
verify step are one case here: sequence i has `query_lens[i]` new tokens, the last of them at position
`context_lens[i] - 1`, and their keys and values are in the cache already.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch

from kernels.dense_attention import GatheredCache
from kernels.dispatch import runs_triton

# The plain-torch path attends to tiles of at most so many queries, so that masks stay small.
_REFERENCE_TILE_QUERIES = 128


def paged_attention(
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim], sequences one after another
    key_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim], contiguous
    value_cache: torch.Tensor,  # as key_cache
    cu_query_lens: torch.Tensor,  # [batch + 1] int32, where each sequence's queries start, and the end
    context_lens: torch.Tensor,  # [batch] int32, tokens of the sequence including this step's queries
    block_tables: torch.Tensor,  # [batch, max_blocks] int32; entries beyond a sequence's context may be anything
    *,
    scale: float,
    max_query_len: int,  # the longest of the batch; sets the tiling
    sliding_window: int | None = None,  # a query sees so many tokens, itself included; None for all before it
    softcap: float | None = None,  # scores become softcap * tanh(score / softcap)
    is_after_store: bool = False,
) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
    """Attend each query to the tokens up to its own position.

    Query j of sequence i stands at position context_lens[i] - query_len + j. num_heads is a multiple of num_kv_heads
    and query head h reads kv head h // (num_heads // num_kv_heads). Rows of tokens that no sequence owns come back
    undefined. Slots of the cache beyond a sequence's context may hold anything, NaN included.

    `is_after_store` tells that the kernel directly ahead on the stream stores this step's keys and values and writes
    neither lengths nor block tables: a GPU may then read those before that kernel has ended.

    Runs a Triton kernel on CUDA tensors and plain torch on others.
    """
    attend: Callable[..., torch.Tensor] = paged_attention_reference
    if runs_triton(query):
        from kernels.paged_attention_triton import launch_paged_attention

        attend = partial(launch_paged_attention, is_after_store=is_after_store)
    return attend(
        query,
        key_cache,
        value_cache,
        cu_query_lens,
        context_lens,
        block_tables,
        scale=scale,
        max_query_len=max_query_len,
        sliding_window=sliding_window,
        softcap=softcap,
    )


def paged_attention_reference(
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    key_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_cache: torch.Tensor,  # as key_cache
    cu_query_lens: torch.Tensor,  # [batch + 1] int32
    context_lens: torch.Tensor,  # [batch] int32
    block_tables: torch.Tensor,  # [batch, max_blocks] int32
    *,
    scale: float,
    max_query_len: int,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
    """`paged_attention` in plain torch; what runs on a CPU.

    Queries are cut into tiles, and tiles of similar length form a batch, padded to the longest. A few tiles at a time,
    keys and values are gathered from the cache and attended to densely.
    """
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    block_size, num_kv_heads, head_dim = key_cache.shape[1:]
    cache = GatheredCache(key_cache, value_cache, int(context_lens.max()))
    tiles = _query_tiles(cu_query_lens.tolist(), context_lens.tolist(), min(max_query_len, _REFERENCE_TILE_QUERIES))
    for _, batch in groupby(tiles, key=_length_class):
        sequence, first_token, num_queries, context_len = torch.tensor(list(batch), device=query.device).T.unsqueeze(2)
        # Padding repeats a tile's last query and its last key: only what belongs to the sequence is ever read.
        offset = torch.minimum(torch.arange(int(num_queries.max()), device=query.device), num_queries - 1)
        token = first_token + offset  # [tiles, queries]
        query_position = (context_len - num_queries + offset).unsqueeze(2)  # [tiles, queries, 1]
        key_position = torch.arange(int(context_len.max()), device=query.device)
        cached_position = torch.minimum(key_position, context_len - 1)  # [tiles, keys]
        block = block_tables[sequence, cached_position // block_size].long()
        slot = block * block_size + cached_position % block_size
        # The query heads of a kv head become rows of one matrix, so that its keys are read once for all of them.
        rows = query[token].view(*token.shape, num_kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4)
        attended = torch.empty_like(rows, memory_format=torch.contiguous_format)
        for start, end, num_keys in cache.runs(context_len.flatten().tolist()):
            keys = key_position[:num_keys]
            is_seen = keys <= query_position[start:end]  # [tiles, queries, keys]
            if sliding_window is not None:
                is_seen &= keys > query_position[start:end] - sliding_window
            attended[start:end] = cache.attend(rows[start:end], slot[start:end, :num_keys], is_seen, scale, softcap)
        output[token] = attended.permute(0, 3, 1, 2, 4).flatten(2, 3)
    return output


class _QueryTile(NamedTuple):
    """Consecutive queries of one sequence."""

    sequence: int
    first_token: int  # row of the queries' tensor
    num_queries: int
    context_len: int  # up to and including the last query


def _length_class(tile: _QueryTile) -> int:
    return (tile.num_queries + 7) // 8


def _query_tiles(cu_query_lens: list[int], context_lens: list[int], most_queries: int) -> list[_QueryTile]:
    """Cut the queries into tiles, sorted by length class and then by context."""
    tiles = []
    for sequence, context_len in enumerate(context_lens):
        end = cu_query_lens[sequence + 1]
        for first_token in range(cu_query_lens[sequence], end, most_queries):
            num_queries = min(most_queries, end - first_token)
            tiles.append(
                _QueryTile(sequence, first_token, num_queries, context_len - (end - first_token - num_queries))
            )
    return sorted(tiles, key=lambda tile: (_length_class(tile), tile.context_len))
