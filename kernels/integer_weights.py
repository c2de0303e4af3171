"""Probabilities as integers, which is how their sums stay exact.

Within a block of BLOCK_SIZE tokens a token weighs 2**40 * exp((logit - the block's maximum) / temperature), rounded to
an integer. Sums of such weights are exact whatever their order, so a block's weight is precisely the sum of its tokens'
weights, however a GPU splits the work. They stay within 2**53, so that float64 holds them exactly too.

The sums say how probable a token is where p is held against q, and where top-p cuts. Drawing needs none of them: the
token with the smallest E / weight wins whatever the weights add up to (`kernels.random`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

BLOCK_SIZE = 4096
"""Tokens in a block. A power of two; BLOCK_SIZE * 2**WEIGHT_BITS must not pass 2**53."""
WEIGHT_BITS = 40
"""A block's most likely token weighs 2**WEIGHT_BITS."""
LARGEST_LOGIT = torch.finfo(torch.float32).max
# The exponent below which a weight is 0. Clamping to it changes nothing, but exp is many times slower on infinities.
_SMALLEST_EXPONENT = -28.5
_CHUNK_SIZE = 1 << 18


def sanitized(logits: torch.Tensor) -> torch.Tensor:
    """A float32 copy in which NaN counts as -inf, and +inf as the largest finite number: inf - inf would be NaN."""
    return torch.nan_to_num(logits.float(), nan=-torch.inf, posinf=LARGEST_LOGIT, neginf=-torch.inf)


def exponential_weights(
    logits: torch.Tensor,  # [..., n] float32, sanitized
    maxima: torch.Tensor,  # [...] float32, at least the largest logit of each row
    temperatures: torch.Tensor,  # broadcasts against maxima, float32, above 0
) -> torch.Tensor:  # [..., n] float32, integer values
    """The integer weights of logits relative to their maxima, held in float32, which has bits enough for each."""
    finite_maxima = torch.where(maxima == -torch.inf, 0.0, maxima).unsqueeze(-1)
    exponents = (logits - finite_maxima).div_(temperatures.unsqueeze(-1)).clamp_min_(_SMALLEST_EXPONENT)
    return exponents.exp_().mul_(2.0**WEIGHT_BITS).round_()


def row_chunks(num_rows: int, row_size: int) -> Iterator[slice]:
    """Slices of rows that are small enough for their temporaries to stay in the processor's cache."""
    step = max(1, _CHUNK_SIZE // row_size)
    return (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))
