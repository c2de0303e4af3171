"""How many cores a process counts on, inside containers and outside."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.cores import usable_cores


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ("max 100000", 8),
        ("200000 100000", 2),
        ("250000 100000", 3),
        ("25000 100000", 1),
        ("6400000 100000", 8),
        ("nonsense", 8),
        ("1 0", 8),
    ],
)
def test_a_container_with_a_quota(tmp_path: Path, limit: str, expected: int) -> None:
    """Catches a container of two cores on a large machine that computes with a thread for each of the machine's."""
    (tmp_path / "cpu.max").write_text(f"{limit}\n")
    assert usable_cores(tmp_path) == expected


@pytest.mark.parametrize(("quota", "expected"), [("-1", 8), ("150000", 2)])
def test_cgroups_of_the_first_version(tmp_path: Path, quota: str, expected: int) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(quota)
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000")
    assert usable_cores(tmp_path) == expected


def test_no_container(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == 8
