"""Models for the tests of what the network does to the services."""

from __future__ import annotations

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
