"""Executors with tables in place of models: rows are prepared as for a device, and answered from random numbers.

What the host does for a step or a round is done as in the services: slots are brought up to date, the inputs of the
graph that would run are filled, results are taken apart. What the device would do takes no time that is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.stopwatch import Stopwatch
from drafter_service.executor import DraftExecutor, TreeOptions
from drafter_service.tree_graph import TreeGraph, TreeShape
from engine.batch import SequenceSlice, TreeBatch
from engine.slots import DeviceSlots
from engine.step import Pass, PassKind, Row, Sampled, Wanted
from outrider.protocol.wire import MIN_EXPANSIONS
from verifier_service.decode_graph import MAX_STEPS_IN_FLIGHT, DecodeGraphs
from verifier_service.passes import DevicePass

_ACCEPTANCE = 0.8
_NUM_DISTRIBUTIONS = 500
_NODES, _CHILDREN = 256, 4  # as the drafter's settings
_FIRST_TOKEN = 5  # of every sequence


class StubRunner:
    """As much of a model runner as graphs ask for that are never captured, and as services ask for to load it.

    What follows a token is drawn from a distribution of its own. Few tokens: sampling is done for real, uncounted.
    """

    vocab_size, block_size, max_length, max_num_batched_tokens = 1024, 16, 4096, 8192
    first_reserved_slot = 0
    device, dtype = torch.device("cpu"), torch.bfloat16
    eos_token_ids = ()

    def __init__(self, batch_size: int) -> None:
        """With a cache for so many sequences of the greatest length."""
        self.num_blocks = batch_size * self.max_length // self.block_size
        self._logits = torch.randn(_NUM_DISTRIBUTIONS, self.vocab_size, generator=torch.Generator().manual_seed(1))

    def warm_up(self) -> None:
        """There is nothing to warm up."""

    def execute(self, slices: Sequence[SequenceSlice]) -> None:
        """There are no keys to compute."""

    def copy_kv(self, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        """There are no keys to copy."""

    def forward(self, batch: TreeBatch) -> torch.Tensor:  # [num_tokens, vocab_size]
        """Logits that depend on each token alone."""
        return self._logits[batch.token_ids.long() % _NUM_DISTRIBUTIONS]


class TargetTable:
    """A verifier's executor. Four in five draft tokens are accepted."""

    max_in_flight = MAX_STEPS_IN_FLIGHT
    costs = None

    def __init__(
        self, runner: Any, watch: Stopwatch, *, max_rows: int, max_draft_tokens: int, num_candidates: int
    ) -> None:
        """`watch` does not count what a device would do."""
        self._watch = watch
        self._vocab_size = runner.vocab_size
        self._random = np.random.default_rng(0)
        self._graphs = DecodeGraphs(
            runner,
            _device_slots(runner, max_rows),
            max_rows=max_rows,
            max_draft_tokens=max_draft_tokens,
            num_candidates=num_candidates,
        )

    def can_overlap(self, row: Row) -> bool:
        """As the model's executor with graphs."""
        return row.history is None or not row.is_chained

    def submit(self, rows: Sequence[Row]) -> list[Pass[Sampled]]:
        """A step; its passes are over."""
        in_graph = [index for index, row in enumerate(rows) if self._graphs.fits(row)]
        passes: list[Pass[Sampled]] = []
        if in_graph:
            in_order = [rows[index] for index in in_graph]
            graph = self._graphs.prepare(in_order)
            with self._watch.excluded():
                results = self._verify(in_order, graph.shape.query_len + 1)
            passes.append(DevicePass(in_graph, PassKind.GRAPH, results, [True] * len(in_graph), None, None))
        if prompts := sorted(set(range(len(rows))).difference(in_graph)):
            results = np.full((len(prompts), 2), (0, _FIRST_TOKEN), np.int32)
            is_sampled = [rows[index].wanted is Wanted.TOKENS for index in prompts]
            passes.append(DevicePass(prompts, PassKind.PROMPT, results, is_sampled, None, None))
        return passes

    def _verify(self, rows: Sequence[Row], width: int) -> npt.NDArray[np.int32]:  # [len(rows), width]
        results = np.zeros((len(rows), width), np.int32)
        recovered = self._random.integers(self._vocab_size, size=len(rows))
        num_accepted = self._random.geometric(1 - _ACCEPTANCE, size=len(rows)) - 1
        for result, row, num, token in zip(results, rows, num_accepted, recovered, strict=True):
            accepted = row.drafts.token_ids[:num]
            result[0] = len(accepted)
            result[1 : len(accepted) + 2] = [*accepted, token]
        return results


class DraftTable(DraftExecutor):
    """A drafter's executor over a StubRunner, whose trees grow as they do on a device."""

    def __init__(
        self, runner: Any, watch: Stopwatch, *, max_rows: int, max_draft_tokens: int, num_candidates: int
    ) -> None:
        """`watch` does not count what a device would do."""
        self._watch = watch
        options = TreeOptions(
            max_rows=max_rows,
            max_nodes=_NODES,
            num_passes=1,
            max_draft_tokens=max_draft_tokens,
            num_children=_CHILDREN,
            max_expansions=MIN_EXPANSIONS,
            min_probability=0.0,
            num_candidates=num_candidates,
        )
        super().__init__(runner, num_slots=max_rows, options=options)
        self.capture(None)

    def _graph_of(self, shape: TreeShape) -> TreeGraph:
        graph = super()._graph_of(shape)

        def replay() -> None:
            with self._watch.excluded():
                TreeGraph.replay(graph)

        graph.replay = replay  # type: ignore[method-assign]
        return graph


def _device_slots(runner: Any, num_slots: int) -> DeviceSlots:
    return DeviceSlots(
        num_slots,
        max_blocks=-(-runner.max_length // runner.block_size),
        vocab_size=runner.vocab_size,
        device=runner.device,
    )
