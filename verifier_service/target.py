"""The target model with its cache."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.block_manager import BlockManager
from engine.model_runner import ModelRunner


class Target:
    """The target model, its KV cache and what else the engine needs to know of it; filled in by `load`."""

    def __init__(self, make_runner: Callable[[], ModelRunner]) -> None:
        self._make_runner = make_runner

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
