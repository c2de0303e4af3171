"""Model pairs for the tests of drafter and verifier."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.services.reference import disturbed
from tests.tiny_models import save_tiny_llama

Pair = tuple[Path, Path]


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A target of 64 tokens and 256 positions, and a draft model that agrees with it now and then."""
    root = tmp_path_factory.mktemp("pair")
    target = save_tiny_llama(root / "target", num_layers=2, seed=1)
    return target, disturbed(target, root / "draft", 0.03)


@pytest.fixture(scope="session")
def narrow_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A target of 16 tokens and a drafter that often disagrees, so that every branch of verification is taken."""
    root = tmp_path_factory.mktemp("narrow-pair")
    target = save_tiny_llama(root / "target", vocab_size=16, num_layers=1, seed=1, scale=0.6, max_length=64)
    return target, disturbed(target, root / "draft", 0.15)
