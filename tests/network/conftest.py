"""Models for the tests of what the network does to the services."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.services.reference import disturbed
from tests.tiny_models import save_tiny_llama

Pair = tuple[Path, Path]


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A target of 64 tokens with room for long outputs, and a draft model that agrees with it now and then."""
    root = tmp_path_factory.mktemp("network-pair")
    target = save_tiny_llama(root / "target", num_layers=2, seed=1, max_length=2048)
    return target, disturbed(target, root / "draft", 0.03)


@pytest.fixture(autouse=True)
def switch_interval() -> Iterator[None]:
    """The services' own: here their threads share one interpreter besides."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.0002)
    yield
    sys.setswitchinterval(before)
