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
):
    """Logits of a row as float32: the replaced ones where the row has them, NaN as -inf, +inf as the largest number.

    Columns outside the vocabulary read as -inf.
    """
    mask = (columns >= 0) & (columns < vocab_size)
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
def exponential_weights(logits, maximum, temperature):
    """int64 floor(2**40 * exp((logit - maximum) / temperature))."""
    return (tl.exp((logits - finite_or_zero(maximum)) / temperature) * 1099511627776.0).to(tl.int64)


@triton.jit
def choose(weights, noise):
    """The first index at which the cumulative int64 weight passes noise * total; 0 where the total is 0."""
    cumulative = tl.cumsum(weights, axis=0)
    total = tl.sum(weights, axis=0)
    target = tl.minimum((noise * total.to(tl.float64)).to(tl.int64), total - 1)
    return tl.sum((cumulative <= target).to(tl.int32), axis=0)
