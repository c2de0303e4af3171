"""Model pairs for the tests of drafter and verifier."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service_device import graph_pool
from tests.services.in_flight import Flights
from tests.services.reference import disturbed
from tests.tiny_models import save_tiny_llama
from verifier_service.executor import TargetExecutor
from verifier_service.target import Target

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


@pytest.fixture
def flights(monkeypatch: pytest.MonkeyPatch) -> Iterator[Flights]:
    """Every verifier that is loaded in this test has its steps in flight."""
    flights = Flights()
    load = Target.load

    def load_in_flight(target: Target) -> None:
        load(target)
        executor = target.executor
        assert isinstance(executor, TargetExecutor)
        if not executor.has_graphs:
            executor.use_graphs(graph_pool())
        target.executor = flights.executor(executor)

    monkeypatch.setattr(Target, "load", load_in_flight)
    yield flights
    flights.is_held = False
