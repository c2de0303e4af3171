"""The Triton kernels of `kernels.rotary`."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# Triton's decorators and device functions carry no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.dependent_launch import has_dependent_launch
from kernels.rotary import HeadNorms

# A program takes as many heads as have so many pairs: four of them a thread, two loads of 8 bytes in 16-bit types.
_PAIRS_PER_PROGRAM = 512
_NUM_WARPS = 4


def launch_rotary(
    qkv: torch.Tensor,  # [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], dense rows
    cos: torch.Tensor,  # [num_tokens, rotary_dim], dense rows
    sin: torch.Tensor,  # as cos
    keys: torch.Tensor,  # [..., num_kv_heads, head_dim] contiguous: slots of a cache, or one for each token
    values: torch.Tensor,  # as keys
    slot_mapping: torch.Tensor | None,  # [num_tokens] int64; None: token i has slot i
    num_heads: int,
    norms: HeadNorms | None,
) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
    """Rotated queries; keys and values go to their slots. A program takes some heads of one token."""
    num_tokens = qkv.shape[0]
    num_kv_heads, head_dim = keys.shape[-2:]
    query = torch.empty(num_tokens, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    if num_tokens == 0:
        return query
    is_following = has_dependent_launch(qkv.device)
    rotary_dim = cos.shape[1]
    num_pairs = max(1, triton.next_power_of_2(rotary_dim // 2))
    heads_per_program = max(1, _PAIRS_PER_PROGRAM // num_pairs)
    _rotary_kernel[(num_tokens, triton.cdiv(num_heads + 2 * num_kv_heads, heads_per_program))](
        query,
        keys,
        values,
        qkv,
        cos,
        sin,
        None if norms is None else norms.query.weight,
        None if norms is None else norms.key.weight,
        slot_mapping,
        qkv.stride(0),
        cos.stride(0),
        sin.stride(0),
        0.0 if norms is None else norms.query.eps,
        0.0 if norms is None else norms.key.eps,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        ROTARY_DIM=rotary_dim,
        PAIRS=num_pairs,
        REST=triton.next_power_of_2(head_dim - rotary_dim) if rotary_dim < head_dim else 0,
        HEADS=heads_per_program,
        IS_FOLLOWING=is_following,
        num_warps=_NUM_WARPS,
        launch_pdl=is_following,
    )
    return query


def launch_cos_sin(
    positions: torch.Tensor,  # [num_tokens] int64
    frequencies: torch.Tensor,  # [rotary_dim // 2] float32
    scale: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:  # both [num_tokens, rotary_dim]
    """`rotary_cos_sin` on the GPU, one warp a token."""
    num_tokens, half = positions.shape[0], frequencies.shape[0]
    cos = torch.empty(num_tokens, 2 * half, dtype=dtype, device=positions.device)
    sin = torch.empty_like(cos)
    if cos.numel():
        _cos_sin_kernel[(num_tokens,)](
            cos,
            sin,
            positions.contiguous(),
            frequencies.contiguous(),
            scale,
            HALF=half,
            PAIRS=triton.next_power_of_2(half),
            num_warps=1,
        )
    return cos, sin


@triton.jit
def _rotary_kernel(
    query_ptr,  # [num_tokens, NUM_HEADS, HEAD_DIM] contiguous
    key_ptr,  # [num_slots, NUM_KV_HEADS, HEAD_DIM] contiguous
    value_ptr,  # as key
    qkv_ptr,  # [num_tokens, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM], dense rows
    cos_ptr,  # [num_tokens, ROTARY_DIM], dense rows
    sin_ptr,  # as cos
    query_weight_ptr,  # [HEAD_DIM], or None: no norms
    key_weight_ptr,  # as query_weight
    slot_mapping_ptr,  # [num_tokens] int64, or None: token i has slot i
    qkv_stride,
    cos_stride,
    sin_stride,
    query_eps,
    key_eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
    HEADS: tl.constexpr,
    IS_FOLLOWING: tl.constexpr,
):
    HALF: tl.constexpr = ROTARY_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)  # query heads, then key heads, then value heads
    is_query = head < NUM_HEADS
    is_key = (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS)
    is_value = (head >= NUM_HEADS + NUM_KV_HEADS) & (head < NUM_HEADS + 2 * NUM_KV_HEADS)
    if IS_FOLLOWING:
        gdc_wait()
        gdc_launch_dependents()
    slot = token
    if slot_mapping_ptr is not None:
        slot = tl.load(slot_mapping_ptr + token)

    pair = tl.arange(0, PAIRS)
    is_pair = pair < HALF
    is_element = (is_query | is_key | is_value)[:, None] & is_pair[None, :]
    source = qkv_ptr + token * qkv_stride + head[:, None] * HEAD_DIM
    first = tl.load(source + pair[None, :], mask=is_element, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + pair[None, :], mask=is_element, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + token * cos_stride + pair, mask=is_pair, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * sin_stride + pair, mask=is_pair, other=0.0).to(tl.float32)
    if REST:
        other_dim = ROTARY_DIM + tl.arange(0, REST)
        is_rest = (is_query | is_key | is_value)[:, None] & (other_dim < HEAD_DIM)[None, :]
        rest = tl.load(source + other_dim[None, :], mask=is_rest, other=0.0).to(tl.float32)

    if query_weight_ptr is not None:
        squares = tl.sum(first * first + second * second, axis=1)
        if REST:
            squares += tl.sum(rest * rest, axis=1)
        factor = tl.rsqrt(squares / HEAD_DIM + tl.where(is_query, query_eps, key_eps))
        first *= _head_factors(factor, query_weight_ptr, key_weight_ptr, pair, is_pair, is_query, is_key)
        second *= _head_factors(factor, query_weight_ptr, key_weight_ptr, HALF + pair, is_pair, is_query, is_key)
        if REST:
            rest *= _head_factors(
                factor, query_weight_ptr, key_weight_ptr, other_dim, other_dim < HEAD_DIM, is_query, is_key
            )

    is_rotated = (is_query | is_key)[:, None]
    rotated_first = tl.where(is_rotated, first * cos[None, :] - second * sin[None, :], first)
    rotated_second = tl.where(is_rotated, second * cos[None, :] + first * sin[None, :], second)

    is_stored = slot >= 0
    query = query_ptr + (token * NUM_HEADS + head[:, None]) * HEAD_DIM
    key = key_ptr + (slot * NUM_KV_HEADS + head[:, None] - NUM_HEADS) * HEAD_DIM
    value = value_ptr + (slot * NUM_KV_HEADS + head[:, None] - NUM_HEADS - NUM_KV_HEADS) * HEAD_DIM
    is_query_element = is_query[:, None] & is_pair[None, :]
    is_key_element = (is_key & is_stored)[:, None] & is_pair[None, :]
    is_value_element = (is_value & is_stored)[:, None] & is_pair[None, :]
    tl.store(query + pair[None, :], rotated_first, mask=is_query_element)
    tl.store(query + HALF + pair[None, :], rotated_second, mask=is_query_element)
    tl.store(key + pair[None, :], rotated_first, mask=is_key_element)
    tl.store(key + HALF + pair[None, :], rotated_second, mask=is_key_element)
    tl.store(value + pair[None, :], rotated_first, mask=is_value_element)
    tl.store(value + HALF + pair[None, :], rotated_second, mask=is_value_element)
    if REST:
        is_rest_dim = (other_dim < HEAD_DIM)[None, :]
        tl.store(query + other_dim[None, :], rest, mask=is_query[:, None] & is_rest_dim)
        tl.store(key + other_dim[None, :], rest, mask=(is_key & is_stored)[:, None] & is_rest_dim)
        tl.store(value + other_dim[None, :], rest, mask=(is_value & is_stored)[:, None] & is_rest_dim)


@triton.jit
def _head_factors(factor, query_weight_ptr, key_weight_ptr, dim, is_dim, is_query, is_key):
    """What the norm multiplies each element of each head with, [heads, dims]; 1 for values."""
    query_weight = tl.load(query_weight_ptr + dim, mask=is_dim, other=0.0).to(tl.float32)
    key_weight = tl.load(key_weight_ptr + dim, mask=is_dim, other=0.0).to(tl.float32)
    weight = tl.where(is_query[:, None], query_weight[None, :], key_weight[None, :])
    return tl.where((is_query | is_key)[:, None], factor[:, None] * weight, 1.0)


@triton.jit
def _cos_sin_kernel(
    cos_ptr,  # [num_tokens, 2 * HALF] contiguous
    sin_ptr,  # as cos
    positions_ptr,  # [num_tokens] int64
    frequencies_ptr,  # [HALF] float32
    scale,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, PAIRS)
    is_pair = pair < HALF
    angle = tl.load(positions_ptr + token).to(tl.float32) * tl.load(frequencies_ptr + pair, mask=is_pair, other=0.0)
    cos = tl.cos(angle) * scale
    sin = tl.sin(angle) * scale
    destination = token * (2 * HALF) + pair
    tl.store(cos_ptr + destination, cos, mask=is_pair)
    tl.store(cos_ptr + destination + HALF, cos, mask=is_pair)
    tl.store(sin_ptr + destination, sin, mask=is_pair)
    tl.store(sin_ptr + destination + HALF, sin, mask=is_pair)
