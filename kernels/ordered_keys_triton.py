"""Device functions that find the largest among many logits by counting, on integer keys of the logits' order."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# Triton's decorators and device functions carry no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl

ABSENT = tl.constexpr(-(2**31))
"""Below every key: stands where there is no logit."""

KEY_OF_MINUS_INFINITY = tl.constexpr(-2139095041)
"""Of 32 bits; the leading ones where keys have fewer."""

# Leading bits in which two logits of a type can differ once they are float32; the rest follow from the sign.
_KEY_BITS = {torch.float32: 32, torch.float16: 20, torch.bfloat16: 16}


def key_bits(logits: torch.Tensor, replacements: torch.Tensor | None) -> int:
    """Bits that the keys of these logits need; penalised rows are float32."""
    return _KEY_BITS[logits.dtype] if replacements is None else 32


@triton.jit
def ordered_keys(values, KEY_BITS: tl.constexpr):
    """int32 keys in the order of the float32 values. Both zeros have one key."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> (32 - KEY_BITS)


@triton.jit
def value_of_key(key, KEY_BITS: tl.constexpr):
    """The float32 value of a key."""
    LOW_BITS: tl.constexpr = (1 << (32 - KEY_BITS)) - 1
    bits = key << (32 - KEY_BITS)
    # A negative number's key is the complement of its bits, and the bits that it lacks are ones.
    bits = tl.where(key < 0, bits ^ (0x7FFFFFFF - LOW_BITS), bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def key_of_rank(keys, rank):
    """The rank-th largest of the keys, from 1; there must be as many that are not absent."""
    low = tl.min(tl.where(keys == ABSENT, 2147483647, keys), axis=0).to(tl.int64)
    high = tl.max(keys, axis=0).to(tl.int64)
    while low < high:
        middle = (low + high + 1) >> 1
        if tl.sum((keys >= middle.to(tl.int32)).to(tl.int32), axis=0) >= rank:
            low = middle
        else:
            high = middle - 1
    return low.to(tl.int32)


@triton.jit
def places_of_largest(keys, rank):
    """Which keys are the `rank` largest, the first among equals, and a place for each of them, in order."""
    bound = key_of_rank(keys, rank)
    is_above = keys > bound
    is_equal = keys == bound
    num_equal = rank - tl.sum(is_above.to(tl.int32), axis=0)
    is_taken = is_above | (is_equal & (tl.cumsum(is_equal.to(tl.int32), axis=0) <= num_equal))
    return is_taken, tl.cumsum(is_taken.to(tl.int32), axis=0) - 1
