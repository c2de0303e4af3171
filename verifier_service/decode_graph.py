"""A verify step of fixed shape, forward pass and sampling in one CUDA graph.

Launching the few hundred kernels of a step one by one takes longer than a GPU takes to run them at a small batch. A
graph replays them all with one launch, for inputs at fixed addresses and of a fixed shape: sequences are padded to a
bucket of the batch size, and draft tokens to the longest proposal. Within that shape the batch may be as ragged as it
likes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import Batch
from engine.cuda_graph import GraphPool, batch_buckets
from engine.draft_tokens import DraftRows, DraftTokens, copy_rows
from engine.model_runner import ModelRunner
from engine.sequence_rows import SequenceRows
from engine.static_tensors import StaticTensors, TensorSpec
from kernels.rejection_sample import rejection_sample
from verifier_service.sequence import TargetSequence

# Steps that may be launched and not yet collected: one that the device works on, and one that it finds when it is done.
MAX_STEPS_IN_FLIGHT = 2


@dataclass(frozen=True)
class GraphShape:
    """What a graph was captured for: at most so many sequences, of at most so many tokens each."""

    num_sequences: int
    query_len: int  # 1, or draft tokens + 1
    is_filtered: bool  # whether top-k, top-p and min-p are looked at


class DecodeGraphs:
    """The graphs of all shapes of decoding: each bucket of the batch size, with and without drafts and filters."""

    def __init__(
        self,
        runner: ModelRunner,
        *,
        max_sequences: int,
        max_draft_tokens: int,
        num_candidates: int,
    ) -> None:
        self._buckets = batch_buckets(max_sequences)
        self.max_draft_tokens = max_draft_tokens
        self.num_candidates = num_candidates
        max_blocks = -(-runner.max_length // runner.block_size)
        # By the first block of a sequence, which is nobody else's, the token that its last plain step sampled; one more
        # for padding.
        last_tokens = torch.zeros(runner.num_blocks + 1, dtype=torch.int32, device=runner.device)
        self._graphs = {
            shape: DecodeGraph(
                runner, shape, num_candidates=num_candidates, max_blocks=max_blocks, last_tokens=last_tokens
            )
            for num_sequences in reversed(self._buckets)
            for query_len in (max_draft_tokens + 1, 1)
            for is_filtered in (False, True)
            for shape in (GraphShape(num_sequences, query_len, is_filtered),)
        }

    def capture(self, pool: GraphPool) -> None:
        """Record all graphs, the largest first, so that the others find its memory."""
        for graph in self._graphs.values():
            graph.capture(pool)

    def fits(self, sequence: TargetSequence, draft: DraftTokens) -> bool:
        """Whether a graph can decode the sequence, which misses only its last committed token."""
        return (
            sequence.history is None
            and sequence.num_logprobs is None
            and len(draft.token_ids) <= self.max_draft_tokens
            and draft.rows.num_candidates <= self.num_candidates
        )

    def launch(
        self, sequences: Sequence[TargetSequence], drafts: Sequence[DraftTokens], is_chained: Sequence[bool]
    ) -> GraphRun:
        """Begin a step of at most `max_sequences` that fit; see `DecodeGraph.launch`."""
        query_len = self.max_draft_tokens + 1 if any(draft.token_ids for draft in drafts) else 1
        is_filtered = any(sequence.sampling.has_filters for sequence in sequences)
        num_sequences = next(bucket for bucket in self._buckets if bucket >= len(sequences))
        return self._graphs[GraphShape(num_sequences, query_len, is_filtered)].launch(sequences, drafts, is_chained)


class GraphRun:
    """A step that was launched; its results are on the host when it is done."""

    def __init__(self, results: npt.NDArray[np.int32], event: torch.cuda.Event | None) -> None:
        self._results = results  # [num_sequences, query_len + 1]
        self._event = event

    @property
    def is_done(self) -> bool:
        """Whether `collect` would not wait."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def collect(self) -> list[list[int]]:
        """For each sequence the number of accepted draft tokens, and behind it all tokens that it commits, and more
        that mean nothing. Waits."""
        if self._event is not None:
            self._event.synchronize()
        rows: list[list[int]] = self._results.tolist()
        return rows


