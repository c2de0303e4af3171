"""A drafting round of fixed shape in one CUDA graph: catch up, then K tokens without a word from the host.

Each token is sampled on the device and fed straight into the next forward pass; the host sees only the finished drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from drafter_service.drafter import Draft
from drafter_service.sequence import DraftSequence
from engine.batch import Batch
from engine.cuda_graph import GraphPool, batch_buckets
from engine.model_runner import ModelRunner
from engine.sequence_rows import SequenceRows
from engine.static_tensors import StaticTensors, TensorSpec
from kernels.draft_sample import DraftSample, draft_sample

# After full acceptance two tokens are missing from the cache: the last draft token, which was sampled but never
# computed, and the bonus token. After a rejection it is one.
MAX_CATCH_UP = 2


@dataclass(frozen=True)
class DraftShape:
    """What a graph was captured for: at most so many sequences and so many draft tokens each."""

    num_sequences: int
    num_draft_tokens: int
    is_filtered: bool  # whether top-k, top-p and min-p are looked at


class DraftGraphs:
    """The graphs of all shapes that drafting meets: each bucket of the batch size, with and without filters."""

    def __init__(self, runner: ModelRunner, *, max_sequences: int, max_draft_tokens: int, num_candidates: int) -> None:
        self._buckets = batch_buckets(max_sequences)
        self.max_draft_tokens = max_draft_tokens
        max_blocks = -(-runner.max_length // runner.block_size)
        self._graphs = {
            shape: DraftGraph(runner, shape, num_candidates=num_candidates, max_blocks=max_blocks)
            for num_sequences in reversed(self._buckets)
            for is_filtered in (False, True)
            for shape in (DraftShape(num_sequences, max_draft_tokens, is_filtered),)
        }

    def capture(self, pool: GraphPool) -> None:
        """Record all graphs, the largest first, so that the others find its memory."""
        for graph in self._graphs.values():
            graph.capture(pool)

    def fits(self, sequence: DraftSequence, num_draft_tokens: int) -> bool:
        """Whether a graph can draft so many tokens for the sequence."""
        return (
            0 < num_draft_tokens <= self.max_draft_tokens
            and sequence.num_missing <= MAX_CATCH_UP
            and not sequence.sampling.has_penalties
        )

    def run(self, sequences: Sequence[DraftSequence], num_draft_tokens: Sequence[int]) -> list[Draft]:
        """Draft for sequences that fit, the given number of tokens each."""
        drafts: list[Draft] = []
        for start in range(0, len(sequences), self._buckets[-1]):
            part = sequences[start : start + self._buckets[-1]]
            is_filtered = any(sequence.sampling.has_filters for sequence in part)
            graph = self.graph_of(len(part), is_filtered=is_filtered)
            drafts += graph.run(part, num_draft_tokens[start : start + len(part)])
        return drafts

    def graph_of(self, num_sequences: int, *, is_filtered: bool) -> DraftGraph:
        """The smallest graph that has room for so many, at most the largest bucket."""
        bucket = next(bucket for bucket in self._buckets if bucket >= num_sequences)
        return self._graphs[DraftShape(bucket, self.max_draft_tokens, is_filtered)]


class DraftGraph:
    """One captured shape. Belongs to the engine's thread."""

    def __init__(self, runner: ModelRunner, shape: DraftShape, *, num_candidates: int, max_blocks: int) -> None:
        self.shape = shape
        self._runner = runner
        self._num_candidates = num_candidates
        batch, num_tokens = shape.num_sequences, shape.num_sequences * MAX_CATCH_UP
        # By draft token, so that sampling writes its row directly; rows as wide as keeps each of them aligned.
        drafted = (shape.num_draft_tokens, -(-batch // 4) * 4)
        fed = (shape.num_draft_tokens - 1, drafted[1])  # all draft tokens but the last are a forward pass's input
        i16, i32, i64, f32 = torch.int16, torch.int32, torch.int64, torch.float32
        self._inputs = StaticTensors(
            {
                "token_ids": TensorSpec((num_tokens,), i64),
                "positions": TensorSpec((num_tokens,), i64),
                "slot_mapping": TensorSpec((num_tokens,), i64),
                "logit_rows": TensorSpec((batch,), i64),
                "cu_query_lens": TensorSpec((batch + 1,), i32),
                "context_lens": TensorSpec((batch,), i32),
                "fed_positions": TensorSpec(fed, i64),
                "fed_slots": TensorSpec(fed, i64),
                "fed_context_lens": TensorSpec(fed, i32),
                "sample_positions": TensorSpec(drafted, i64),
                "seeds": TensorSpec((batch,), i64),
                "temperature": TensorSpec((batch,), f32),
                "top_k": TensorSpec((batch,), i32),
                "top_p": TensorSpec((batch,), f32),
                "min_p": TensorSpec((batch,), f32),
                "block_tables": TensorSpec((batch, max_blocks), i32),
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
        # Of tokens from the end of what is committed, which is the first draft token's position.
        self._offsets = np.arange(-MAX_CATCH_UP, shape.num_draft_tokens - 1)[:, None]
        self._draft_offsets = np.arange(shape.num_draft_tokens)[:, None]
        self._rows = np.arange(batch)
        self._sequence_rows = SequenceRows(is_filtered=shape.is_filtered, vocab_size=runner.vocab_size)
        self._one_each = torch.arange(batch + 1, dtype=torch.int32, device=runner.device)
        self._graph: torch.cuda.CUDAGraph | None = None

    def capture(self, pool: GraphPool) -> None:
        """Record the graph. The round runs on padding, which leaves the cache alone."""
        self._fill_padding(0, 0)
        self._inputs.upload()
        self._graph = pool.capture(self._compute)

    def run(self, sequences: Sequence[DraftSequence], num_draft_tokens: Sequence[int]) -> list[Draft]:
        """Draft for every sequence, the given number of tokens each; at most MAX_CATCH_UP of each are not computed."""
        self._fill(sequences)
        self._inputs.upload()
        self.replay()
        self._outputs.download()
        for sequence, count in zip(sequences, num_draft_tokens, strict=True):
            # The last token is sampled but not computed; what a longer neighbour made the graph compute beyond it is
            # overwritten later, like rejected tokens.
            sequence.num_computed = sequence.length + count - 1
        if self._runner.device.type == "cuda":
            torch.cuda.current_stream(self._runner.device).synchronize()
        host, num_sequences = self._outputs.host, len(sequences)
        all_token_ids = host["token_ids"][:, :num_sequences].T.tolist()
        # By sequence, and copies: the buffer is filled anew by the next round.
        all_ids = host["candidate_ids"][:, :num_sequences].swapaxes(0, 1).copy()
        all_weights = host["candidate_weights"][:, :num_sequences].view(np.uint16).swapaxes(0, 1).copy()
        drafts = []
        for sequence, count, token_ids, ids, weights in zip(
            sequences, num_draft_tokens, all_token_ids, all_ids, all_weights, strict=True
        ):
            if sequence.wants_candidates:
                drafts.append(Draft(sequence, token_ids[:count], ids[:count], weights[:count]))
            else:
                drafts.append(Draft(sequence, token_ids[:count]))
        return drafts

    def replay(self) -> None:
        """Run the round over what the inputs on the device hold, without waiting for it."""
        if self._graph is None:
            self._compute()
        else:
            self._graph.replay()

    @torch.inference_mode()
    def _compute(self) -> None:
        values, batch = self._inputs.device, self.shape.num_sequences
        logits = self._runner.forward(
            Batch(
                token_ids=values["token_ids"],
                positions=values["positions"],
                slot_mapping=values["slot_mapping"],
                logit_rows=values["logit_rows"],
                cu_query_lens=values["cu_query_lens"],
                context_lens=values["context_lens"],
                block_tables=values["block_tables"],
                max_query_len=MAX_CATCH_UP,
            )
        )
        for index in range(self.shape.num_draft_tokens):
            token_ids = self._sample(logits, index)
            if index + 1 < self.shape.num_draft_tokens:
                logits = self._runner.forward(
                    Batch(
                        token_ids=token_ids,
                        positions=values["fed_positions"][index, :batch],
                        slot_mapping=values["fed_slots"][index, :batch],
                        logit_rows=None,
                        cu_query_lens=self._one_each,
                        context_lens=values["fed_context_lens"][index, :batch],
                        block_tables=values["block_tables"],
                        max_query_len=1,
                    )
                )

    def _sample(
        self,
        logits: torch.Tensor,  # [num_sequences, vocab_size]
        index: int,
    ) -> torch.Tensor:  # [num_sequences] int32
        values, outputs, rows = self._inputs.device, self._outputs.device, slice(self.shape.num_sequences)
        is_filtered = self.shape.is_filtered
        sample = draft_sample(
            logits,
            values["temperature"],
            values["seeds"],
            values["sample_positions"][index, rows],
            top_k=values["top_k"] if is_filtered else None,
            top_p=values["top_p"] if is_filtered else None,
            min_p=values["min_p"] if is_filtered else None,
            num_candidates=self._num_candidates,
            # 16 bits hold every weight: one that took everything would be written as none at all.
            out=DraftSample(
                outputs["token_ids"][index, rows],
                outputs["candidate_ids"][index, rows],
                outputs["candidate_weights"][index, rows],
            ),
        )
        return sample.token_ids

    def _fill(self, sequences: Sequence[DraftSequence]) -> None:
        host, block_size = self._inputs.host, self._runner.block_size
        num_sequences = len(sequences)
        self._sequence_rows.fill(
            host,
            [sequence.serial for sequence in sequences],
            [sequence.sampling for sequence in sequences],
            [sequence.block_ids for sequence in sequences],
        )
        tokens: list[int] = []
        for sequence in sequences:
            tokens += sequence.token_ids[sequence.num_computed :]
        lengths = np.array([len(sequence.token_ids) for sequence in sequences])
        missing = lengths - [sequence.num_computed for sequence in sequences]
        capacities = np.array([len(sequence.block_ids) for sequence in sequences]) * block_size
        np.minimum(capacities, self._runner.max_length, out=capacities)

        # Of each sequence the last committed tokens, as many as may be missing, then the draft tokens but the last.
        positions = self._offsets + lengths
        # Beyond a sequence's blocks and the model's positions, for drafts that nobody asked it for, tokens are computed
        # as if they stood first, and kept nowhere.
        is_kept = positions < capacities
        positions *= is_kept
        columns, places = np.divmod(positions, block_size)
        slots = host["block_tables"][self._rows[:num_sequences], columns].astype(np.int64)
        slots *= block_size
        slots += places
        slots[~is_kept] = -1

        is_missing = (self._offsets[:MAX_CATCH_UP] >= -missing).T
        ends = np.cumsum(missing)
        num_tokens = len(tokens)
        host["token_ids"][:num_tokens] = tokens
        host["positions"][:num_tokens] = positions[:MAX_CATCH_UP].T[is_missing]
        host["slot_mapping"][:num_tokens] = slots[:MAX_CATCH_UP].T[is_missing]
        host["logit_rows"][:num_sequences] = ends - 1
        host["cu_query_lens"][1 : num_sequences + 1] = ends
        host["context_lens"][:num_sequences] = lengths
        host["fed_positions"][:, :num_sequences] = positions[MAX_CATCH_UP:]
        host["fed_slots"][:, :num_sequences] = slots[MAX_CATCH_UP:]
        host["fed_context_lens"][:, :num_sequences] = positions[MAX_CATCH_UP:] + 1
        host["sample_positions"][:, :num_sequences] = self._draft_offsets + lengths
        self._fill_padding(num_sequences, num_tokens)

    def _fill_padding(self, num_sequences: int, num_tokens: int) -> None:
        """Sequences without tokens or blocks, and tokens that no sequence owns and the cache does not keep."""
        host = self._inputs.host
        host["slot_mapping"][num_tokens:] = -1
        host["cu_query_lens"][num_sequences + 1 :] = num_tokens
        host["logit_rows"][num_sequences:] = max(num_tokens - 1, 0)
        host["context_lens"][num_sequences:] = 0
        host["fed_positions"][:, num_sequences:] = 0
        host["fed_slots"][:, num_sequences:] = -1
        host["fed_context_lens"][:, num_sequences:] = 1
