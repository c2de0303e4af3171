"""Philox: the published vectors, the Triton function against the reference, and what keys are for."""

from __future__ import annotations

import pytest
import torch

from kernels import random
from kernels.random import Purpose, random_words, uniforms
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
    c0, c1, c2, c3, k0, k1 = (torch.tensor([word]) for word in counter + key)
    output = random._philox((c0, c1, c2, c3), (k0, k1))
    assert tuple(int(word) for word in output) == words


def test_words_follow_the_scheme() -> None:
    """The counter is (position low, position high, purpose, 0) and the key the seed: what RANDOM_SCHEME promises."""
    seed, position = 0x299F31D0A4093822, 0x05A308D3243F6A88
    words = random_words(torch.tensor([seed]), torch.tensor([position]), Purpose.RECOVER)
    low, high, purpose, zero = (torch.tensor([word]) for word in (0x243F6A88, 0x05A308D3, 3, 0))
    key = torch.tensor([0xA4093822]), torch.tensor([0x299F31D0])
    assert words[0].tolist() == [int(word) for word in random._philox((low, high, purpose, zero), key)]
    # A change of these numbers changes every seeded output: it needs a new RANDOM_SCHEME.
    assert random.RANDOM_SCHEME == "philox4x32-10.1"
    assert words[0].tolist() == [529701996, 1216742500, 2494787948, 1900447347]


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
    streams = [uniforms(random_words(zeros + 7, base, purpose))[0] for purpose in Purpose]
    streams.append(uniforms(random_words(zeros + 7, base, Purpose.DRAFT))[1])
    streams.append(uniforms(random_words(zeros + 7, base + n, Purpose.DRAFT))[0])
    streams.append(uniforms(random_words(base, zeros + 7, Purpose.DRAFT))[0])
    matrix = torch.stack(streams)
    assert float(matrix.min()) >= 0
    assert float(matrix.max()) < 1
    assert torch.allclose(matrix.mean(dim=1), torch.full_like(matrix[:, 0], 0.5), atol=5 / (12 * n) ** 0.5)
    correlation = torch.corrcoef(matrix) - torch.eye(len(streams), device=device)
    assert float(correlation.abs().max()) < 5 / n**0.5


def test_uniforms_use_53_bits_and_stay_below_one() -> None:
    ones = torch.full((1, 4), 0xFFFFFFFF)
    assert [float(value) for value in uniforms(ones)] == [1 - 2.0**-53] * 2
    first, second = uniforms(torch.tensor([[0, 1 << 11, 1, 0]]))
    assert float(first) == 2.0**-53
    assert float(second) == 2.0**-32


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="positions"):
        random_words(torch.zeros(3, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), Purpose.DRAFT)
    with pytest.raises(ValueError, match="seeds"):
        random_words(torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int64), Purpose.DRAFT)
