"""The project's drafter in a steady state: the K-token loop as its executor runs it, and nothing around it."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.timing import queued_milliseconds
from drafter_service.executor import DraftExecutor
from drafter_service.settings import DrafterSettings
from engine.block_manager import BlockManager, BlockTable
from engine.cuda_graph import GraphPool
from engine.device import make_runner
from engine.slots import SlotPool
from engine.step import Drafted, DraftRow
from outrider.protocol.sampling_parameters import SamplingParameters

_NUM_ACCEPTED = 2


class DrafterLoop:
    """Rounds of drafting in which the target accepts two draft tokens and replaces the third."""

    def __init__(
        self, model: Path, device: torch.device, *, num_draft_tokens: int, num_blocks: int, max_batch_size: int
    ) -> None:
        # What the settings leave as it is, is as the service has it.
        settings = DrafterSettings(model=model, device=str(device), num_blocks=num_blocks)
        self._runner = make_runner(settings, model)
        self._runner.warm_up()
        self._num_candidates = settings.num_candidates
        self._executor = DraftExecutor(
            self._runner,
            num_slots=max_batch_size,
            max_graph_rows=max_batch_size,
            max_draft_tokens=num_draft_tokens,
            num_candidates=settings.num_candidates,
        )
        if device.type == "cuda":
            self._executor.use_graphs(GraphPool(device))
        self._executor.warm_up()
        self._blocks = BlockManager(self._runner.num_blocks, self._runner.block_size)
        self._slots = SlotPool(max_batch_size)
        self._num_draft_tokens = num_draft_tokens
        self._num_accepted = min(_NUM_ACCEPTED, num_draft_tokens - 1)
        self._random = random.Random(11)

    def milliseconds(self, batch_size: int, context: int, *, num_rounds: int = 24, num_warm_up: int = 6) -> float:
        """Median time of one round, from its rows to draft tokens on the host, at about so much context.

        Raises RuntimeError when K tokens are not drafted for each row, or the cache is too small.
        """
        # Rows move on from round to round: the mean of the contexts is what was asked for.
        grown = (num_rounds // 2 + num_warm_up) * (self._num_accepted + 1)
        rows = [self._row(index, max(context - grown, 8)) for index in range(batch_size)]
        try:
            times = []
            for number in range(num_warm_up + num_rounds):
                start = time.perf_counter()
                drafted = self._draft(rows)
                if number >= num_warm_up:
                    times.append(time.perf_counter() - start)
                for row, found in zip(rows, drafted, strict=True):
                    self._move_on(row, found)
            return statistics.median(times) * 1e3
        finally:
            for row in rows:
                self._blocks.free(row.blocks)
                self._slots.give_back(row.slot)

    def device_milliseconds(self, batch_size: int) -> float | None:
        """Time of the device's part, over what the last round of so many rows left; None without CUDA graphs."""
        graphs = self._executor.graphs
        if graphs is None:
            return None
        return queued_milliseconds(graphs.graph_of(batch_size, is_filtered=False).replay, self._runner.device)

    def _draft(self, rows: Sequence[DraftRow]) -> list[Drafted]:
        (only_pass,) = self._executor.submit(rows)
        drafted = [found for found in only_pass.collect() if found is not None]
        counts = [len(found.token_ids) for found in drafted]
        if counts != [self._num_draft_tokens] * len(rows):
            raise RuntimeError(f"expected {self._num_draft_tokens} draft tokens for {len(rows)} rows, got {counts}")
        return drafted

    def _row(self, index: int, num_tokens: int) -> DraftRow:
        """The first round behind a random prompt, all of which but the last token is computed here."""
        slot, sampling, blocks = self._slots.take(), SamplingParameters(temperature=1.0, seed=index), BlockTable()
        token_ids = [self._random.randrange(self._runner.vocab_size) for _ in range(num_tokens)]
        row = DraftRow(
            slot, sampling, blocks, num_tokens - 1, token_ids[-1:], self._num_draft_tokens, self._num_candidates
        )
        self._make_room(row)
        most = self._runner.max_num_batched_tokens
        for start in range(0, num_tokens - 1, most):
            chunk = token_ids[start : min(start + most, num_tokens - 1)]
            for one_pass in self._executor.submit(
                [DraftRow(slot, sampling, blocks, start, chunk, 0, self._num_candidates)]
            ):
                one_pass.collect()
        return row

    def _move_on(self, row: DraftRow, drafted: Drafted) -> None:
        """Make of it the row of the next round: what was accepted is computed, what stands in place of the rest not."""
        rejected = drafted.token_ids[self._num_accepted]
        vocab_size = self._runner.vocab_size
        row.start += len(row.token_ids) + self._num_accepted
        row.token_ids = [(rejected + 1 + self._random.randrange(vocab_size - 1)) % vocab_size]
        self._make_room(row)

    def _make_room(self, row: DraftRow) -> None:
        # The last draft token is not computed.
        if not self._blocks.grow(row.blocks, row.start + len(row.token_ids) + row.num_draft_tokens - 1):
            raise RuntimeError("the cache is too small for this batch and context")
