"""Runs the target's steps: what decodes in graphs or along with prompts, and the rest in a pass without a graph."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from itertools import accumulate, product
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import Batch, SequenceSlice
from engine.block_manager import BlockManager, BlockTable
from engine.cuda_graph import GraphPool
from engine.draft_tokens import DraftRows, DraftTokens, concatenate
from engine.model_runner import ModelRunner
from engine.sampling_tensors import SamplingTensors, penalized
from engine.slots import DeviceSlots, SlotPool
from engine.step import Pass, PassKind, Row, Sampled, Wanted, begin_passes
from engine.step_costs import StepCosts
from kernels.logprobs import token_logprobs
from kernels.penalties import Penalties, TokenHistory
from kernels.rejection_sample import RejectionSample, rejection_sample
from kernels.step_rows import advance_slots
from outrider.protocol.sampling_parameters import SamplingParameters
from verifier_service.decode_graph import MAX_STEPS_IN_FLIGHT, DecodeGraphs
from verifier_service.passes import DevicePass, RowLogprobs

logger = logging.getLogger(__name__)

_WARNING_SECONDS = 60.0

# From so many tokens of prompts on, what decodes rides along with them instead of in a graph ahead of them. There its
# tokens cost what they take to compute, and in a graph a whole reading of the weights; but its results come no earlier
# than the prompts'. A pass without a graph takes at least as long as its launches, so a graph ahead of it is free if
# both together are through by then. An 8B model on an H200: launches take 12 ms, a graph 5 ms, a prompt's token 22 us.
MIN_PROMPT_TOKENS_TO_RIDE = 320


class TargetExecutor:
    """The executor over a target model, with CUDA graphs once `capture` was called. Belongs to the engine's thread."""

    def __init__(
        self,
        runner: ModelRunner,
        *,
        max_rows: int,
        max_draft_tokens: int,
        num_candidates: int,
        chooses_drafts: bool = False,
    ) -> None:
        """Room for so many sequences at once. `chooses_drafts`: how many draft tokens a step verifies is chosen by what
        that costs, which is measured when graphs are made."""
        self._runner = runner
        self._device = runner.device
        self._max_rows = max_rows
        self._max_draft_tokens = max_draft_tokens
        self._num_candidates = num_candidates
        self._chooses_drafts = chooses_drafts
        max_blocks = -(-runner.max_length // runner.block_size)
        self._device_slots = DeviceSlots(
            max_rows, max_blocks=max_blocks, vocab_size=runner.vocab_size, device=runner.device
        )
        self._graphs: DecodeGraphs | None = None
        self._next_warning = 0.0
        self.max_in_flight = 1
        # What steps cost by their rows; None where nobody has measured it.
        self.costs: StepCosts | None = None

    def use_graphs(self, pool: GraphPool | None) -> None:
        """From now on, what decodes runs in graphs; without a pool they are not recorded, and run as they are."""
        self._graphs = DecodeGraphs(
            self._runner,
            self._device_slots,
            max_rows=self._max_rows,
            max_draft_tokens=self._max_draft_tokens,
            num_candidates=self._num_candidates,
            has_shorter=self._chooses_drafts,
        )
        self.max_in_flight = MAX_STEPS_IN_FLIGHT
        if pool is not None:
            self._graphs.capture(pool)
            if self._chooses_drafts:
                self.costs = self._graphs.costs()

    @property
    def has_graphs(self) -> bool:
        """Whether decoding runs in graphs."""
        return self._graphs is not None

    def can_overlap(self, row: Row) -> bool:
        """Whether the row may be submitted while a step with its slot is not collected.

        A row that begins with a token that the host does not know needs a graph, and penalties need that token. Nothing
        follows a step that failed before the device had it: where that would write, only the slot's last sequence knew.
        """
        return self._graphs is not None and not row.slot.is_lost and (row.history is None or not row.is_chained)

    def submit(self, rows: Sequence[Row]) -> list[Pass[Sampled]]:
        """Begin a step; what goes wrong with one of its passes is told by this pass."""
        in_graph = [] if _ride(rows) else [index for index, row in enumerate(rows) if self._fits(row)]
        others = sorted(set(range(len(rows))).difference(in_graph))
        graph_part = PassKind.GRAPH, in_graph, self._run_graph
        return begin_passes(rows, (graph_part, (PassKind.EAGER, others, self._run_eagerly)))

    def warm_up(self) -> None:
        """Sample once in each way that has kernels of its own and no graph: with penalties, and log-probabilities.

        Overwrites the cache and the slots: call it before the first sequence.
        """
        blocks = BlockManager(self._runner.num_blocks, self._runner.block_size)
        pool = SlotPool(self._max_rows)
        self._next_warning = time.monotonic() + _WARNING_SECONDS  # what runs here without a graph is meant to
        for top_p, num_drafts in product((1.0, 0.5), (0, self._max_draft_tokens)):
            table = BlockTable()
            blocks.grow(table, 1 + num_drafts)
            sampling = SamplingParameters(temperature=1.0, top_p=top_p, presence_penalty=1.0)
            none = np.empty((num_drafts, 0), np.int32)
            row = Row(
                slot=(slot := pool.take()),
                sampling=sampling,
                blocks=table,
                start=0,
                token_ids=[0],
                drafts=DraftTokens.of([0] * num_drafts, DraftRows(np.zeros(num_drafts, np.int32), none, none)),
                num_logprobs=0,
                history=TokenHistory([0]),
            )
            for indexes, run in (([0], self._run_graph), ([0], self._run_eagerly)):
                if self._graphs is not None or run == self._run_eagerly:
                    run(indexes, [row]).collect()
            blocks.free(table)
            pool.give_back(slot)

    def _run_graph(self, indexes: Sequence[int], rows: Sequence[Row]) -> Pass[Sampled]:
        assert self._graphs is not None
        graph = self._graphs.prepare(rows)
        graph.launch()
        is_kept = [row.history is not None or row.num_logprobs is not None for row in rows]
        logprobs = None
        if any(is_kept):
            places = list(accumulate((1 + len(row.drafts.token_ids) for row in rows), initial=0))
            kept = [place for place, is_wanted in enumerate(is_kept) if is_wanted]
            where = [range(places[place], places[place + 1]) for place in kept]
            logits = self._graphs.kept_logits.index_select(0, self._put(np.concatenate(where)))
            logprobs = self._sample_kept(graph.results, kept, [rows[place] for place in kept], logits)
        is_sampled = [True] * len(rows)
        return DevicePass(indexes, PassKind.GRAPH, graph.download(), is_sampled, logprobs, self._event())

    @torch.inference_mode()
    def _sample_kept(
        self,
        results: torch.Tensor,  # [num_rows, n + 1] int32, changed where there are penalties
        kept: Sequence[int],  # places of rows among `results`
        rows: Sequence[Row],  # those that are kept
        logits: torch.Tensor,  # [tokens of the rows, vocab_size]
    ) -> RowLogprobs | None:
        """What graphs leave out: penalties, for which the rows are sampled anew, and log-probabilities."""
        starts = list(accumulate((1 + len(row.drafts.token_ids) for row in rows), initial=0))
        penalized_rows = [place for place, row in enumerate(rows) if row.history is not None]
        if penalized_rows:
            concerned = [rows[place] for place in penalized_rows]
            where = np.concatenate([range(starts[place], starts[place + 1]) for place in penalized_rows])
            found = self._sample(logits.index_select(0, self._put(where)), concerned, results.shape[1])
            results.index_copy_(0, self._put(np.array([kept[place] for place in penalized_rows])), found)
        return self._logprobs(results[self._put(np.array(kept))], kept, rows, logits)

    @torch.inference_mode()
    def _run_eagerly(self, indexes: Sequence[int], rows: Sequence[Row]) -> Pass[Sampled]:
        num_unfit = sum(not (_is_prompt(row) or self._fits(row)) for row in rows)
        if self._graphs is not None and num_unfit:
            self._warn(num_unfit)
        logits = self._runner.execute([self._slice(row) for row in rows], lambda batch: self._continue_in(batch, rows))
        is_sampled = [row.wanted is Wanted.TOKENS for row in rows]
        places = [place for place, is_wanted in enumerate(is_sampled) if is_wanted]
        kind = PassKind.EAGER if num_unfit else PassKind.PROMPT
        if not places:
            return DevicePass(indexes, kind, np.zeros((len(rows), 1), np.int32), is_sampled, None, self._event())
        sampled = [rows[place] for place in places]
        found = self._sample(logits, sampled, 0)
        logprobs = self._logprobs(found, places, sampled, logits)
        results = torch.zeros((len(rows), found.shape[1]), dtype=torch.int32, device=self._device)
        results.index_copy_(0, self._put(np.array(places)), found)
        return DevicePass(indexes, kind, self._to_host(results), is_sampled, logprobs, self._event())

    def _sample(
        self,
        logits: torch.Tensor,  # [tokens of the rows behind their first, and one more each, vocab_size]
        rows: Sequence[Row],
        width: int,  # of the results; 0: as wide as they are
    ) -> torch.Tensor:  # [len(rows), width] int32: number of accepted draft tokens, then the tokens
        """Sample rows, and move their slots on."""
        tensors = SamplingTensors.build(
            [row.sampling for row in rows],
            positions=[row.start + len(row.token_ids) for row in rows],
            is_coupled=[row.is_coupled for row in rows],
            vocabulary_size=self._runner.vocab_size,
            device=self._device,
        )
        chained = [place for place, row in enumerate(rows) if row.is_chained]
        if chained:
            slots = np.array([rows[place].slot.index for place in chained])
            lengths = self._device_slots.state.lengths[self._put(slots)]
            tensors.positions.index_copy_(0, self._put(np.array(chained)), lengths)
        num_drafts = [len(row.drafts.token_ids) for row in rows]
        # In a graph's shapes where there are graphs: others would be other kernels, which the first of them waits for.
        most, min_candidates = max(num_drafts), 0
        if self._graphs is not None:
            min_candidates = self._num_candidates
            if 0 < most < self._max_draft_tokens:
                most = self._max_draft_tokens
        drafts = concatenate([row.drafts for row in rows], min_candidates=min_candidates)
        cu_num_drafts = np.cumsum([0, *num_drafts], dtype=np.int32)
        sample = rejection_sample(
            logits,
            self._put(cu_num_drafts),
            self._put(drafts.token_ids),
            self._put(drafts.candidate_ids),
            self._put(drafts.candidate_weights),
            tensors.temperature,
            tensors.seeds,
            tensors.positions,
            max_num_draft_tokens=most,
            top_k=tensors.top_k,
            top_p=tensors.top_p,
            min_p=tensors.min_p,
            is_coupled=tensors.is_coupled,
            penalties=Penalties.build(
                [
                    penalized(place, row.sampling, row.history)
                    for place, row in enumerate(rows)
                    if row.history is not None
                ],
                cu_num_drafts,
                drafts.token_ids,
                self._device,
            ),
        )
        return self._advance(rows, tensors.positions, sample, width)

    def _advance(
        self, rows: Sequence[Row], positions: torch.Tensor, sample: RejectionSample, width: int
    ) -> torch.Tensor:  # [len(rows), width] int32
        shape = (len(rows), max(width, sample.token_ids.shape[1] + 1))
        results = torch.zeros(shape, dtype=torch.int32, device=self._device)
        slots = self._put(np.array([row.slot.index for row in rows], np.int32))
        part = results[:, : sample.token_ids.shape[1] + 1]
        advance_slots(self._device_slots.state, slots, positions, sample.num_accepted, sample.token_ids, part)
        return results

    def _logprobs(
        self,
        results: torch.Tensor,  # [len(rows), n + 1] int32
        places: Sequence[int],  # of the rows in their pass
        rows: Sequence[Row],
        logits: torch.Tensor,  # [1 + number of draft tokens of each row, together, vocab_size]
    ) -> RowLogprobs | None:
        most = max((row.num_logprobs for row in rows if row.num_logprobs is not None), default=None)
        if most is None:
            return None
        lens = [1 + len(row.drafts.token_ids) for row in rows]
        starts = list(accumulate(lens, initial=0))
        wanted = [index for index, row in enumerate(rows) if row.num_logprobs is not None]
        owners = np.concatenate([np.full(lens[index], index) for index in wanted])
        offsets = np.concatenate([np.arange(lens[index]) for index in wanted])
        where = np.concatenate([np.arange(starts[index], starts[index + 1]) for index in wanted])
        # Behind the last token that is committed stands -1, and what is found for it is not read.
        tokens = results[self._put(owners), self._put(offsets + 1)].clamp(min=0)
        found = token_logprobs(logits.index_select(0, self._put(where)), tokens, most)
        first_of_each = np.cumsum([0, *(lens[index] for index in wanted)]).tolist()
        return RowLogprobs(
            {
                places[index]: (first, rows[index].num_logprobs or 0)
                for index, first in zip(wanted, first_of_each, strict=False)
            },
            self._to_host(found.chosen),
            self._to_host(found.top_token_ids),
            self._to_host(found.top_logprobs),
        )

    def _put(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        """On the device, in a copy that nobody waits for."""
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self._device.type != "cuda":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)

    def _to_host(self, tensor: torch.Tensor) -> npt.NDArray[Any]:
        """On the host as soon as the device has come so far."""
        if self._device.type != "cuda":
            return tensor.numpy()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True).numpy()

    def _event(self) -> torch.cuda.Event | None:
        """Of all that was launched so far."""
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _warn(self, num_rows: int) -> None:
        if (now := time.monotonic()) >= self._next_warning:
            self._next_warning = now + _WARNING_SECONDS
            logger.warning(
                "%d sequences decode without a CUDA graph: graphs hold %d draft tokens of %d candidates",
                num_rows,
                self._max_draft_tokens,
                self._num_candidates,
            )

    def _continue_in(self, batch: Batch, rows: Sequence[Row]) -> None:
        chained = [place for place, row in enumerate(rows) if row.is_chained]
        if chained:
            slots = [rows[place].slot for place in chained]
            self._device_slots.continue_in(batch, chained, slots, block_size=self._runner.block_size)

    def _fits(self, row: Row) -> bool:
        return self._graphs is not None and self._graphs.fits(row)

    def _slice(self, row: Row) -> SequenceSlice:
        token_ids, start = [*row.token_ids, *row.drafts.token_ids], row.start
        if row.is_chained:
            # Only the device knows which token, and where: at the furthest position, so that all blocks are there.
            token_ids, start = [0], min(len(row.blocks) * self._runner.block_size, self._runner.max_length) - 1
        return SequenceSlice(
            token_ids=token_ids,
            start=start,
            block_ids=row.blocks,
            # The last committed token's row decides the first draft token's position, a draft token's the one behind.
            num_logit_rows=1 + len(row.drafts.token_ids) if row.wanted is Wanted.TOKENS else 0,
        )


def _is_prompt(row: Row) -> bool:
    return row.wanted is Wanted.NOTHING or len(row.token_ids) > 1


def _ride(rows: Sequence[Row]) -> bool:
    """Whether what decodes runs in one pass with the prompts.

    What follows a step in flight always does: while the device works on that, launches take no time of it.
    """
    num_prompt_tokens = sum(len(row.token_ids) for row in rows if _is_prompt(row))
    return num_prompt_tokens >= MIN_PROMPT_TOKENS_TO_RIDE or (
        num_prompt_tokens > 0 and any(row.is_chained for row in rows)
    )
