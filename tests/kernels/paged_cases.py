"""Ragged batches over a shuffled, poisoned paged cache, and what attention over them should give."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PagedCase:
    """Arguments of `paged_attention`, and each sequence's keys and values in order for the oracle."""

    query: torch.Tensor  # [num_tokens, num_heads, head_dim]
    key_cache: torch.Tensor  # [num_blocks, block_size, num_kv_heads, head_dim], NaN in every slot that nobody owns
    value_cache: torch.Tensor  # as key_cache
    cu_query_lens: torch.Tensor  # [batch + 1] int32
    context_lens: torch.Tensor  # [batch] int32
    block_tables: torch.Tensor  # [batch, max_blocks] int32, a block full of NaN beyond a sequence's own
    keys: list[torch.Tensor]  # a sequence each: [context_len, num_kv_heads, head_dim]
    values: list[torch.Tensor]  # as keys

    @property
    def max_query_len(self) -> int:
        return int(self.cu_query_lens.diff().max())

    def arguments(self) -> tuple[torch.Tensor, ...]:
        return (
            self.query,
            self.key_cache,
            self.value_cache,
            self.cu_query_lens,
            self.context_lens,
            self.block_tables,
        )


def make_case(
    lens: list[tuple[int, int]],  # (query_len, context_len) of each sequence
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> PagedCase:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    num_used = [-(-context_len // block_size) for _, context_len in lens]
    num_blocks = sum(num_used) + 1
    nobody, *shuffled = torch.randperm(num_blocks, generator=generator).tolist()
    key_cache = torch.full((num_blocks, block_size, num_kv_heads, head_dim), float("nan"), dtype=dtype)
    value_cache = key_cache.clone()
    block_tables = torch.full((len(lens), max(num_used) + 2), nobody, dtype=torch.int32)
    keys, values = [], []
    for sequence, (_, context_len) in enumerate(lens):
        blocks = [shuffled.pop() for _ in range(num_used[sequence])]
        block_tables[sequence, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        keys.append(random(context_len, num_kv_heads, head_dim))
        values.append(random(context_len, num_kv_heads, head_dim))
        for position in range(context_len):
            key_cache[blocks[position // block_size], position % block_size] = keys[-1][position]
            value_cache[blocks[position // block_size], position % block_size] = values[-1][position]
    query_lens = torch.tensor([0] + [query_len for query_len, _ in lens])
    return PagedCase(
        query=random(int(query_lens.sum()), num_heads, head_dim).to(device),
        key_cache=key_cache.to(device),
        value_cache=value_cache.to(device),
        cu_query_lens=query_lens.cumsum(0).int().to(device),
        context_lens=torch.tensor([context_len for _, context_len in lens]).int().to(device),
        block_tables=block_tables.to(device),
        keys=keys,
        values=values,
    )


def dense_attention(
    case: PagedCase, *, scale: float, sliding_window: int | None = None, softcap: float | None = None
) -> torch.Tensor:  # [num_tokens, num_heads, head_dim] float64 on the CPU
    """Attention straight from its definition, query by query in float64."""
    query = case.query.double().cpu()
    starts = case.cu_query_lens.tolist()
    output = torch.full_like(query, float("nan"))
    for sequence, context_len in enumerate(case.context_lens.tolist()):
        start, end = starts[sequence], starts[sequence + 1]
        group_size = query.shape[1] // case.keys[sequence].shape[1]
        key = case.keys[sequence].double().repeat_interleave(group_size, dim=1)
        value = case.values[sequence].double().repeat_interleave(group_size, dim=1)
        for token in range(start, end):
            position = context_len - (end - token)
            first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            scores = torch.einsum("hd,khd->hk", query[token], key[first : position + 1]) * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            output[token] = torch.einsum("hk,khd->hd", scores.softmax(dim=1), value[first : position + 1])
    return output
