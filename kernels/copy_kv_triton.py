"""The Triton kernel of `kernels.copy_kv`."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# Triton's decorators and device functions carry no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl

# A program holds about so many elements: all its loads are under way before the first store.
_NUM_ELEMENTS = 4096


def launch_copy_kv(
    caches: torch.Tensor,  # [..., num_blocks, block_size, num_kv_heads, head_dim], contiguous
    sources: torch.Tensor,  # [num_pairs] int64
    destinations: torch.Tensor,  # [num_pairs] int64
) -> None:
    """`copy_kv` on the GPU, in one launch: a program copies one slot of a few layers' keys or values."""
    num_pairs = sources.shape[0]
    num_slots, width = caches.shape[-4:-2].numel(), caches.shape[-2:].numel()
    num_caches = caches.shape[:-4].numel()
    if num_pairs == 0:
        return
    width_padded = triton.next_power_of_2(width)
    caches_each = max(1, min(triton.next_power_of_2(num_caches), _NUM_ELEMENTS // width_padded))
    _copy_kv_kernel[(num_pairs, triton.cdiv(num_caches, caches_each))](
        caches,
        sources,
        destinations,
        num_caches,
        num_slots,
        WIDTH=width,
        WIDTH_PADDED=width_padded,
        CACHES_EACH=caches_each,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_slots"])
def _copy_kv_kernel(
    caches_ptr,  # [num_caches, num_slots, WIDTH]
    sources_ptr,  # [num_pairs] int64
    destinations_ptr,  # [num_pairs] int64
    num_caches,
    num_slots,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    CACHES_EACH: tl.constexpr,
):
    pair = tl.program_id(0)
    source = tl.load(sources_ptr + pair)
    destination = tl.load(destinations_ptr + pair)
    if (source < 0) | (destination < 0):
        return
    cache = tl.program_id(1) * CACHES_EACH + tl.arange(0, CACHES_EACH)
    element = tl.arange(0, WIDTH_PADDED)
    is_copied = (cache < num_caches)[:, None] & (element < WIDTH)[None, :]
    # 64-bit: a large cache has more elements than 32 bits can count.
    first_slot = cache.to(tl.int64) * num_slots
    read = (first_slot + source)[:, None] * WIDTH + element[None, :]
    written = (first_slot + destination)[:, None] * WIDTH + element[None, :]
    tl.store(caches_ptr + written, tl.load(caches_ptr + read, mask=is_copied), mask=is_copied)
