"""Triton kernels of `kernels.random`."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# Triton's decorators and device functions carry no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.random import Purpose

_TARGET = tl.constexpr(int(Purpose.TARGET))
# What Triton's own log2 compiles to takes three times as many instructions as all the rest of a token's noise; the
# interpreter knows no assembly.
_HAS_ASSEMBLY = tl.constexpr(not triton.knobs.runtime.interpret)


@triton.jit
def philox_words(seed, position, purpose, place):
    """Four uint32 words keyed by (seed int64, position int64, purpose, place), as RANDOM_SCHEME describes."""
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    return tl.philox(seed, low, high, low * 0 + purpose, low * 0 + place)


@triton.jit
def uniform(high, low):
    """A float64 in [0, 1) from 53 bits of two uint32 words."""
    return ((high.to(tl.int64) << 21) | (low.to(tl.int64) >> 11)).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def log2_of_four_exponentials(seed, position, fours):
    """log2(E) of TARGET noise [n, 4] of the tokens 4 * fours [n] int32 to 4 * fours + 3."""
    w0, w1, w2, w3 = philox_words(seed, position, _TARGET, fours.to(tl.uint32))
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    return _log2_exponentials(tl.reshape(words, [fours.shape[0], 4]))


@triton.jit
def log2_of_exponentials(seed, position, token_ids):
    """log2(E) of TARGET noise of single tokens, int32 and not negative."""
    w0, w1, w2, w3 = philox_words(seed, position, _TARGET, (token_ids // 4).to(tl.uint32))
    is_odd = token_ids % 2 == 1
    word = tl.where(token_ids % 4 < 2, tl.where(is_odd, w1, w0), tl.where(is_odd, w3, w2))
    return _log2_exponentials(word)


@triton.jit
def _log2_exponentials(words):
    """log2(-log1p(-x)) of x = (word + 1/2) / 2**32.

    The inner logarithm is a polynomial below 1/8, where rounding 1 - x would lose the small ones, right to 2**-20 of E
    everywhere. The factor is a little less than 2**-32, so that no x becomes 1.
    """
    x = words.to(tl.float32) * 2.3283062977608182e-10 + 1.1641532182693481e-10
    series = ((0.30819099 * x + 0.32857725) * x + 0.50012104) * x + 0.99999953
    return _log2(tl.where(x < 0.125, series * x, _log2(1.0 - x) * -0.6931471805599453))


@triton.jit
def _log2(x):
    """log2 to 2**-22, of normal numbers: the GPU's own, one instruction."""
    if _HAS_ASSEMBLY:
        logarithm = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        logarithm = tl.log2(x)
    return logarithm


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
        tl.load(seeds_ptr + rows, mask=mask, other=0), tl.load(positions_ptr + rows, mask=mask, other=0), PURPOSE, 0
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
