"""Counter-based random numbers: the same (seed, position, purpose) gives the same number in whatever batch or replica.

The generator is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
"""

from __future__ import annotations

from enum import IntEnum

import torch

from kernels.arguments import check_tensor
from kernels.dispatch import runs_triton
from kernels.random_scheme import RANDOM_SCHEME as RANDOM_SCHEME

_MULTIPLIER_0 = 0xD2511F53
_MULTIPLIER_1 = 0xCD9E8D57
_KEY_STEP_0 = 0x9E3779B9
_KEY_STEP_1 = 0xBB67AE85
_WORD = 0xFFFFFFFF
_NUM_ROUNDS = 10


class Purpose(IntEnum):
    """What a random number decides. Purposes never share numbers: a recovered token drawn with the noise that drew the
    draft token is correlated with the rejection that it repairs, and the output is no longer the target's."""

    DRAFT = 1
    ACCEPT = 2
    RECOVER = 3
    BONUS = 4
    COUPLED = 5


def random_words(
    seeds: torch.Tensor,  # [n] int64, the bit pattern of a uint64
    positions: torch.Tensor,  # [n] int64
    purpose: Purpose,
) -> torch.Tensor:  # [n, 4] int64
    """Four independent random words a row, each uniform on [0, 2**32).

    Raises ValueError when the shapes or types do not fit.
    """
    check_tensor("seeds", seeds, (None,), (torch.int64,), seeds.device)
    check_tensor("positions", positions, (seeds.shape[0],), (torch.int64,), seeds.device)
    if runs_triton(seeds):
        from kernels.random_triton import launch_random_words

        return launch_random_words(seeds, positions, int(purpose))
    return keyed_words(seeds, positions, torch.full_like(positions, int(purpose)))


def uniforms(
    words: torch.Tensor,  # [n, 4] int64
) -> tuple[torch.Tensor, torch.Tensor]:  # [n] float64, [n] float64
    """Two independent uniforms in [0, 1), multiples of 2**-53, from the words (0, 1) and (2, 3) of each row."""
    first = (words[:, 0] << 21) | (words[:, 1] >> 11)
    second = (words[:, 2] << 21) | (words[:, 3] >> 11)
    return first.double() * 2.0**-53, second.double() * 2.0**-53


def keyed_words(
    seeds: torch.Tensor,  # [n] int64
    positions: torch.Tensor,  # [n] int64
    purposes: torch.Tensor,  # [n] int64
) -> torch.Tensor:  # [n, 4] int64
    """The reference of `random_words`, with a purpose for each row."""
    counter = (positions & _WORD, (positions >> 32) & _WORD, purposes, torch.zeros_like(positions))
    return torch.stack(_philox(counter, (seeds & _WORD, (seeds >> 32) & _WORD)), dim=1)


_Counter = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _philox(counter: _Counter, key: tuple[torch.Tensor, torch.Tensor]) -> _Counter:
    """Philox4x32-10 on words held in int64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        high_0, low_0 = _multiply(c0, _MULTIPLIER_0)
        high_1, low_1 = _multiply(c2, _MULTIPLIER_1)
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0 = (k0 + _KEY_STEP_0) & _WORD
        k1 = (k1 + _KEY_STEP_1) & _WORD
    return c0, c1, c2, c3


def _multiply(word: torch.Tensor, multiplier: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low word of a 32 x 32 bit product, the multiplier taken in halves: the whole overflows int64."""
    upper = word * (multiplier >> 16)
    lower = word * (multiplier & 0xFFFF)
    high = (upper + (lower >> 16)) >> 16
    low = (lower + ((upper & 0xFFFF) << 16)) & _WORD
    return high, low
