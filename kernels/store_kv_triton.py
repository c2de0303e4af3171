"""The Triton kernel of `kernels.store_kv`."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# Triton's decorators and device functions carry no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl


def launch_store_kv(
    key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    value: torch.Tensor,  # as key
    key_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim], contiguous
    value_cache: torch.Tensor,  # as key_cache
    slot_mapping: torch.Tensor,  # [num_tokens] int64
) -> None:
    """`store_kv` on the GPU, one program a token."""
    num_tokens, num_kv_heads, head_dim = key.shape
    if num_tokens == 0:
        return
    _store_kv_kernel[(num_tokens,)](
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK=triton.next_power_of_2(num_kv_heads * head_dim),
        num_warps=4,
    )


@triton.jit
def _store_kv_kernel(
    key_ptr,  # [num_tokens, num_kv_heads, head_dim], strided
    value_ptr,  # as key, with strides of its own
    key_cache_ptr,  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_cache_ptr,  # as key_cache
    slot_mapping_ptr,  # [num_tokens] int64
    key_stride_token,
    key_stride_head,
    value_stride_token,
    value_stride_head,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    element = tl.arange(0, BLOCK)
    is_stored = element < tl.where(slot >= 0, NUM_KV_HEADS * HEAD_DIM, 0)
    head = element // HEAD_DIM
    dim = element % HEAD_DIM
    key = tl.load(key_ptr + token * key_stride_token + head * key_stride_head + dim, mask=is_stored)
    value = tl.load(value_ptr + token * value_stride_token + head * value_stride_head + dim, mask=is_stored)
    # slot is 64-bit: a large cache has more elements than 32 bits can count.
    destination = slot * (NUM_KV_HEADS * HEAD_DIM) + element
    tl.store(key_cache_ptr + destination, key, mask=is_stored)
    tl.store(value_cache_ptr + destination, value, mask=is_stored)
