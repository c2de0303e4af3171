"""The target model with its cache."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.block_manager import BlockManager
from engine.cuda_graph import GraphPool
from engine.device import make_runner
from engine.late_compilation import warn_of_late_compilation
from engine.model_runner import ModelRunner
from engine.step import Executor, Row, Sampled
from engine.step_costs import StepCosts
from verifier_service.executor import TargetExecutor
from verifier_service.settings import VerifierSettings


class Target:
    """The target model, its KV cache and what else the engine needs to know of it; filled in by `load`."""

    executor: Executor[Row, Sampled]
    # What steps cost by their rows; None where nobody has measured it.
    costs: StepCosts | None = None

    def __init__(
        self,
        make_runner: Callable[[], ModelRunner],
        make_executor: Callable[[ModelRunner], TargetExecutor],
        *,
        has_graphs: bool,
    ) -> None:
        """`has_graphs`: whether decoding is to run in CUDA graphs, on a device that has them."""
        self._make_runner = make_runner
        self._make_executor = make_executor
        self._has_graphs = has_graphs

    def load(self) -> None:
        """Load the model, size the cache and warm up; on the thread that will own the model."""
        runner = self._make_runner()
        self.blocks = BlockManager(runner.num_blocks, runner.block_size)
        self.vocabulary_size: int = runner.vocab_size
        # The runner's limit leaves out what the cache could never hold, so one sequence alone always fits.
        self.max_length: int = runner.max_length
        self.max_num_batched_tokens: int = runner.max_num_batched_tokens
        self.eos_token_ids = frozenset(runner.eos_token_ids)
        self.device: torch.device = runner.device
        runner.warm_up()
        executor = self._make_executor(runner)
        if self._has_graphs and self.device.type == "cuda":
            executor.use_graphs(GraphPool(self.device))
            executor.warm_up()
            warn_of_late_compilation()
        self.executor = executor
        self.costs = executor.costs


def make_target(settings: VerifierSettings) -> Target:
    """The target that the settings describe, not yet loaded."""

    def make_executor(runner: ModelRunner) -> TargetExecutor:
        return TargetExecutor(
            runner,
            max_rows=settings.max_running,
            max_draft_tokens=settings.max_draft_tokens,
            num_candidates=settings.num_candidates,
            chooses_drafts=not settings.draft_limits(runner.device).takes_turns,
        )

    return Target(lambda: make_runner(settings, settings.model), make_executor, has_graphs=settings.cuda_graphs)
