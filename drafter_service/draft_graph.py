"""A drafting round of fixed shape in one CUDA graph: catch up, then K tokens without a word from the host.

Each token is sampled on the device and fed straight into the next forward pass; the host sees only the finished drafts.
How a sequence is sampled and where its blocks are is in its slot on the device, and its penalties are in a table there;
the host brings the tokens that are missing. Penalties count what is committed, not the round's own tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import Batch
from engine.cuda_graph import GraphPool, batch_buckets
from engine.model_runner import ModelRunner
from engine.penalty_tables import NO_PLACE, DevicePenalties
from engine.slots import DeviceSlots
from engine.static_tensors import StaticTensors, TensorSpec
from engine.step import DraftRow
from kernels.draft_sample import DraftSample, draft_sample
from kernels.penalty_tables import PenaltyTables, apply_penalty_tables
from kernels.step_rows import LaidOutDrafts, LaidOutRows, lay_out_drafts, lay_out_rows

# After full acceptance two tokens are missing from the cache: the last draft token, which was sampled but never
# computed, and the bonus token. After a rejection it is one.
MAX_CATCH_UP = 2


@dataclass(frozen=True)
class DraftShape:
    """What a graph was captured for: at most so many rows and so many draft tokens each."""

    num_rows: int
    num_draft_tokens: int
    is_filtered: bool  # whether top-k, top-p and min-p are looked at


class DraftGraphs:
    """The graphs of all shapes that drafting meets: each bucket of the batch size, with and without filters."""

    def __init__(
        self,
        runner: ModelRunner,
        slots: DeviceSlots,
        penalties: DevicePenalties,
        *,
        max_rows: int,
        max_draft_tokens: int,
        num_candidates: int,
    ) -> None:
        self._slots = slots
        self._penalties = penalties
        self._buckets = batch_buckets(max_rows)
        self.max_rows = max_rows
        self.max_draft_tokens = max_draft_tokens
        self._graphs = {
            shape: DraftGraph(runner, slots, penalties.tables, shape, num_candidates=num_candidates)
            for num_rows in reversed(self._buckets)
            for is_filtered in (False, True)
            for shape in (DraftShape(num_rows, max_draft_tokens, is_filtered),)
        }

    def capture(self, pool: GraphPool) -> None:
        """Record all graphs, the largest first, so that the others find its memory."""
        for graph in self._graphs.values():
            graph.capture(pool)

    def fits(self, row: DraftRow) -> bool:
        """Whether a graph can run the row."""
        return 0 < row.num_draft_tokens <= self.max_draft_tokens and len(row.token_ids) <= MAX_CATCH_UP

    def prepare(self, rows: Sequence[DraftRow]) -> DraftGraph:
        """The graph for a round over at most `max_rows` that fit, with all that the host has to say about it.

        The round before must have been collected.
        """
        self._slots.bring_up_to_date(rows)
        places = self._penalties.bring_up_to_date((row.slot, row.sampling, row.history) for row in rows)
        graph = self.graph_of(len(rows), is_filtered=any(row.sampling.has_filters for row in rows))
        graph.fill(rows, places)
        return graph

    def graph_of(self, num_rows: int, *, is_filtered: bool) -> DraftGraph:
        """The smallest graph that has room for so many, at most the largest bucket."""
        bucket = next(bucket for bucket in self._buckets if bucket >= num_rows)
        return self._graphs[DraftShape(bucket, self.max_draft_tokens, is_filtered)]


class DraftGraph:
    """One captured shape. Belongs to the engine's thread."""

    def __init__(
        self,
        runner: ModelRunner,
        slots: DeviceSlots,
        penalty_tables: PenaltyTables,
        shape: DraftShape,
        *,
        num_candidates: int,
    ) -> None:
        self.shape = shape
        self._runner = runner
        self._slots = slots
        self._penalty_tables = penalty_tables
        self._num_candidates = num_candidates
        batch, num_tokens = shape.num_rows, shape.num_rows * MAX_CATCH_UP
        # By draft token, so that sampling writes its row directly; rows as wide as keeps each of them aligned.
        drafted = (shape.num_draft_tokens, -(-batch // 4) * 4)
        i16, i32, i64 = torch.int16, torch.int32, torch.int64
        self._inputs = StaticTensors(
            {
                "slots": TensorSpec((batch,), i32),
                "starts": TensorSpec((batch,), i64),
                "query_lens": TensorSpec((batch,), i32),
                "first_tokens": TensorSpec((batch,), i32),
                "more_tokens": TensorSpec((num_tokens - batch,), i32),
                "capacities": TensorSpec((batch,), i32),
                "max_candidates": TensorSpec((batch,), i32),
                "penalty_places": TensorSpec((batch,), i32),
            },
            runner.device,
        )
        self._outputs = StaticTensors(
            {
                "token_ids": TensorSpec(drafted, i32),
                "candidate_ids": TensorSpec((*drafted, num_candidates), i32),
                "candidate_weights": TensorSpec((*drafted, num_candidates), i16),
            },
            runner.device,
        )
        self._rows = LaidOutRows.empty(batch, num_tokens, slots.max_blocks, runner.device)
        self._drafts = LaidOutDrafts.empty(shape.num_draft_tokens, drafted[1], runner.device)
        self._one_each = torch.arange(batch + 1, dtype=torch.int32, device=runner.device)
        self._graph: torch.cuda.CUDAGraph | None = None

    def capture(self, pool: GraphPool) -> None:
        """Record the graph. The round runs on padding, which leaves the cache alone."""
        self.fill([], [])
        self._inputs.upload()
        self._graph = pool.capture(self._compute)

    def launch(self) -> None:
        """Begin the round that the inputs were filled for."""
        self._inputs.upload()
        self.replay()

    def download(self) -> Mapping[str, npt.NDArray[Any]]:
        """Copy the drafts to the host without waiting: `token_ids` [K, width], `candidate_ids` and
        `candidate_weights` [K, width, m], there when the device has come so far and until the next round."""
        self._outputs.download()
        return self._outputs.host

    def replay(self) -> None:
        """Run the round over what the inputs on the device hold, without waiting for it."""
        if self._graph is None:
            self._compute()
        else:
            self._graph.replay()

    @torch.inference_mode()
    def _compute(self) -> None:
        values, rows, drafts, batch = self._inputs.device, self._rows, self._drafts, self.shape.num_rows
        block_size, num_draft_tokens = self._runner.block_size, self.shape.num_draft_tokens
        lay_out_rows(
            self._slots.state,
            values["slots"],
            values["starts"],
            values["query_lens"],
            values["first_tokens"],
            values["more_tokens"],
            block_size=block_size,
            max_query_len=MAX_CATCH_UP,
            reach=num_draft_tokens,
            out=rows,
        )
        lay_out_drafts(rows, values["capacities"], block_size=block_size, out=drafts)
        logits = self._runner.forward(
            Batch(
                token_ids=rows.token_ids,
                positions=rows.positions,
                slot_mapping=rows.slot_mapping,
                logit_rows=rows.last_places,
                cu_query_lens=rows.cu_query_lens,
                context_lens=rows.context_lens,
                block_tables=rows.block_tables,
                max_query_len=MAX_CATCH_UP,
            )
        )
        for index in range(num_draft_tokens):
            token_ids = self._sample(logits, index)
            if index + 1 < num_draft_tokens:
                logits = self._runner.forward(
                    Batch(
                        token_ids=token_ids,
                        positions=drafts.positions[index, :batch],
                        slot_mapping=drafts.slot_mapping[index, :batch],
                        logit_rows=None,
                        cu_query_lens=self._one_each,
                        context_lens=drafts.context_lens[index, :batch],
                        block_tables=rows.block_tables,
                        max_query_len=1,
                    )
                )

    def _sample(
        self,
        logits: torch.Tensor,  # [num_rows, vocab_size], changed where there are penalties
        index: int,
    ) -> torch.Tensor:  # [num_rows] int32
        rows, outputs, all_rows = self._rows, self._outputs.device, slice(self.shape.num_rows)
        is_filtered = self.shape.is_filtered
        apply_penalty_tables(logits, self._inputs.device["penalty_places"], self._penalty_tables)
        sample = draft_sample(
            logits,
            rows.temperature,
            rows.seeds,
            self._drafts.sample_positions[index, all_rows],
            top_k=rows.top_k if is_filtered else None,
            top_p=rows.top_p if is_filtered else None,
            min_p=rows.min_p if is_filtered else None,
            is_coupled=rows.is_coupled,
            num_candidates=self._num_candidates,
            max_candidates=self._inputs.device["max_candidates"],
            # 16 bits hold every weight: one that took everything would be written as none at all.
            out=DraftSample(
                outputs["token_ids"][index, all_rows],
                outputs["candidate_ids"][index, all_rows],
                outputs["candidate_weights"][index, all_rows],
            ),
        )
        return sample.token_ids

    def fill(self, rows: Sequence[DraftRow], penalty_places: Sequence[int]) -> None:
        """Write the host's side of the inputs; the slots are up to date, rows have at most MAX_CATCH_UP tokens.

        `penalty_places` says where in the tables each row's penalties are, if anywhere.
        """
        host, num_rows, block_size = self._inputs.host, len(rows), self._runner.block_size
        host["slots"][:num_rows] = [row.slot.index for row in rows]
        host["slots"][num_rows:] = self._slots.padding
        host["starts"][:num_rows] = [row.start for row in rows]
        host["starts"][num_rows:] = 0
        host["query_lens"][:num_rows] = [len(row.token_ids) for row in rows]
        host["query_lens"][num_rows:] = 0
        host["first_tokens"][:num_rows] = [row.token_ids[0] for row in rows]
        more = [token_id for row in rows for token_id in row.token_ids[1:]]
        host["more_tokens"][: len(more)] = more
        # No further than the model has positions, for drafts that nobody asked for.
        capacities = np.array([len(row.blocks) for row in rows], np.int64) * block_size
        host["capacities"][:num_rows] = np.minimum(capacities, self._runner.max_length)
        host["capacities"][num_rows:] = 0
        host["max_candidates"][:num_rows] = [row.max_candidates for row in rows]
        host["max_candidates"][num_rows:] = 1
        host["penalty_places"][:num_rows] = penalty_places
        host["penalty_places"][num_rows:] = NO_PLACE
