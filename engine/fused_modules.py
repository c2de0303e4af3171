"""What stands in for a transformer's modules after fusion: fewer and larger operations over the same weights.

Each class here is a forward pass for a module of transformers, called as that module is. They keep no state between
calls, never wait for the device and have no shapes that depend on data, so that a CUDA graph can hold them. Weights are
used as they are: nothing here follows a later `model.to(...)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

import torch
import torch.nn.functional as F

from engine.attention import AttentionCall, PagedAttention, UnsupportedAttentionError
from kernels.rms_norm import NormParameters, add_rms_norm, rms_norm
from kernels.rotary import HeadNorms, rotary, rotary_cos_sin, rotary_store_kv
from kernels.silu_mul import Activation, act_mul


class StoredAttention(PagedAttention, Protocol):
    """What `paged` offers so that the rotation of the keys can write them to the cache itself.

    Without these two methods keys and values are handed to `attend`, which costs one more pass over them.
    """

    def cache_slots(
        self, layer_index: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # key cache, value cache, slot mapping [num_tokens]
        """Where the keys and values of this step go, as `kernels.store_kv` takes it."""
        ...

    def attend_stored(
        self,
        call: AttentionCall,
        query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    ) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
        """`attend` for a step whose keys and values are in the cache already."""
        ...


@dataclass(frozen=True)
class PackedLinear:
    """Several linear layers of one input as a single product; their outputs stand one after another in each row."""

    weight: torch.Tensor  # [sum of out_features, in_features]
    bias: torch.Tensor | None  # [sum of out_features]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:  # [num_tokens, sum of out_features]
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class FusedNorm:
    """An RMSNorm by itself."""

    parameters: NormParameters

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:  # [..., size], as hidden_states
        return rms_norm(hidden_states, self.parameters)


@dataclass(frozen=True)
class FusedAttention:
    """Attention with rotary embedding: one projection, one kernel up to the cache, attention, the output projection."""

    qkv_proj: PackedLinear
    o_proj: torch.nn.Linear
    norms: HeadNorms | None
    num_heads: int
    num_kv_heads: int
    call: AttentionCall

    def __call__(
        self,
        hidden_states: torch.Tensor,  # [1, num_tokens, hidden_size]
        position_embeddings: tuple[torch.Tensor, torch.Tensor],  # cos and sin, [1, num_tokens, rotary_dim]
        attention_mask: torch.Tensor | None = None,
        past_key_values: object = None,
        *,
        paged: PagedAttention | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:  # [1, num_tokens, hidden_size]
        """As transformers' attention modules. Raises UnsupportedAttentionError for a mask or a cache of its own."""
        paged = _checked(paged, attention_mask, past_key_values)
        attended = self.attend(hidden_states.flatten(0, 1), position_embeddings, paged)
        return attended.view(*hidden_states.shape[:-1], -1), None

    def attend(
        self,
        rows: torch.Tensor,  # [num_tokens, hidden_size]
        position_embeddings: tuple[torch.Tensor, torch.Tensor],  # [1, num_tokens, rotary_dim]
        paged: PagedAttention,
    ) -> torch.Tensor:  # [num_tokens, hidden_size]
        cos, sin = (table.flatten(0, 1) for table in position_embeddings)
        qkv = self.qkv_proj(rows)
        if _stores(paged):
            slots = paged.cache_slots(self.call.layer_index)
            query = rotary_store_kv(qkv, cos, sin, *slots, num_heads=self.num_heads, norms=self.norms)
            attended = paged.attend_stored(self.call, query)
        else:
            heads = rotary(qkv, cos, sin, num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, norms=self.norms)
            attended = paged.attend(self.call, heads.query, heads.key, heads.value)
        projected: torch.Tensor = self.o_proj(attended.flatten(1))
        return projected


@dataclass(frozen=True)
class FusedMLP:
    """A gated MLP: gate and up in one projection, activation and product in one kernel."""

    gate_up_proj: PackedLinear
    down_proj: torch.nn.Linear
    activation: Activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:  # [..., hidden_size], as x
        down: torch.Tensor = self.down_proj(self.inner(x.flatten(0, -2)))
        return down.view_as(x)

    def inner(self, rows: torch.Tensor) -> torch.Tensor:  # [num_tokens, intermediate_size]
        """Everything before the down projection."""
        return act_mul(self.gate_up_proj(rows), self.activation)


@dataclass(frozen=True)
class FusedLayer:
    """A decoder layer: x + attention(x), then y + mlp(y), with norms on any side of both.

    A norm joins the addition before or after it. Where nothing follows the MLP, the down projection adds onto the
    residual stream itself.
    """

    attention: FusedAttention
    mlp: FusedMLP
    attention_norm: NormParameters | None  # of attention's input
    attended_norm: NormParameters | None  # of attention's output, before it is added
    mlp_norm: NormParameters | None  # of the MLP's input
    output_norm: NormParameters | None  # of the MLP's output, before it is added

    def __call__(
        self,
        hidden_states: torch.Tensor,  # [1, num_tokens, hidden_size]; not changed
        attention_mask: torch.Tensor | None = None,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],  # [1, num_tokens, rotary_dim]
        past_key_values: object = None,
        paged: PagedAttention | None = None,
        **_: Any,
    ) -> torch.Tensor:  # [1, num_tokens, hidden_size]
        """As transformers' decoder layers. Raises UnsupportedAttentionError for a mask or a cache of its own."""
        paged = _checked(paged, attention_mask, past_key_values)
        residual = hidden_states.flatten(0, 1)
        rows = residual if self.attention_norm is None else rms_norm(residual, self.attention_norm)
        attended = self.attention.attend(rows, position_embeddings, paged)
        residual, rows = add_rms_norm(attended, residual, output_norm=self.attended_norm, next_norm=self.mlp_norm)
        inner = self.mlp.inner(rows)
        down = self.mlp.down_proj
        if self.output_norm is None and down.bias is None:
            # In place: the sum was made here and nobody else holds it.
            residual.addmm_(inner, down.weight.t())
        else:
            residual = add_rms_norm(down(inner), residual, output_norm=self.output_norm, next_norm=None).added
        return residual.view_as(hidden_states)


@dataclass(frozen=True)
class FusedRotaryEmbedding:
    """cos and sin of a step's positions in one kernel."""

    tables: dict[str | None, tuple[torch.Tensor, float]]  # by type of layer: frequencies [rotary_dim // 2] and scale

    def __call__(
        self,
        x: torch.Tensor,  # only its type matters
        position_ids: torch.Tensor,  # [1, num_tokens] int64
        layer_type: str | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # both [1, num_tokens, rotary_dim] in the type of x
        frequencies, scale = self.tables[layer_type]
        cos, sin = rotary_cos_sin(position_ids.flatten(), frequencies, scale=scale, dtype=x.dtype)
        return cos.view(*position_ids.shape, -1), sin.view(*position_ids.shape, -1)


def _checked(
    paged: PagedAttention | None, attention_mask: torch.Tensor | None, past_key_values: object
) -> PagedAttention:
    if paged is None:
        raise UnsupportedAttentionError("a fused layer does not receive the `paged` argument of the model's forward")
    if attention_mask is not None:
        raise UnsupportedAttentionError("a fused layer receives an attention mask")
    if past_key_values is not None:
        raise UnsupportedAttentionError("a fused layer receives a cache of transformers (`past_key_values`)")
    return paged


def _stores(paged: PagedAttention) -> TypeGuard[StoredAttention]:
    return hasattr(paged, "attend_stored")
