"""Triton kernels of `kernels.random`."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# Triton's decorators and device functions carry no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def philox_words(seed, position, purpose):
    """Four uint32 words keyed by (seed int64, position int64, purpose), as RANDOM_SCHEME describes."""
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    zero = low * 0
    return tl.philox(seed, low, high, zero + purpose, zero)


@triton.jit
def uniform(high, low):
    """A float64 in [0, 1) from 53 bits of two uint32 words."""
    return ((high.to(tl.int64) << 21) | (low.to(tl.int64) >> 11)).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _random_words_kernel(
    seeds_ptr,  # [n] int64
    positions_ptr,  # [n] int64
    words_ptr,  # [n, 4] int64
    num_rows,
    PURPOSE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = rows < num_rows
    w0, w1, w2, w3 = philox_words(
        tl.load(seeds_ptr + rows, mask=mask, other=0), tl.load(positions_ptr + rows, mask=mask, other=0), PURPOSE
    )
    tl.store(words_ptr + rows * 4, w0.to(tl.int64), mask=mask)
    tl.store(words_ptr + rows * 4 + 1, w1.to(tl.int64), mask=mask)
    tl.store(words_ptr + rows * 4 + 2, w2.to(tl.int64), mask=mask)
    tl.store(words_ptr + rows * 4 + 3, w3.to(tl.int64), mask=mask)


def launch_random_words(
    seeds: torch.Tensor,  # [n] int64
    positions: torch.Tensor,  # [n] int64
    purpose: int,
) -> torch.Tensor:  # [n, 4] int64
    """`random_words` on the GPU."""
    words = torch.empty((seeds.shape[0], 4), dtype=torch.int64, device=seeds.device)
    block = 128
    grid = (triton.cdiv(seeds.shape[0], block),)
    if seeds.shape[0]:
        _random_words_kernel[grid](
            seeds.contiguous(), positions.contiguous(), words, seeds.shape[0], PURPOSE=purpose, BLOCK=block
        )
    return words
