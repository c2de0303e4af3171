"""The target model with its cache."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.block_manager import BlockManager
from engine.cuda_graph import GraphPool
from engine.device import make_runner
from engine.model_runner import ModelRunner
from verifier_service.decode_graph import DecodeGraphs
from verifier_service.settings import VerifierSettings


class Target:
    """The target model, its KV cache and what else the engine needs to know of it; filled in by `load`."""

    def __init__(
        self, make_runner: Callable[[], ModelRunner], make_graphs: Callable[[ModelRunner], DecodeGraphs] | None = None
    ) -> None:
        self._make_runner = make_runner
        self._make_graphs = make_graphs
        self.graphs: DecodeGraphs | None = None

    def load(self) -> None:
        """Load the model, size the cache and warm up; on the thread that will own the model."""
        self.runner = self._make_runner()
        self.blocks = BlockManager(self.runner.num_blocks, self.runner.block_size)
        self.vocabulary_size: int = self.runner.vocab_size
        # The runner's limit leaves out what the cache could never hold, so one sequence alone always fits.
        self.max_length: int = self.runner.max_length
        self.max_num_batched_tokens: int = self.runner.max_num_batched_tokens
        self.eos_token_ids = frozenset(self.runner.eos_token_ids)
        self.device: torch.device = self.runner.device
        self.runner.warm_up()
        if self._make_graphs is not None and self.device.type == "cuda":
            self.graphs = self._make_graphs(self.runner)
            self.graphs.capture(GraphPool(self.device))


def make_target(settings: VerifierSettings) -> Target:
    """The target that the settings describe, not yet loaded."""

    def make_graphs(runner: ModelRunner) -> DecodeGraphs:
        return DecodeGraphs(
            runner,
            max_sequences=settings.max_running,
            max_draft_tokens=settings.max_draft_tokens,
            num_candidates=settings.num_candidates,
        )

    return Target(lambda: make_runner(settings, settings.model), make_graphs if settings.cuda_graphs else None)
