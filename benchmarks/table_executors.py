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
from drafter_service.passes import EagerPass, GraphPass

from benchmarks.stopwatch import Stopwatch
from drafter_service.executor import DraftExecutor
from engine.slots import DeviceSlots
from engine.step import Drafted, DraftRow, Pass, PassKind, Row, Sampled, Wanted
from verifier_service.decode_graph import MAX_STEPS_IN_FLIGHT, DecodeGraphs
from verifier_service.passes import DevicePass

_ACCEPTANCE = 0.8
_NUM_DISTRIBUTIONS = 500
_FIRST_TOKEN = 5  # of every sequence


class StubRunner:
    """As much of a model runner as graphs ask for that are never captured, and as services ask for to load it."""

    vocab_size, block_size, max_length, max_num_batched_tokens = 128_256, 16, 4096, 8192
    device, dtype = torch.device("cpu"), torch.bfloat16
    eos_token_ids = ()

    def __init__(self, batch_size: int) -> None:
        """With a cache for so many sequences of the greatest length."""
        self.num_blocks = batch_size * self.max_length // self.block_size

    def warm_up(self) -> None:
        """There is nothing to warm up."""


class TargetTable:
    """A verifier's executor. Four in five draft tokens are accepted."""

    max_in_flight = MAX_STEPS_IN_FLIGHT

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
    """A drafter's executor. Candidates are random and equally likely."""

    def __init__(
        self, runner: Any, watch: Stopwatch, *, max_rows: int, max_draft_tokens: int, num_candidates: int
    ) -> None:
        """`watch` does not count what a device would do."""
        super().__init__(
            runner,
            num_slots=max_rows,
            max_graph_rows=max_rows,
            max_draft_tokens=max_draft_tokens,
            num_candidates=num_candidates,
        )
        self.use_graphs(None)
        self._watch = watch
        self._random = np.random.default_rng(1)
        distributions = [
            self._random.choice(runner.vocab_size, num_candidates, replace=False) for _ in range(_NUM_DISTRIBUTIONS)
        ]
        self._candidates = np.stack(distributions).astype(np.int32)
        shape = (max_draft_tokens, max_rows, num_candidates)
        # As the graphs' outputs: the bits of a uint16.
        self._weights = np.full(shape, (1 << 16) // num_candidates, np.uint16).view(np.int16)

    def warm_up(self) -> None:
        """There is nothing to warm up."""

    def submit(self, rows: Sequence[DraftRow]) -> list[Pass[Drafted]]:
        """A round; its passes are over."""
        assert self.graphs is not None
        in_graph = [index for index, row in enumerate(rows) if self.fits(row)]
        passes: list[Pass[Drafted]] = []
        if in_graph:
            in_order = [rows[index] for index in in_graph]
            graph = self.graphs.prepare(in_order)
            with self._watch.excluded():
                host = self._draft(graph.shape.num_rows, graph.shape.num_draft_tokens)
            passes.append(GraphPass(in_graph, [row.num_draft_tokens for row in in_order], host, None))
        if prompts := sorted(set(range(len(rows))).difference(in_graph)):
            passes.append(EagerPass(prompts, PassKind.PROMPT, [None] * len(prompts)))
        return passes

    def _draft(self, num_rows: int, num_draft_tokens: int) -> dict[str, npt.NDArray[Any]]:
        chosen = self._random.integers(len(self._candidates), size=(num_draft_tokens, num_rows))
        candidate_ids = self._candidates[chosen]
        return {
            "token_ids": candidate_ids[:, :, 0],
            "candidate_ids": candidate_ids,
            "candidate_weights": self._weights[:num_draft_tokens, :num_rows],
        }


def _device_slots(runner: Any, num_slots: int) -> DeviceSlots:
    return DeviceSlots(
        num_slots,
        max_blocks=-(-runner.max_length // runner.block_size),
        vocab_size=runner.vocab_size,
        device=runner.device,
    )