class _Layout:
    """Where the tokens of a step stand, sequence behind sequence, each with its draft tokens behind its last one."""

    def __init__(self, num_drafts: Sequence[int]) -> None:
        self.num_drafts = np.array(num_drafts, np.int64)  # [num_sequences]
        self.ends = np.cumsum(self.num_drafts + 1)  # [num_sequences], of each sequence's tokens
        self.last_tokens = self.ends - self.num_drafts - 1  # [num_sequences], places of the last committed tokens
        self.num_tokens = int(self.ends[-1])
        self.owners = np.repeat(np.arange(len(num_drafts)), self.num_drafts + 1)  # [num_tokens], whose they are
        # [num_tokens], how far behind the sequence's last committed token.
        self.offsets = np.arange(self.num_tokens) - self.last_tokens[self.owners]
        self.draft_tokens = np.flatnonzero(self.offsets)  # [total_drafts], their places


@dataclass
class _Filled:
    """What a mirror of the inputs holds and need not be written again."""

    sequence_rows: SequenceRows
    num_drafts: list[int] = field(default_factory=list)
    layout: _Layout | None = None  # for so many drafts


class DecodeGraph:
    """One captured shape. Belongs to the engine's thread."""

    def __init__(
        self,
        runner: ModelRunner,
        shape: GraphShape,
        *,
        num_candidates: int,
        max_blocks: int,
        last_tokens: torch.Tensor,  # [num_blocks + 1] int32, shared by all graphs
    ) -> None:
        self.shape = shape
        self._runner = runner
        self._last_tokens = last_tokens
        batch, num_tokens = shape.num_sequences, shape.num_sequences * shape.query_len
        num_drafts = num_tokens - batch
        i32, i64, f32 = torch.int32, torch.int64, torch.float32
        specs = {
            "token_ids": TensorSpec((num_tokens,), i64),
            "positions": TensorSpec((num_tokens,), i64),
            "slot_mapping": TensorSpec((num_tokens,), i64),
            "cu_query_lens": TensorSpec((batch + 1,), i32),
            "context_lens": TensorSpec((batch,), i32),
            "cu_num_drafts": TensorSpec((batch + 1,), i32),
            "draft_token_ids": TensorSpec((num_drafts,), i32),
            "candidate_ids": TensorSpec((num_drafts, num_candidates), i32),
            "candidate_weights": TensorSpec((num_drafts, num_candidates), i32),
            "temperature": TensorSpec((batch,), f32),
            "seeds": TensorSpec((batch,), i64),
            "sample_positions": TensorSpec((batch,), i64),
            "top_k": TensorSpec((batch,), i32),
            "top_p": TensorSpec((batch,), f32),
            "min_p": TensorSpec((batch,), f32),
            "block_tables": TensorSpec((batch, max_blocks), i32),
        }
        if shape.query_len == 1:
            specs |= {"slots": TensorSpec((batch,), i64), "is_chained": TensorSpec((batch,), i32)}
        self._inputs = StaticTensors(specs, runner.device, num_mirrors=MAX_STEPS_IN_FLIGHT)
        results = {"results": TensorSpec((batch, shape.query_len + 1), i32)}
        self._outputs = StaticTensors(results, runner.device, num_mirrors=MAX_STEPS_IN_FLIGHT)
        self._filled = [
            _Filled(SequenceRows(is_filtered=shape.is_filtered, vocab_size=runner.vocab_size))
            for _ in range(MAX_STEPS_IN_FLIGHT)
        ]
        self._graph: torch.cuda.CUDAGraph | None = None

    def capture(self, pool: GraphPool) -> None:
        """Record the graph. The step runs on padding, which leaves the cache alone."""
        self._fill_padding(0, 0, 0)
        self._inputs.upload()
        self._graph = pool.capture(self._compute)

    def launch(
        self, sequences: Sequence[TargetSequence], drafts: Sequence[DraftTokens], is_chained: Sequence[bool]
    ) -> GraphRun:
        """Begin a step, behind what the device does already.

        A chained sequence is one token longer than the host knows: by the one that its step in flight samples. The step
        before the last one must have been collected: its mirrors are used again.
        """
        self._inputs.turn()
        self._outputs.turn()
        self._fill(sequences, drafts, is_chained)
        self._inputs.upload()
        if self._graph is None:
            self._compute()
        else:
            self._graph.replay()
        self._outputs.download()
        event = None
        if self._runner.device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._runner.device))
        return GraphRun(self._outputs.host["results"][: len(sequences)], event)

    @torch.inference_mode()
    def _compute(self) -> None:
        values = self._inputs.device
        token_ids = values["token_ids"]
        if self.shape.query_len == 1:
            token_ids = torch.where(values["is_chained"] > 0, self._last_tokens[values["slots"]].long(), token_ids)
        logits = self._runner.forward(
            Batch(
                token_ids=token_ids,
                positions=values["positions"],
                slot_mapping=values["slot_mapping"],
                logit_rows=None,
                cu_query_lens=values["cu_query_lens"],
                context_lens=values["context_lens"],
                block_tables=values["block_tables"],
                max_query_len=self.shape.query_len,
            )
        )
        is_filtered = self.shape.is_filtered
        sample = rejection_sample(
            logits,
            values["cu_num_drafts"],
            values["draft_token_ids"],
            values["candidate_ids"],
            values["candidate_weights"],
            values["temperature"],
            values["seeds"],
            values["sample_positions"],
            max_num_draft_tokens=self.shape.query_len - 1,
            top_k=values["top_k"] if is_filtered else None,
            top_p=values["top_p"] if is_filtered else None,
            min_p=values["min_p"] if is_filtered else None,
        )
        results = self._outputs.device["results"]
        results[:, 0].copy_(sample.num_accepted)
        results[:, 1:].copy_(sample.token_ids)
        if self.shape.query_len == 1:
            self._last_tokens.index_copy_(0, values["slots"], results[:, 1])

    def _fill(
        self, sequences: Sequence[TargetSequence], drafts: Sequence[DraftTokens], is_chained: Sequence[bool]
    ) -> None:
        host, num_sequences = self._inputs.host, len(sequences)
        self._filled[self._inputs.index].sequence_rows.fill(
            host,
            [sequence.link_sequence_id for sequence in sequences],
            [sequence.sampling for sequence in sequences],
            [sequence.block_ids for sequence in sequences],
        )
        layout = self._fill_layout([len(draft.token_ids) for draft in drafts])
        num_tokens = layout.num_tokens
        lengths = np.array([len(sequence.token_ids) for sequence in sequences])
        if self.shape.query_len == 1:
            lengths += is_chained
            host["is_chained"][:num_sequences] = is_chained
            host["slots"][:num_sequences] = [sequence.block_ids[0] for sequence in sequences]
        host["context_lens"][:num_sequences] = lengths + layout.num_drafts
        host["sample_positions"][:num_sequences] = lengths

        copy_rows(drafts, DraftRows(host["draft_token_ids"], host["candidate_ids"], host["candidate_weights"]))
        tokens = host["token_ids"]
        tokens[layout.last_tokens] = [sequence.token_ids[-1] for sequence in sequences]
        tokens[layout.draft_tokens] = host["draft_token_ids"][: num_tokens - num_sequences]

        # The last committed token stands at position length - 1, its draft tokens behind it.
        positions = (lengths - 1)[layout.owners] + layout.offsets
        host["positions"][:num_tokens] = positions
        blocks, places = np.divmod(positions, self._runner.block_size)
        slots = host["slot_mapping"][:num_tokens]
        slots[:] = host["block_tables"][layout.owners, blocks]
        slots *= self._runner.block_size
        slots += places

    def _fill_layout(self, num_drafts: list[int]) -> _Layout:
        """What follows from the numbers of draft tokens alone, unless the mirror holds it; the layout."""
        filled = self._filled[self._inputs.index]
        if filled.layout is None or filled.num_drafts != num_drafts:
            host, num_sequences = self._inputs.host, len(num_drafts)
            layout = _Layout(num_drafts)
            host["cu_query_lens"][1 : num_sequences + 1] = layout.ends
            host["cu_num_drafts"][1 : num_sequences + 1] = np.cumsum(layout.num_drafts)
            self._fill_padding(num_sequences, layout.num_tokens, layout.num_tokens - num_sequences)
            filled.num_drafts, filled.layout = num_drafts, layout
        return filled.layout

    def _fill_padding(self, num_sequences: int, num_tokens: int, total_drafts: int) -> None:
        """Sequences without tokens or drafts, and tokens that no sequence owns and the cache does not keep."""
        host = self._inputs.host
        host["cu_query_lens"][num_sequences + 1 :] = num_tokens
        host["context_lens"][num_sequences:] = 0
        host["cu_num_drafts"][num_sequences + 1 :] = total_drafts
        if self.shape.query_len == 1:
            host["is_chained"][num_sequences:] = 0
            host["slots"][num_sequences:] = self._runner.num_blocks
        host["token_ids"][num_tokens:] = 0
        host["positions"][num_tokens:] = 0
        host["slot_mapping"][num_tokens:] = -1
