"""A verify step of fixed shape, forward pass and sampling in one CUDA graph.

Launching the few hundred kernels of a step one by one takes longer than a GPU takes to run them at a small batch. A
graph replays them all with one launch, for inputs at fixed addresses and of a fixed shape: rows are padded to a bucket
of the batch size, and draft tokens to the longest chain. Within that shape the batch may be as ragged as it likes.
What a row needs of its sequence is in the sequence's slot on the device; the host brings the draft tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch

from engine.batch import Batch
from engine.cuda_graph import GraphPool, batch_buckets
from engine.draft_tokens import DraftRows, copy_rows
from engine.model_runner import ModelRunner
from engine.slots import DeviceSlots
from engine.static_tensors import StaticTensors, TensorSpec
from engine.step import TOKENS, Row
from engine.step_costs import StepCosts
from kernels.rejection_sample import rejection_sample
from kernels.step_rows import LaidOutRows, advance_slots, keep_rows, lay_out_rows

# Steps that may be launched and not yet collected: one that the device works on, and one that it finds when it is done.
MAX_STEPS_IN_FLIGHT = 2

# From so many rows on, a token more of each row costs so much that graphs are made for numbers of tokens in between.
_MANY_ROWS = 12
_QUERY_LENS_OF_MANY = (2, 3, 4, 5, 6)
_NUM_TIMED_REPLAYS = 3


@dataclass(frozen=True)
class GraphShape:
    """What a graph was captured for: at most so many rows, of at most so many tokens each."""

    num_rows: int
    query_len: int  # draft tokens + 1
    is_filtered: bool  # whether top-k, top-p and min-p are looked at


class DecodeGraphs:
    """The graphs of all shapes of decoding: each bucket of the batch size, some numbers of drafts, with and without
    filters."""

    def __init__(
        self,
        runner: ModelRunner,
        slots: DeviceSlots,
        *,
        max_rows: int,
        max_draft_tokens: int,
        num_candidates: int,
        has_shorter: bool = False,
    ) -> None:
        """`has_shorter`: for many rows there are graphs for fewer draft tokens each as well."""
        self._slots = slots
        self._has_shorter = has_shorter
        self._buckets = batch_buckets(max_rows)
        self.max_draft_tokens = max_draft_tokens
        self.num_candidates = num_candidates
        max_tokens = max_rows * (max_draft_tokens + 1)
        # Only one graph runs at a time: all of them lay out their rows in the same place, and keep logits in one.
        laid_out = LaidOutRows.empty(max_rows, max_tokens, slots.max_blocks, runner.device)
        self.kept_logits = torch.zeros(max_tokens, runner.vocab_size, dtype=runner.dtype, device=runner.device)
        self._graphs = {
            shape: DecodeGraph(
                runner, slots, shape, num_candidates=num_candidates, laid_out=laid_out, kept_logits=self.kept_logits
            )
            for num_rows in reversed(self._buckets)
            for query_len in reversed(self._query_lens(num_rows))
            for is_filtered in (False, True)
            for shape in (GraphShape(num_rows, query_len, is_filtered),)
        }

    def capture(self, pool: GraphPool) -> None:
        """Record all graphs, the largest first, so that the others find its memory."""
        for graph in self._graphs.values():
            graph.capture(pool)

    def costs(self) -> StepCosts:
        """How long each shape's graph takes, measured. The steps run on padding, which leaves the cache alone."""
        return StepCosts(
            {
                (shape.num_rows, shape.query_len): graph.seconds()
                for shape, graph in self._graphs.items()
                if not shape.is_filtered
            }
        )

    def _query_lens(self, num_rows: int) -> list[int]:
        """The numbers of tokens a row that there are graphs for, ascending."""
        between = _QUERY_LENS_OF_MANY if self._has_shorter and num_rows >= _MANY_ROWS else ()
        longest = self.max_draft_tokens + 1
        return [1, *(query_len for query_len in between if query_len < longest), longest]

    def fits(self, row: Row) -> bool:
        """Whether a graph can decode the row."""
        drafts = row.drafts
        return (
            row.wanted is TOKENS
            and len(row.token_ids) <= 1  # none where the row is chained
            and len(drafts.token_ids) <= self.max_draft_tokens
            and drafts.num_candidates <= self.num_candidates
        )

    def prepare(self, rows: Sequence[Row]) -> DecodeGraph:
        """The graph for a step of at most `max_rows` that fit, with all that the host has to say about it.

        The step before the last one must have been collected: its mirrors are used again.
        """
        longest = 1 + max(len(row.drafts.token_ids) for row in rows)
        is_filtered = any(row.sampling.has_filters for row in rows)
        num_rows = next(bucket for bucket in self._buckets if bucket >= len(rows))
        query_len = next(query_len for query_len in self._query_lens(num_rows) if query_len >= longest)
        graph = self._graphs[GraphShape(num_rows, query_len, is_filtered)]
        self._slots.bring_up_to_date(rows)
        graph.fill(rows)
        return graph


