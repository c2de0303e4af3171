"""Estimates of what follows: what they promise, how they order, and how well they fit what they were fitted to."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.child_probabilities import ChildEstimates, estimate_children
from tests.kernels.conftest import TritonDevice

INF = math.inf


def estimated(
    scores: list[list[float]], *, weights: list[int] | None = None, is_tested: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities, and units as whole numbers."""
    rows = torch.tensor(scores)
    out = ChildEstimates.empty(len(rows), rows.shape[1], rows.device)
    bits = torch.tensor(weights or [0] * len(rows), dtype=torch.int32).to(torch.int16)
    estimate_children(rows, bits, torch.full((len(rows),), is_tested), out)
    return out.logps.exp(), out.units.int() & 0xFFFF


def test_shares_follow_the_margins() -> None:
    """Catches a margin taken the wrong way, and scores that count for more than their differences."""
    shares, units = estimated([[0.1, 0.0, -1.2, -1.8], [5.0, 0.0, -0.9, -1.5], [105.0, 100.0, 99.1, 98.5]])
    assert 0.3 < shares[0, 0] < 0.4
    assert shares[1, 0] > 0.98
    torch.testing.assert_close(shares[1], shares[2], rtol=1e-4, atol=1e-6)
    assert (shares[:, :-1] >= shares[:, 1:]).all()
    assert (shares.sum(dim=1) < 1).all()
    torch.testing.assert_close(units / 65536, shares, rtol=0, atol=2 / 65536)


def test_a_tested_child_is_as_likely_as_q_is_certain() -> None:
    """Catches an estimate that looks at the token that was drawn: whether it is tested must not depend on it."""
    weights = [6500, 32768, 65000, 0]
    shares, _ = estimated([[3.0, 1.0, 0.0]] * 4, weights=weights, is_tested=True)
    other, _ = estimated([[-9.0, 1.0, 0.0]] * 4, weights=weights, is_tested=True)
    torch.testing.assert_close(shares[:, 0], torch.tensor([0.462, 0.67, 0.926, 0.93]), atol=1e-3, rtol=0)
    torch.testing.assert_close(shares, other)
    assert (shares[:, 1] > shares[:, 2]).all()
    assert (shares.sum(dim=1) < 1).all()


def test_what_is_impossible_has_no_share() -> None:
    """Catches a NaN where a filter leaves fewer tokens than there are children, or none at all."""
    for is_tested in (False, True):
        shares, units = estimated([[0.5, -INF, -INF], [0.5, 0.1, -INF], [-INF] * 3], is_tested=is_tested)
        assert not shares.isnan().any()
        assert (shares[0, 1:] == 0).all()
        assert (units[0, 1:] == 0).all()
        assert shares[1, 2] == 0
    (first,), _ = estimated([[0.5, -INF, -INF]])
    assert first[0] == 1  # the only one that the filters leave


@pytest.mark.parametrize("num_children", [1, 2, 3, 4, 8])
def test_kernel_equals_reference(triton_device: TritonDevice, num_children: int) -> None:
    generator = torch.Generator().manual_seed(num_children)
    scores = torch.randn(63, num_children, generator=generator) * 3
    scores = torch.cat([scores[:, :1], scores[:, 1:].sort(dim=1, descending=True).values], dim=1)
    scores[::7, -1] = -INF
    is_tested = torch.rand(63, generator=generator) < 0.5
    # What is not tested falls from its first score on.
    scores = torch.where(is_tested.unsqueeze(1), scores, scores.sort(dim=1, descending=True).values)
    weights = torch.randint(0, 65536, (63, 5), generator=generator, dtype=torch.int32).to(torch.int16)
    expected = ChildEstimates.empty(63, num_children, scores.device)
    estimate_children(scores, weights[:, 0], is_tested, expected)
    with triton_device() as device:
        found = ChildEstimates.empty(63, num_children, device)
        estimate_children(scores.to(device), weights.to(device)[:, 0], is_tested.to(device), found)
    torch.testing.assert_close(found.logps.cpu(), expected.logps, rtol=1e-4, atol=1e-5)
    difference = (found.units.cpu().int() & 0xFFFF) - (expected.units.int() & 0xFFFF)
    assert difference.abs().max() <= 2
