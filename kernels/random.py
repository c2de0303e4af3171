"""Counter-based random numbers: the same (seed, position, purpose) gives the same number in whatever batch or replica.

The generator is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
import torch

from kernels.arguments import check_tensor
from kernels.dispatch import runs_triton
from kernels.random_scheme import RANDOM_SCHEME as RANDOM_SCHEME

_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_KEY_STEP_0 = np.uint64(0x9E3779B9)
_KEY_STEP_1 = np.uint64(0xBB67AE85)
_WORD = np.uint64(0xFFFFFFFF)
_WORD_BITS = np.uint64(32)
_NUM_ROUNDS = 10

_Words = np.ndarray[Any, np.dtype[np.uint64]]  # each below 2**32


class Purpose(IntEnum):
    """What a random number decides. Purposes never share numbers.

    The target's own choices share TARGET, with each other and with a drafter that predicts them. What draws a draft
    token that min(1, p / q) then judges, and what judges it, must be independent of that: a recovered token drawn with
    the noise that drew the rejected draft token is correlated with the rejection that it repairs, and the output is no
    longer the target's.
    """

    DRAFT = 1
    ACCEPT = 2
    TARGET = 3


def random_words(
    seeds: torch.Tensor,  # [n] int64, the bit pattern of a uint64
    positions: torch.Tensor,  # [n] int64
    purpose: Purpose,
) -> torch.Tensor:  # [n, 4] int64
    """Four independent random words a row, each uniform on [0, 2**32), of place 0.

    Raises ValueError when the shapes or types do not fit.
    """
    check_tensor("seeds", seeds, (None,), (torch.int64,), seeds.device)
    check_tensor("positions", positions, (seeds.shape[0],), (torch.int64,), seeds.device)
    if runs_triton(seeds):
        from kernels.random_triton import launch_random_words

        return launch_random_words(seeds, positions, int(purpose))
    return keyed_words(seeds, positions, purpose)


def uniforms(
    words: torch.Tensor,  # [n, 4] int64
) -> torch.Tensor:  # [n] float64
    """A uniform in [0, 1), a multiple of 2**-53, from the first two words of each row."""
    return ((words[:, 0] << 21) | (words[:, 1] >> 11)).double() * 2.0**-53


def keyed_words(
    seeds: torch.Tensor,  # [n] int64
    positions: torch.Tensor,  # [n] int64
    purpose: Purpose,
) -> torch.Tensor:  # [n, 4] int64
    """The reference of `random_words`."""
    words = _philox_at(seeds, positions, purpose, np.zeros((1, 1), np.uint64))
    return torch.from_numpy(words.reshape(-1, 4).view(np.int64))


def target_exponentials(
    seeds: torch.Tensor,  # [n] int64
    positions: torch.Tensor,  # [n] int64
    vocab_size: int,
) -> torch.Tensor:  # [n, vocab_size] float64
    """TARGET noise of each token at each position, on the CPU."""
    places = np.arange((vocab_size + 3) // 4, dtype=np.uint64)[None]
    words = _philox_at(seeds, positions, Purpose.TARGET, places)
    return _exponentials(words.reshape(len(words), -1)[:, :vocab_size])


def exponentials_of(
    seeds: torch.Tensor,  # [n] int64
    positions: torch.Tensor,  # [n] int64
    token_ids: torch.Tensor,  # [n, k] int64, not negative
) -> torch.Tensor:  # [n, k] float64
    """TARGET noise of some tokens at each position, on the CPU."""
    ids = token_ids.numpy()
    words = _philox_at(seeds, positions, Purpose.TARGET, (ids // 4).astype(np.uint64))
    return _exponentials(np.take_along_axis(words, (ids % 4)[..., None], axis=2)[..., 0])


def _exponentials(words: _Words) -> torch.Tensor:
    return torch.from_numpy((words.astype(np.float64) + 0.5) * -(2.0**-32)).log1p_().neg_()


def _philox_at(
    seeds: torch.Tensor,  # [n] int64
    positions: torch.Tensor,  # [n] int64
    purpose: Purpose,
    places: _Words,  # [n or 1, k]
) -> _Words:  # [n, k, 4]
    """The words of each row at each place."""
    seed, position = (
        tensor.numpy().view(np.uint64)[:, None] for tensor in (seeds.contiguous(), positions.contiguous())
    )
    counter = (position & _WORD, position >> _WORD_BITS, np.full_like(position, int(purpose)), places)
    words = np.empty((len(seed), places.shape[1], 4), np.uint64)
    for index, word in enumerate(_philox(counter, (seed & _WORD, seed >> _WORD_BITS))):
        words[:, :, index] = word
    return words


def _philox(counter: tuple[_Words, _Words, _Words, _Words], key: tuple[_Words, _Words]) -> tuple[_Words, ...]:
    """Philox4x32-10 on words that broadcast against each other: the first rounds are cheap where few of them differ."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        product_0 = c0 * _MULTIPLIER_0
        product_1 = c2 * _MULTIPLIER_1
        c0, c1 = (product_1 >> _WORD_BITS) ^ c1 ^ k0, product_1 & _WORD
        c2, c3 = (product_0 >> _WORD_BITS) ^ c3 ^ k1, product_0 & _WORD
        k0 = (k0 + _KEY_STEP_0) & _WORD
        k1 = (k1 + _KEY_STEP_1) & _WORD
    return c0, c1, c2, c3
