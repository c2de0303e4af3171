"""Philox: the published vectors, the Triton functions against the reference, and what keys are for."""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton's decorators and device functions carry no types.

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from scipy import stats

from kernels import random, random_triton
from kernels.random import Purpose, exponentials_of, random_words, target_exponentials, uniforms
from tests.kernels.conftest import TritonDevice

# Counter, key and output of philox4x32-10 from the known-answer file of Random123.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def signed(pattern: int) -> int:
    return pattern - (1 << 64) if pattern >> 63 else pattern


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_reference_gives_published_answers(
    counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]
) -> None:
    c0, c1, c2, c3, k0, k1 = (np.array([word], np.uint64) for word in counter + key)
    output = random._philox((c0, c1, c2, c3), (k0, k1))
    assert tuple(word.item() for word in output) == words


def test_words_follow_the_scheme() -> None:
    """The counter is (position low, position high, purpose, place), the key the seed: what RANDOM_SCHEME promises."""
    seeds, positions = torch.tensor([0x299F31D0A4093822]), torch.tensor([0x05A308D3243F6A88])
    words = random_words(seeds, positions, Purpose.ACCEPT)
    low, high, purpose, place = (np.array([word], np.uint64) for word in (0x243F6A88, 0x05A308D3, 2, 0))
    key = np.array([0xA4093822], np.uint64), np.array([0x299F31D0], np.uint64)
    assert words[0].tolist() == [word.item() for word in random._philox((low, high, purpose, place), key)]
    # A change of these numbers changes every seeded output: it needs a new RANDOM_SCHEME.
    assert random.RANDOM_SCHEME == "philox4x32-10.2"
    assert words[0].tolist() == [4222902233, 1764580321, 1521094507, 598121]
    noise = target_exponentials(seeds, positions, 9)[0]
    of_token_8 = int(random._philox_at(seeds, positions, Purpose.TARGET, np.array([[2]], np.uint64))[0, 0, 0])
    assert float(noise[8]) == pytest.approx(-np.log1p(-(of_token_8 + 0.5) / 2.0**32), rel=1e-12)
    assert noise[:5].tolist() == pytest.approx(
        [0.1316256175278656, 0.3330908752459708, 0.8695576435332057, 0.5842611692392151, 0.0077021354800243065],
        rel=1e-12,
    )
    some = torch.tensor([[8, 0, 5, 5]])
    assert exponentials_of(seeds, positions, some).tolist() == [noise[some[0]].tolist()]


@pytest.mark.parametrize("purpose", list(Purpose))
@pytest.mark.parametrize("num_rows", [1, 63, 1000])
def test_triton_equals_reference(triton_device: TritonDevice, num_rows: int, purpose: Purpose) -> None:
    seeds = torch.randint(-(2**63), 2**63 - 1, (num_rows,))
    seeds[0] = signed(0xFFFFFFFF_FFFFFFFF)
    positions = torch.randint(0, 2**40, (num_rows,))
    expected = random_words(seeds, positions, purpose)
    with triton_device() as device:
        words = random_words(seeds.to(device), positions.to(device), purpose)
    assert torch.equal(words.cpu(), expected)
    assert int(expected.min()) >= 0
    assert int(expected.max()) < 2**32


def test_purposes_positions_and_seeds_are_independent(device: torch.device) -> None:
    """Correlation between any two streams of one sequence, and between neighbouring positions and seeds."""
    n = 200_000
    base = torch.arange(n, device=device)
    zeros = torch.zeros_like(base)
    streams = [uniforms(random_words(zeros + 7, base, purpose)) for purpose in Purpose]
    streams.append(random_words(zeros + 7, base, Purpose.DRAFT)[:, 2].double() * 2.0**-32)
    streams.append(uniforms(random_words(zeros + 7, base + n, Purpose.DRAFT)))
    streams.append(uniforms(random_words(base, zeros + 7, Purpose.DRAFT)))
    # Of tokens at one position, and of one token at neighbouring positions. Tokens 0 and 1 have the words of a uniform.
    noise = target_exponentials(torch.full((n,), 7), base.cpu(), 6).neg().exp().to(device)
    streams += [noise[:, token] for token in (2, 3, 4)] + [noise[:, 5].roll(1)]
    matrix = torch.stack(streams)
    assert float(matrix.min()) >= 0
    assert float(matrix.max()) < 1
    assert torch.allclose(matrix.mean(dim=1), torch.full_like(matrix[:, 0], 0.5), atol=5 / (12 * n) ** 0.5)
    correlation = torch.corrcoef(matrix) - torch.eye(len(streams), device=device)
    assert float(correlation.abs().max()) < 5 / n**0.5


