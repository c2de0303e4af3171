"""Device functions of `kernels.integer_weights` that the sampling kernels share."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# Triton's decorators and device functions carry no types.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_logits(
    row,
    columns,  # a block of column indices, or one
    logits_ptr,  # [num_rows, vocab_size]
    logits_stride,
    replacements_ptr,  # [num_replaced, vocab_size] float32, or None
    replacement_rows_ptr,  # [num_rows] int32, or None
    vocab_size,
    is_wanted=True,  # the others are not read
):
    """Logits of a row as float32: the replaced ones where the row has them, NaN as -inf, +inf as the largest number.

    What is not wanted or outside the vocabulary reads as -inf.
    """
    mask = (columns >= 0) & (columns < vocab_size) & is_wanted
    if replacements_ptr is not None:
        replacement = tl.load(replacement_rows_ptr + row).to(tl.int64)
        # Only one of the two loads lets anything through, so no memory is read twice.
        raw_end = tl.where(replacement < 0, vocab_size, 0)
        raw = tl.load(logits_ptr + row * logits_stride + columns, mask=mask & (columns < raw_end), other=float("-inf"))
        replaced = tl.load(
            replacements_ptr + replacement * vocab_size + columns,
            mask=mask & (columns >= raw_end),
            other=float("-inf"),
        )
        values = tl.where(replacement < 0, raw.to(tl.float32), replaced)
    else:
        values = tl.load(logits_ptr + row * logits_stride + columns, mask=mask, other=float("-inf")).to(tl.float32)
    values = tl.where(values == values, values, float("-inf"))
    return tl.minimum(values, 3.4028234663852886e38)


@triton.jit
def finite_or_zero(maximum):
    """A maximum that may be subtracted: -inf, of which nothing above it is left, becomes 0."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def weight_parts(logits, maximum, temperature):
    """round(2**40 * exp((logit - maximum) / temperature)) as int32 parts, coarse * 2**20 + fine.

    Adding a number whose last bit is the wanted unit rounds to that unit, and the multiple can be read from the sum's
    bits. Conversion to 64 bits takes the unit that exp needs too and would bound the pass over all logits.
    """
    # A division for each logit would cost more than all the rest.
    exponentials = tl.exp2((logits - finite_or_zero(maximum)) * (1.4426950408889634 / temperature))
    coarse = exponentials + 12.0  # in units of 2**-20
    fine = exponentials - (coarse - 12.0) + 1.1444091796875e-05  # 1.5 * 2**-17, in units of 2**-40
    return coarse.to(tl.int32, bitcast=True) - 0x41400000, fine.to(tl.int32, bitcast=True) - 0x37400000


@triton.jit
def exponential_weights(logits, maximum, temperature):
    """int64 round(2**40 * exp((logit - maximum) / temperature))."""
    coarse, fine = weight_parts(logits, maximum, temperature)
    return (coarse.to(tl.int64) << 20) + fine


@triton.jit
def weight_of(logits, maximum, temperature):
    """int64 weight of a tile [n, m] of logits, m small."""
    coarse, fine = weight_parts(logits, maximum, temperature)
    # 32 bits hold the parts' sums within a thread.
    return tl.sum((tl.sum(coarse, axis=1).to(tl.int64) << 20) + tl.sum(fine, axis=1), axis=0)
