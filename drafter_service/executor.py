"""Runs the draft model's rounds: in a graph where one holds them, prompts step by step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import numpy.typing as npt
import torch

from drafter_service.draft_graph import DraftGraphs
from drafter_service.passes import EagerPass, GraphPass
from engine.batch import SequenceSlice
from engine.cuda_graph import GraphPool
from engine.model_runner import ModelRunner
from engine.penalty_tables import DevicePenalties
from engine.sampling_tensors import SamplingTensors, penalized
from engine.slots import DeviceSlots, Slot
from engine.step import Drafted, DraftRow, Pass, PassKind, begin_passes
from kernels.draft_sample import DraftSample, draft_sample
from kernels.penalties import Penalties, TokenHistory
from kernels.shape_logits import apply_penalties
from outrider.protocol.sampling_parameters import SamplingParameters

# Sequences in a graph that may have penalties at once. At a vocabulary of 128,000, their tables take 64 MB.
MAX_PENALIZED = 64


class DraftExecutor:
    """The executor over a draft model, with CUDA graphs once `use_graphs` was called. The engine's thread's."""

    # A round's drafts wait for verdicts: there is nothing to begin behind it.
    max_in_flight = 1

    def __init__(
        self,
        runner: ModelRunner,
        *,
        num_slots: int,
        max_graph_rows: int,
        max_draft_tokens: int,
        num_candidates: int,
        max_penalized: int = MAX_PENALIZED,
    ) -> None:
        """Room for so many sequences; graphs take `max_graph_rows` of them at once, `max_draft_tokens` (K) each.

        Where more than `max_penalized` have penalties or a bias, graphs draft for the others as if they had none.
        """
        self._runner = runner
        self._device = runner.device
        self._max_graph_rows = max_graph_rows
        self._max_draft_tokens = max_draft_tokens
        self.num_candidates = num_candidates
        max_blocks = -(-runner.max_length // runner.block_size)
        self._slots = DeviceSlots(num_slots, max_blocks=max_blocks, vocab_size=runner.vocab_size, device=runner.device)
        self._max_penalized = min(max_penalized, num_slots)
        self.graphs: DraftGraphs | None = None
        # Made with the graphs, which need the tables to stay where they are.
        self._penalties: DevicePenalties | None = None

    def use_graphs(self, pool: GraphPool | None) -> None:
        """From now on, rounds run in graphs; without a pool they are not recorded, and run as they are."""
        vocab_size = self._runner.vocab_size
        self._penalties = DevicePenalties(self._max_penalized, vocab_size=vocab_size, device=self._device)
        self.graphs = DraftGraphs(
            self._runner,
            self._slots,
            self._penalties,
            max_rows=self._max_graph_rows,
            max_draft_tokens=self._max_draft_tokens,
            num_candidates=self.num_candidates,
        )
        if pool is not None:
            self.graphs.capture(pool)

    def can_overlap(self, row: DraftRow) -> bool:
        """Never: what comes next follows from what the target makes of the drafts."""
        return False

    def give_back(self, slot: Slot) -> None:
        """Let others have what the slot's sequence had beside its slot; the slot itself is given back as well."""
        if self._penalties is not None:
            self._penalties.give_back(slot)

    def fits(self, row: DraftRow) -> bool:
        """Whether a graph holds the row."""
        return self.graphs is not None and self.graphs.fits(row)

    def submit(self, rows: Sequence[DraftRow]) -> list[Pass[Drafted]]:
        """Begin a round; at most as many rows that a graph holds as it has room for."""
        in_graph = [index for index, row in enumerate(rows) if self.fits(row)]
        others = sorted(set(range(len(rows))).difference(in_graph))
        graph_part = PassKind.GRAPH, in_graph, self._run_graph
        return begin_passes(rows, (graph_part, (PassKind.EAGER, others, self._run_eagerly)))

    def warm_up(self) -> None:
        """Sample once in each way that has kernels of its own and no graph."""
        logits = self._runner.execute([SequenceSlice([0], 0, [0], 1)])
        for top_p, penalty in product((1.0, 0.5), (0.0, 1.0)):
            sampling = SamplingParameters(temperature=1.0, top_p=top_p, presence_penalty=penalty)
            self._sample(logits, [_Growing(sampling, 0, 1, TokenHistory([0]) if penalty else None)])

    def _run_graph(self, indexes: Sequence[int], rows: Sequence[DraftRow]) -> Pass[Drafted]:
        assert self.graphs is not None
        graph = self.graphs.prepare(rows)
        graph.launch()
        host = graph.download()
        event = None
        if self._device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
        return GraphPass(indexes, [row.num_draft_tokens for row in rows], host, event)

    @torch.inference_mode()
    def _run_eagerly(self, indexes: Sequence[int], rows: Sequence[DraftRow]) -> Pass[Drafted]:
        logits = self._runner.execute(
            [
                SequenceSlice(row.token_ids, row.start, row.blocks, num_logit_rows=1 if row.num_draft_tokens else 0)
                for row in rows
            ]
        )
        drafting = [row for row in rows if row.num_draft_tokens]
        growing = {
            id(row): _Growing(row.sampling, row.start + len(row.token_ids), row.max_candidates, row.history)
            for row in drafting
        }
        active = drafting
        while active:
            self._sample(logits, [growing[id(row)] for row in active])
            active = [row for row in active if len(growing[id(row)].token_ids) < row.num_draft_tokens]
            if active:
                logits = self._runner.execute(
                    [
                        SequenceSlice([(draft := growing[id(row)]).token_ids[-1]], draft.position - 1, row.blocks, 1)
                        for row in active
                    ]
                )
        kind = PassKind.EAGER if drafting else PassKind.PROMPT
        return EagerPass(indexes, kind, [growing[id(row)].drafted() if id(row) in growing else None for row in rows])

    def _sample(
        self,
        logits: torch.Tensor,  # [len(drafts), vocab_size]
        drafts: Sequence[_Growing],
    ) -> None:
        tensors = SamplingTensors.build(
            [draft.sampling for draft in drafts],
            positions=[draft.position for draft in drafts],
            vocabulary_size=self._runner.vocab_size,
            device=self._device,
        )
        sample = draft_sample(
            _penalize(logits, drafts),
            tensors.temperature,
            tensors.seeds,
            tensors.positions,
            top_k=tensors.top_k,
            top_p=tensors.top_p,
            min_p=tensors.min_p,
            num_candidates=self.num_candidates,
            max_candidates=torch.tensor(
                [draft.max_candidates for draft in drafts], dtype=torch.int32, device=self._device
            ),
            out=self._sample_of(len(drafts)),
        )
        token_ids = sample.token_ids.tolist()
        candidate_ids = sample.candidate_ids.cpu().numpy()
        candidate_weights = sample.candidate_weights.cpu().numpy().view(np.uint16)
        for draft, token_id, ids, weights in zip(drafts, token_ids, candidate_ids, candidate_weights, strict=True):
            draft.append(token_id, ids, weights)

    def _sample_of(self, batch_size: int) -> DraftSample:
        """Room for so many draft tokens, in the types that graphs have: another type would be another kernel."""

        def new(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=self._device)

        shape = (batch_size, self.num_candidates)
        return DraftSample(new(shape[:1], torch.int32), new(shape, torch.int32), new(shape, torch.int16))


