"""Rotary position embedding, fused with what stands around it: norms of queries and keys, and the cache write.

RoPE (Su et al., arXiv 2104.09864) in the layout of transformers: element i of a head and element i + rotary_dim / 2 are
one pair, and elements from rotary_dim on are left as they are. Everything is computed in float32 and rounded once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.arguments import FLOAT_DTYPES, check_tensor
from kernels.dispatch import runs_triton
from kernels.rms_norm import NormParameters, rms_norm_reference
from kernels.store_kv import store_kv_reference


class HeadNorms(NamedTuple):
    """RMSNorms over each head of the queries and of the keys, before they are rotated."""

    query: NormParameters  # weight [head_dim]
    key: NormParameters  # weight [head_dim]


class RotatedHeads(NamedTuple):
    """Queries and keys after the rotation, and the values, each contiguous."""

    query: torch.Tensor  # [num_tokens, num_heads, head_dim]
    key: torch.Tensor  # [num_tokens, num_kv_heads, head_dim]
    value: torch.Tensor  # [num_tokens, num_kv_heads, head_dim]


def rotary(
    qkv: torch.Tensor,  # [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], dense rows: queries, keys, values
    cos: torch.Tensor,  # [num_tokens, rotary_dim], dense rows; the second half of a row repeats the first
    sin: torch.Tensor,  # as cos
    *,
    num_heads: int,
    num_kv_heads: int,
    norms: HeadNorms | None = None,
) -> RotatedHeads:
    """Cut a fused projection into heads, normalise and rotate queries and keys.

    Raises ValueError when shapes or types do not fit. Runs a Triton kernel on CUDA tensors and plain torch on others.
    """
    head_dim = qkv.shape[-1] // (num_heads + 2 * num_kv_heads)
    _check(qkv, cos, sin, num_heads, num_kv_heads, head_dim, norms)
    if runs_triton(qkv):
        from kernels.rotary_triton import launch_rotary

        key = torch.empty(qkv.shape[0], num_kv_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
        value = torch.empty_like(key)
        return RotatedHeads(launch_rotary(qkv, cos, sin, key, value, None, num_heads, norms), key, value)
    return rotary_reference(qkv, cos, sin, num_heads=num_heads, num_kv_heads=num_kv_heads, norms=norms)


def rotary_store_kv(
    qkv: torch.Tensor,  # [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], as for `rotary`
    cos: torch.Tensor,  # [num_tokens, rotary_dim], as for `rotary`
    sin: torch.Tensor,  # as cos
    key_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim], contiguous
    value_cache: torch.Tensor,  # as key_cache
    slot_mapping: torch.Tensor,  # [num_tokens] int64: block * block_size + offset, -1 for a token not to be stored
    *,
    num_heads: int,
    norms: HeadNorms | None = None,
) -> torch.Tensor:  # [num_tokens, num_heads, head_dim], contiguous: the rotated queries
    """`rotary`, with keys and values written to their slots of the caches, in place, instead of returned.

    Two tokens must not share a slot. Raises ValueError when shapes or types do not fit. Runs a Triton kernel on CUDA
    tensors and plain torch on others.
    """
    num_kv_heads, head_dim = key_cache.shape[2:]
    _check(qkv, cos, sin, num_heads, num_kv_heads, head_dim, norms)
    check_tensor("key_cache", key_cache, (None, None, None, None), (qkv.dtype,), qkv.device)
    check_tensor("value_cache", value_cache, key_cache.shape, (qkv.dtype,), qkv.device)
    check_tensor("slot_mapping", slot_mapping, (qkv.shape[0],), (torch.int64,), qkv.device)
    if runs_triton(qkv):
        from kernels.rotary_triton import launch_rotary

        return launch_rotary(qkv, cos, sin, key_cache, value_cache, slot_mapping, num_heads, norms)
    rotated = rotary_reference(qkv, cos, sin, num_heads=num_heads, num_kv_heads=num_kv_heads, norms=norms)
    store_kv_reference(rotated.key, rotated.value, key_cache, value_cache, slot_mapping)
    return rotated.query


def rotary_cos_sin(
    positions: torch.Tensor,  # [num_tokens] int64
    frequencies: torch.Tensor,  # [rotary_dim // 2] float32, radians a position
    *,
    scale: float,  # multiplies both results
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:  # both [num_tokens, rotary_dim] in `dtype`
    """cos and sin of each position's angles, each row twice over, as `rotary` takes them.

    Raises ValueError when shapes or types do not fit. Runs a Triton kernel on CUDA tensors and plain torch on others.
    """
    check_tensor("positions", positions, (None,), (torch.int64,), positions.device)
    check_tensor("frequencies", frequencies, (None,), (torch.float32,), positions.device)
    if runs_triton(positions):
        from kernels.rotary_triton import launch_cos_sin

        return launch_cos_sin(positions, frequencies, scale, dtype)
    return rotary_cos_sin_reference(positions, frequencies, scale=scale, dtype=dtype)


def rotary_reference(
    qkv: torch.Tensor,  # [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]
    cos: torch.Tensor,  # [num_tokens, rotary_dim]
    sin: torch.Tensor,  # [num_tokens, rotary_dim]
    *,
    num_heads: int,
    num_kv_heads: int,
    norms: HeadNorms | None = None,
) -> RotatedHeads:
    """`rotary` in plain torch."""
    num_all = num_heads + 2 * num_kv_heads
    heads = qkv.view(qkv.shape[0], num_all, qkv.shape[1] // num_all)
    query, key, value = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    wide_dtype = torch.promote_types(qkv.dtype, torch.float32)
    wide_query, wide_key = query.to(wide_dtype), key.to(wide_dtype)
    if norms is not None:
        wide_query = rms_norm_reference(wide_query, norms.query)
        wide_key = rms_norm_reference(wide_key, norms.key)
    return RotatedHeads(
        _rotated(wide_query, cos, sin).to(qkv.dtype), _rotated(wide_key, cos, sin).to(qkv.dtype), value.contiguous()
    )


def rotary_cos_sin_reference(
    positions: torch.Tensor,  # [num_tokens] int64
    frequencies: torch.Tensor,  # [rotary_dim // 2] float32
    *,
    scale: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:  # both [num_tokens, rotary_dim]
    """`rotary_cos_sin` in plain torch."""
    angles = (positions.float().unsqueeze(1) * frequencies).repeat(1, 2)
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


def _rotated(
    heads: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    cos: torch.Tensor,  # [num_tokens, rotary_dim]
    sin: torch.Tensor,  # [num_tokens, rotary_dim]
) -> torch.Tensor:  # as heads
    half = cos.shape[1] // 2
    cos, sin = cos[:, None, :half], sin[:, None, :half]
    first, second, rest = torch.split(heads, [half, half, heads.shape[2] - 2 * half], dim=2)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=2)


def _check(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    norms: HeadNorms | None,
) -> None:
    width = (num_heads + 2 * num_kv_heads) * head_dim
    check_tensor("qkv", qkv, (None, width), FLOAT_DTYPES, qkv.device)
    check_tensor("cos", cos, (qkv.shape[0], None), FLOAT_DTYPES, qkv.device)
    check_tensor("sin", sin, cos.shape, FLOAT_DTYPES, qkv.device)
    if cos.shape[1] % 2 or cos.shape[1] > head_dim:
        raise ValueError(f"cos has {cos.shape[1]} columns, expected an even number up to the head's {head_dim}")
    if norms is not None:
        check_tensor("norms.query.weight", norms.query.weight, (head_dim,), FLOAT_DTYPES, qkv.device)
        check_tensor("norms.key.weight", norms.key.weight, (head_dim,), FLOAT_DTYPES, qkv.device)
