"""Attention for transformers' models over a paged KV cache.

`register_attention` adds one function to transformers' attention interface. What it needs beyond the arguments that
every model passes (where this step's keys go, which blocks each sequence owns) travels through the model's forward as
the keyword argument `paged`, so that no state is global and two models can run in one process.

No mask is registered under this name: for such an implementation transformers builds none, and causality and sliding
windows come from the lengths of the batch and from the `sliding_window` that each layer passes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from kernels.node_keys import NodeKeys
from kernels.paged_attention import paged_attention
from kernels.store_kv import store_kv
from kernels.tree_attention import tree_attention

ATTENTION_NAME = "outrider_paged"


class UnsupportedAttentionError(Exception):
    """A layer asks for attention that the paged kernels do not compute."""


@dataclass(frozen=True)
class AttentionCall:
    """What one layer asks for, apart from the tensors."""

    layer_index: int
    scale: float
    sliding_window: int | None
    softcap: float | None


class PagedAttention(Protocol):
    """What the model's forward carries as `paged`: computes or records the attention of each layer."""

    def attend(
        self,
        call: AttentionCall,
        query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
        key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        value: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    ) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
        ...


@dataclass(frozen=True)
class _StoredAttention(ABC):
    """Attention of one step: stores the step's keys and values in the cache, then attends over the cache."""

    key_caches: tuple[torch.Tensor, ...]  # a layer each: [num_blocks, block_size, num_kv_heads, head_dim]
    value_caches: tuple[torch.Tensor, ...]  # as key_caches
    slot_mapping: torch.Tensor  # [num_tokens] int64

    def attend(
        self, call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
        store_kv(key, value, *self.cache_slots(call.layer_index))
        return self.attend_stored(call, query)

    def cache_slots(self, layer_index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A layer's key cache and value cache, and the slot of each token, for a kernel that stores by itself."""
        return self.key_caches[layer_index], self.value_caches[layer_index], self.slot_mapping

    @abstractmethod
    def attend_stored(
        self, call: AttentionCall, query: torch.Tensor
    ) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
        """Attention over the cache, which the kernel directly before has put the step's keys and values into."""


@dataclass(frozen=True)
class CachedAttention(_StoredAttention):
    """Tokens that stand one behind another: each sees all before it."""

    cu_query_lens: torch.Tensor  # [batch + 1] int32
    context_lens: torch.Tensor  # [batch] int32
    block_tables: torch.Tensor  # [batch, max_blocks] int32
    max_query_len: int

    def attend_stored(
        self, call: AttentionCall, query: torch.Tensor
    ) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
        return paged_attention(
            query,
            self.key_caches[call.layer_index],
            self.value_caches[call.layer_index],
            self.cu_query_lens,
            self.context_lens,
            self.block_tables,
            scale=call.scale,
            max_query_len=self.max_query_len,
            sliding_window=call.sliding_window,
            softcap=call.softcap,
            is_after_store=True,
        )


@dataclass(frozen=True)
class TreeAttention(_StoredAttention):
    """Nodes of trees: each sees its sequence's prefix and its own ancestors."""

    prefix_lens: torch.Tensor  # [batch] int32
    block_tables: torch.Tensor  # [batch, max_blocks] int32
    node_keys: NodeKeys
    positions: torch.Tensor  # [num_tokens] int64

    def attend_stored(
        self, call: AttentionCall, query: torch.Tensor
    ) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
        return tree_attention(
            query,
            self.key_caches[call.layer_index],
            self.value_caches[call.layer_index],
            self.prefix_lens,
            self.block_tables,
            self.node_keys,
            self.positions,
            scale=call.scale,
            sliding_window=call.sliding_window,
            softcap=call.softcap,
            is_after_store=True,
        )


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, num_heads, num_tokens, head_dim]
    key: torch.Tensor,  # [1, num_kv_heads, num_tokens, head_dim]
    value: torch.Tensor,  # [1, num_kv_heads, num_tokens, head_dim]
    attention_mask: torch.Tensor | None,
    *,
    paged: PagedAttention | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:  # [1, num_tokens, num_heads, head_dim]
    """Attention with the signature of transformers' attention interface.

    Raises UnsupportedAttentionError for what would otherwise be left out in silence.
    """
    layer = type(module).__name__
    if paged is None:
        raise UnsupportedAttentionError(f"{layer} does not receive the `paged` argument of the model's forward")
    if attention_mask is not None:
        raise UnsupportedAttentionError(f"{layer} brings an attention mask of its own")
    if is_causal is False or not getattr(module, "is_causal", True):
        raise UnsupportedAttentionError(f"{layer} is not causal")
    for name, meaning in (("s_aux", "attention sinks"), ("position_bias", "a position bias")):
        if options.get(name) is not None:
            raise UnsupportedAttentionError(f"{layer} uses {meaning} (`{name}`)")
    layer_index = getattr(module, "layer_idx", None)
    if layer_index is None:
        raise UnsupportedAttentionError(f"{layer} does not tell its layer (`layer_idx`)")

    call = AttentionCall(
        layer_index=layer_index,
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        sliding_window=sliding_window,
        softcap=softcap,
    )
    attended = paged.attend(call, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1))
    return attended.unsqueeze(0), None


def register_attention() -> None:
    """Make `attn_implementation=ATTENTION_NAME` known to transformers; calling it again changes nothing."""
    # Here and not above: a foreign package called `kernels` breaks this import, and model_loader looks for it first.
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, attention_forward)
