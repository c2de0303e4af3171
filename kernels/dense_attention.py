"""Attention over keys gathered from a cache: what the plain-torch references of attention share."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

# So many elements of keys are gathered at a time, so that they are still in a core's cache when they are used.
_GATHERED_ELEMENTS = 400_000


class GatheredCache:
    """Keys and values of one layer, gathered a few rows at a time.

    One scratch for all gathers: fresh memory of this size costs more in page faults than the gathers themselves.
    """

    def __init__(
        self,
        key_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
        value_cache: torch.Tensor,  # as key_cache
        longest: int,  # keys of the longest row
    ) -> None:
        self._key_cache = key_cache.flatten(0, 1)
        self._value_cache = value_cache.flatten(0, 1)
        width = self._key_cache.shape[1:]
        self._most_keys = max(_GATHERED_ELEMENTS // width.numel(), longest)
        self._key_scratch = key_cache.new_empty(self._most_keys, *width)
        self._value_scratch = torch.empty_like(self._key_scratch)

    def runs(self, num_keys: list[int]) -> Iterator[tuple[int, int, int]]:
        """Ranges (start, end, keys) of rows sorted by their keys, padded to the last's, that fit the scratch."""
        start = 0
        for end in range(1, len(num_keys) + 1):
            if end == len(num_keys) or (end + 1 - start) * num_keys[end] > self._most_keys:
                yield start, end, num_keys[end - 1]
                start = end

    def attend(
        self,
        query: torch.Tensor,  # [rows, num_kv_heads, group_size, queries, head_dim]
        slot: torch.Tensor,  # [rows, keys] int64, slots of the cache that hold finite numbers
        is_seen: torch.Tensor,  # [rows, queries, keys] bool, at least one key a query
        scale: float,
        softcap: float | None,
    ) -> torch.Tensor:  # [rows, num_kv_heads, group_size, queries, head_dim]
        """Attend the queries of a row to its keys."""
        key = _gather(self._key_cache, slot, self._key_scratch)
        value = _gather(self._value_cache, slot, self._value_scratch)
        rows = query.flatten(2, 3)
        is_seen = is_seen.repeat(1, query.shape[2], 1).unsqueeze(1)
        if softcap is None:
            attended = F.scaled_dot_product_attention(rows, key, value, attn_mask=is_seen, scale=scale)
        else:
            compute_dtype = torch.promote_types(query.dtype, torch.float32)
            scores = (rows.to(compute_dtype) @ key.to(compute_dtype).mT) * scale
            scores = (softcap * torch.tanh(scores / softcap)).masked_fill(~is_seen, float("-inf"))
            attended = (scores.softmax(dim=-1) @ value.to(compute_dtype)).to(query.dtype)
        return attended.view(query.shape)


def _gather(
    cache: torch.Tensor,  # [num_slots, num_kv_heads, head_dim]
    slot: torch.Tensor,  # [rows, keys]
    scratch: torch.Tensor,  # [at least rows * keys, num_kv_heads, head_dim], overwritten
) -> torch.Tensor:  # [rows, num_kv_heads, keys, head_dim], a view of the scratch
    gathered = scratch[: slot.numel()]
    torch.index_select(cache, 0, slot.flatten(), out=gathered)
    return gathered.view(*slot.shape, *cache.shape[1:]).transpose(1, 2)