def _penalize(
    logits: torch.Tensor,  # [len(drafts), vocab_size]
    drafts: Sequence[_Growing],
) -> torch.Tensor:  # [len(drafts), vocab_size]
    """Shape q as the target will shape p, so that more is accepted; exact it need not be."""
    concerned = [
        penalized(index, draft.sampling, draft.history)
        for index, draft in enumerate(drafts)
        if draft.history is not None
    ]
    no_drafts = np.zeros(len(drafts) + 1, dtype=np.int32)
    penalties = Penalties.build(concerned, no_drafts, no_drafts[:0], logits.device)
    if penalties is None:
        return logits
    no_draft_ids = torch.empty(0, dtype=torch.int32, device=logits.device)
    return apply_penalties(logits, penalties, no_draft_ids).dense(slice(None))


class _Growing:
    """The draft of one row while it grows."""

    def __init__(
        self, sampling: SamplingParameters, position: int, max_candidates: int, history: TokenHistory | None
    ) -> None:
        self.sampling = sampling
        self.position = position  # of the next token
        self.max_candidates = max_candidates
        # A copy, as it counts the draft tokens too, most of which never become part of the sequence.
        self.history = None if history is None else history.copy()
        self.token_ids: list[int] = []
        self._candidate_ids: list[npt.NDArray[np.int32]] = []
        self._candidate_weights: list[npt.NDArray[np.uint16]] = []

    def append(self, token_id: int, ids: npt.NDArray[np.int32], weights: npt.NDArray[np.uint16]) -> None:
        self.position += 1
        self.token_ids.append(token_id)
        if self.history is not None:
            self.history.append([token_id])
        self._candidate_ids.append(ids)
        self._candidate_weights.append(weights)

    def drafted(self) -> Drafted:
        return Drafted(self.token_ids, np.stack(self._candidate_ids), np.stack(self._candidate_weights))