class DecodeGraph:
    """One captured shape. Belongs to the engine's thread."""

    def __init__(
        self,
        runner: ModelRunner,
        slots: DeviceSlots,
        shape: GraphShape,
        *,
        num_candidates: int,
        laid_out: LaidOutRows,  # room for at least the shape
        kept_logits: torch.Tensor,  # [at least the shape's tokens, vocab_size]
    ) -> None:
        self.shape = shape
        self._runner = runner
        self._slots = slots
        self._kept_logits = kept_logits
        batch, num_drafts = shape.num_rows, shape.num_rows * (shape.query_len - 1)
        self._laid_out = _part(laid_out, batch, batch * shape.query_len)
        i32, i64 = torch.int32, torch.int64
        specs = {
            "slots": TensorSpec((batch,), i32),
            "starts": TensorSpec((batch,), i64),
            "query_lens": TensorSpec((batch,), i32),
            "first_tokens": TensorSpec((batch,), i32),
            "is_kept": TensorSpec((batch,), i32),
            "draft_token_ids": TensorSpec((num_drafts,), i32),
            "candidate_ids": TensorSpec((num_drafts, num_candidates), i32),
            "candidate_weights": TensorSpec((num_drafts, num_candidates), i32),
        }
        self._inputs = StaticTensors(specs, runner.device, num_mirrors=MAX_STEPS_IN_FLIGHT)
        results = {"results": TensorSpec((batch, shape.query_len + 1), i32)}
        self._outputs = StaticTensors(results, runner.device, num_mirrors=MAX_STEPS_IN_FLIGHT)
        self._graph: torch.cuda.CUDAGraph | None = None

    @property
    def results(self) -> torch.Tensor:  # [num_rows, query_len + 1] int32
        """On the device: each row's number of accepted draft tokens, then its tokens, and more that mean nothing."""
        return self._outputs.device["results"]

    def download(self) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
        """Copy the results to the host, without waiting: they are there when the device has come so far."""
        self._outputs.download()
        return self._outputs.host["results"]

    def capture(self, pool: GraphPool) -> None:
        """Record the graph. The step runs on padding, which leaves the cache alone."""
        self.fill([])
        self._inputs.upload()
        self._graph = pool.capture(self._compute)

    def seconds(self) -> float:
        """How long the device takes for the step that the inputs hold; waits for it."""
        device = self._runner.device
        events = [torch.cuda.Event(enable_timing=True) for _ in range(_NUM_TIMED_REPLAYS + 1)]  # type: ignore[no-untyped-call]
        self.fill([])
        for event in events:
            self.launch()
            event.record(torch.cuda.current_stream(device))
        torch.cuda.synchronize(device)
        return min(float(first.elapsed_time(then)) for first, then in pairwise(events)) * 1e-3

    def launch(self) -> None:
        """Begin the step that the inputs were filled for, behind what the device does already."""
        self._inputs.upload()
        if self._graph is None:
            self._compute()
        else:
            self._graph.replay()

    @torch.inference_mode()
    def _compute(self) -> None:
        values, rows, state = self._inputs.device, self._laid_out, self._slots.state
        lay_out_rows(
            state,
            values["slots"],
            values["starts"],
            values["query_lens"],
            values["first_tokens"],
            values["draft_token_ids"],
            block_size=self._runner.block_size,
            max_query_len=self.shape.query_len,
            out=rows,
        )
        logits = self._runner.forward(
            Batch(
                token_ids=rows.token_ids,
                positions=rows.positions,
                slot_mapping=rows.slot_mapping,
                logit_rows=None,
                cu_query_lens=rows.cu_query_lens,
                context_lens=rows.context_lens,
                block_tables=rows.block_tables,
                max_query_len=self.shape.query_len,
            )
        )
        keep_rows(logits, rows.owners, values["is_kept"], self._kept_logits)
        is_filtered = self.shape.is_filtered
        sample = rejection_sample(
            logits,
            rows.cu_num_drafts,
            values["draft_token_ids"],
            values["candidate_ids"],
            values["candidate_weights"],
            rows.temperature,
            rows.seeds,
            rows.sample_positions,
            max_num_draft_tokens=self.shape.query_len - 1,
            top_k=rows.top_k if is_filtered else None,
            top_p=rows.top_p if is_filtered else None,
            min_p=rows.min_p if is_filtered else None,
            is_coupled=rows.is_coupled,
        )
        advance_slots(
            state, values["slots"], rows.sample_positions, sample.num_accepted, sample.token_ids, self.results
        )

    def fill(self, rows: Sequence[Row]) -> None:
        """Write the host's side of the inputs; the slots of the rows are up to date."""
        self._inputs.turn()
        self._outputs.turn()
        host, num_rows = self._inputs.host, len(rows)
        host["slots"][:num_rows] = [row.slot.index for row in rows]
        host["slots"][num_rows:] = self._slots.padding
        host["starts"][:num_rows] = [row.start for row in rows]
        host["starts"][num_rows:] = 0
        host["first_tokens"][:num_rows] = [row.token_ids[0] if row.token_ids else 0 for row in rows]
        host["query_lens"][:num_rows] = [1 + len(row.drafts.token_ids) for row in rows]
        host["query_lens"][num_rows:] = 0
        host["is_kept"][:num_rows] = [row.history is not None or row.num_logprobs is not None for row in rows]
        host["is_kept"][num_rows:] = 0
        if self.shape.query_len > 1:
            drafts = DraftRows(host["draft_token_ids"], host["candidate_ids"], host["candidate_weights"])
            copy_rows([row.drafts for row in rows], drafts)


def _part(laid_out: LaidOutRows, batch: int, num_tokens: int) -> LaidOutRows:
    """The beginning of a larger room: its addresses are the same for all graphs."""
    return replace(
        laid_out,
        **{name: getattr(laid_out, name)[:num_tokens] for name in ("token_ids", "positions", "slot_mapping", "owners")},
        **{name: getattr(laid_out, name)[: batch + 1] for name in ("cu_query_lens", "cu_num_drafts")},
        **{
            name: getattr(laid_out, name)[:batch]
            for name in (
                "last_places",
                "context_lens",
                "sample_positions",
                "temperature",
                "seeds",
                "top_k",
                "top_p",
                "min_p",
                "is_coupled",
                "block_tables",
            )
        },
    )