def test_uniforms_use_53_bits_and_stay_below_one() -> None:
    assert uniforms(torch.full((1, 4), 0xFFFFFFFF)).tolist() == [1 - 2.0**-53]
    assert uniforms(torch.tensor([[0, 1 << 11, 1, 0]])).tolist() == [2.0**-53]


@triton.jit
def _log2_exponentials_kernel(words_ptr, output_ptr, BLOCK: tl.constexpr):
    slots = tl.arange(0, BLOCK)
    tl.store(output_ptr + slots, random_triton._log2_exponentials(tl.load(words_ptr + slots).to(tl.uint32)))


def test_exponentials_are_precise_where_they_are_small(triton_device: TritonDevice) -> None:
    """Small ones decide between improbable tokens: formed as the logarithm of a number near 1 they would be coarse."""
    words = torch.cat(
        [
            torch.arange(100),
            2 ** torch.arange(7, 32),
            2**32 - 2 ** torch.arange(31),
            torch.randint(0, 2**32, (4096 - 156,), generator=torch.Generator().manual_seed(1)),
        ]
    )
    expected = random._exponentials(words.numpy().astype(np.uint64))
    assert float(expected[0]) == pytest.approx(2.0**-33)
    assert bool((expected.diff()[:99] > 0).all())
    with triton_device() as device:
        output = torch.empty(4096, device=device)
        _log2_exponentials_kernel[(1,)](words.to(device), output, BLOCK=4096)
    errors = (output.cpu().double().exp2() / expected - 1).abs()
    # log2 itself is rounded to 2**-24 of up to 33.
    assert float(errors[expected < 5].max()) < 6e-6
    # The probability that E is larger, where it is large.
    survival = ((-output.cpu().double().exp2()).exp() - (-expected).exp()).abs()
    assert float(survival.max()) < 2.0**-20
    assert float(survival[expected > 5].max()) < 2.0**-23


@triton.jit
def _target_noise_kernel(output_ptr, seed_ptr, position_ptr, FOURS: tl.constexpr):
    seed = tl.load(seed_ptr)
    position = tl.load(position_ptr)
    fours = tl.arange(0, FOURS)
    tokens = fours[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(output_ptr + tokens, random_triton.log2_of_four_exponentials(seed, position, fours))
    ids = tl.arange(0, FOURS * 4)
    tl.store(output_ptr + FOURS * 4 + ids, random_triton.log2_of_exponentials(seed, position, ids))


@pytest.mark.parametrize(("seed", "position"), [(3, 5), (-(2**63), 2**40 + 1), (-1, 2**63 - 1)])
def test_triton_noise_of_tokens_equals_reference(triton_device: TritonDevice, seed: int, position: int) -> None:
    """By fours and one by one."""
    key = torch.tensor([seed]), torch.tensor([position])
    expected = target_exponentials(*key, 256)[0].log2().repeat(2)
    with triton_device() as device:
        output = torch.empty(512, device=device)
        _target_noise_kernel[(1,)](output, *(part.to(device) for part in key), FOURS=64)
    # Coarse for large ones, of which a wrong token would be far from right all the same.
    assert torch.allclose(output.cpu().double(), expected, atol=1e-3)


def test_exponentials_are_exponential() -> None:
    """Each of them, and the smallest of a thousand, scaled."""
    n, vocab_size = 4000, 1000
    noise = target_exponentials(torch.arange(n), torch.full((n,), 3), vocab_size)
    assert stats.kstest(noise.reshape(-1)[:1_000_000].numpy(), "expon").pvalue > 1e-4
    assert stats.kstest(noise.amin(dim=1).numpy() * vocab_size, "expon").pvalue > 1e-4


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="positions"):
        random_words(torch.zeros(3, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), Purpose.DRAFT)
    with pytest.raises(ValueError, match="seeds"):
        random_words(torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int64), Purpose.DRAFT)
