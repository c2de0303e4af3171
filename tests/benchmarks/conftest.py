"""One tiny pair for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from benchmarks.pair import PairDirectory, Request, write_pair

CPU = torch.device("cpu")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """The benchmarks set this themselves on a CPU; here it must not outlive them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> PairDirectory:
    """A tiny pair of agreement 0.8."""
    return write_pair(tmp_path_factory.mktemp("pair"), Request("tiny"), CPU)
