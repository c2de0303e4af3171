"""Drafts with a draft model: catch up with the target, then K forward passes, for all sequences at once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from operator import attrgetter

import numpy as np
import numpy.typing as npt
import torch

from drafter_service.draft_graph import DraftGraphs
from drafter_service.drafter import Draft, NoDraft
from drafter_service.sequence import DraftSequence
from engine.batch import SequenceSlice
from engine.block_manager import BlockManager
from engine.cuda_graph import GraphPool
from engine.late_compilation import warn_of_late_compilation
from engine.model_runner import ModelRunner
from engine.sampling_tensors import SamplingTensors, new_history, penalized
from kernels.draft_sample import DraftSample, draft_sample
from kernels.limits import MAX_DRAFT_TOKENS
from kernels.penalties import Penalties, TokenHistory
from kernels.shape_logits import apply_penalties
from outrider.protocol.sampling_parameters import SamplingParameters
from outrider.service.logs import about
from outrider.v1 import drafter_pb2

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Planned:
    sequence: DraftSequence
    num_new: int  # tokens to compute in the first forward pass
    num_draft_tokens: int  # 0 while the prompt is not finished


class ModelDrafter:
    """A draft model over a paged KV cache of its own.

    Sequences that do not want a draft keep their cache until somebody else needs the blocks; what was evicted is
    computed again when it is wanted, so a full cache costs time and never a sequence.
    """

    kind = "model"

    def __init__(
        self,
        make_runner: Callable[[], ModelRunner],
        *,
        name: str,
        revision: str,
        tokenizer_fingerprint: str,
        max_num_batched_tokens: int,
        num_candidates: int,
        make_graphs: Callable[[ModelRunner], DraftGraphs] | None = None,
    ) -> None:
        self._make_runner = make_runner
        self._make_graphs = make_graphs
        self._graphs: DraftGraphs | None = None
        self.name = name
        self.revision = revision
        self.tokenizer_fingerprint = tokenizer_fingerprint
        self.vocabulary_size = 0
        self.max_length = 0
        self._max_num_batched_tokens = max_num_batched_tokens
        self._num_candidates = num_candidates
        # Who holds blocks, and in which round it was last drafted: the longest ago is evicted first.
        self._holding: dict[DraftSequence, int] = {}
        self._round = 0

    def load(self) -> None:
        """Load the model, size the cache and warm up."""
        self._runner = self._make_runner()
        self._blocks = BlockManager(self._runner.num_blocks, self._runner.block_size)
        self.vocabulary_size = self._runner.vocab_size
        self.max_length = min(self._runner.max_length, self._runner.num_blocks * self._runner.block_size)
        self._runner.warm_up()
        if self._make_graphs is not None and self._runner.device.type == "cuda":
            self._graphs = self._make_graphs(self._runner)
            self._graphs.capture(GraphPool(self._runner.device))
        self._warm_up_sampling()
        if self._graphs is not None:
            warn_of_late_compilation()

    def _warm_up_sampling(self) -> None:
        """Sample once in each way that has kernels of its own; graphs know nothing of penalties."""
        logits = self._runner.execute([SequenceSlice([0], 0, [0], 1)])
        for top_p, penalty in product((1.0, 0.5), (0.0, 1.0)):
            sampling = SamplingParameters(temperature=1.0, top_p=top_p, presence_penalty=penalty)
            sequence = DraftSequence(0, [0], 1, sampling, max_draft_tokens=1, wants_candidates=True)
            item = _Planned(sequence, 1, 1)
            self._sample(logits, [item], {id(item): _Rows(sequence)})

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self._runner.device

    @property
    def num_kv_blocks(self) -> int:
        """KV-cache blocks in all."""
        return self._blocks.num_blocks

    @property
    def num_free_kv_blocks(self) -> int:
        """KV-cache blocks that hold nothing."""
        return self._blocks.num_free

    def release(self, sequence: DraftSequence) -> None:
        """Free the sequence's blocks."""
        self._blocks.free(sequence.block_ids)
        self._holding.pop(sequence, None)
        sequence.num_computed = 0

    def draft(self, wanting: Sequence[DraftSequence]) -> Sequence[Draft | NoDraft]:
        """One round: what is missing of every sequence, prompts in chunks, then up to K tokens for those caught up."""
        refused = [sequence for sequence in wanting if sequence.length >= self.max_length]
        answers: list[Draft | NoDraft] = [
            NoDraft(sequence, drafter_pb2.NO_PROPOSAL_REASON_MAX_LENGTH) for sequence in refused
        ]
        planned = self._plan([sequence for sequence in wanting if sequence.length < self.max_length])
        if self._graphs is not None:
            # Drafting replays a graph; prompts and what else has no graph follow step by step.
            fitting: list[_Planned] = []
            others: list[_Planned] = []
            for item in planned:
                (fitting if self._graphs.fits(item.sequence, item.num_draft_tokens) else others).append(item)
            if fitting:
                answers += self._graphs.run(
                    [item.sequence for item in fitting], [item.num_draft_tokens for item in fitting]
                )
            planned = others
        if planned:
            answers += self._run(planned)
        return answers

    def _plan(self, wanting: Sequence[DraftSequence]) -> list[_Planned]:
        planned: list[_Planned] = []
        self._round += 1
        budget, block_size = self._max_num_batched_tokens, self._blocks.block_size
        # Longer proposals would be made without a graph, step by step, while everybody else's wait.
        most = self._graphs.max_draft_tokens if self._graphs is not None else MAX_DRAFT_TOKENS
        # Those that miss little go first: a target waits for them, and a long prompt fills what they leave.
        for sequence in sorted(wanting, key=attrgetter("num_missing")):
            if budget == 0:
                break
            # Counted anew: one that came before may have evicted this one.
            length, missing = sequence.length, sequence.num_missing
            if missing > budget:
                num_new, num_draft_tokens = budget, 0
                needed = sequence.num_computed + budget
            else:
                num_new, num_draft_tokens = missing, min(sequence.max_draft_tokens, most, self.max_length - length)
                # The last draft token's key and value are computed only if it is accepted, by the next catch-up.
                needed = length + num_draft_tokens - 1
            if needed > len(sequence.block_ids) * block_size and not self._make_room(sequence, needed):
                # Those planned hold what is missing and will be idle after this round.
                continue
            planned.append(_Planned(sequence, num_new, num_draft_tokens))
            self._holding[sequence] = self._round
            budget -= num_new
        return planned

    def _make_room(self, sequence: DraftSequence, num_tokens: int) -> bool:
        while not self._blocks.grow(sequence.block_ids, num_tokens):
            idle = [held for held, number in self._holding.items() if number < self._round and held is not sequence]
            if not idle:
                return False
            victim = min(idle, key=self._holding.__getitem__)
            with about(victim.subject):
                logger.debug("evicting the cache of a sequence")
            self.release(victim)
        return True

    def _run(self, planned: list[_Planned]) -> list[Draft | NoDraft]:
        slices = [
            SequenceSlice(
                token_ids=item.sequence.token_ids[(start := item.sequence.num_computed) : start + item.num_new],
                start=item.sequence.num_computed,
                block_ids=item.sequence.block_ids,
                num_logit_rows=1 if item.num_draft_tokens else 0,
            )
            for item in planned
        ]
        logits = self._runner.execute(slices)
        for item in planned:
            item.sequence.num_computed += item.num_new
        drafting = [item for item in planned if item.num_draft_tokens]
        rows = {id(item): _Rows(item.sequence) for item in drafting}
        active = drafting
        while active:
            sample = self._sample(logits, active, rows)
            for item, (token_id, ids, weights) in zip(active, sample, strict=True):
                rows[id(item)].append(token_id, ids, weights)
            active = [item for item in active if len(rows[id(item)].token_ids) < item.num_draft_tokens]
            if active:
                logits = self._runner.execute([self._next_slice(item, rows[id(item)]) for item in active])
                for item in active:
                    item.sequence.num_computed += 1
        return [rows[id(item)].draft(item.sequence) for item in drafting]

    def _next_slice(self, item: _Planned, rows: _Rows) -> SequenceSlice:
        return SequenceSlice(
            token_ids=[rows.token_ids[-1]],
            start=item.sequence.num_computed,
            block_ids=item.sequence.block_ids,
            num_logit_rows=1,
        )

    def _sample(
        self,
        logits: torch.Tensor,  # [len(active), vocab_size]
        active: list[_Planned],
        rows: dict[int, _Rows],
    ) -> list[tuple[int, npt.NDArray[np.int32] | None, npt.NDArray[np.uint16] | None]]:
        drafted = [rows[id(item)].token_ids for item in active]
        tensors = SamplingTensors.build(
            [item.sequence.sampling for item in active],
            positions=[item.sequence.length + len(tokens) for item, tokens in zip(active, drafted, strict=True)],
            vocabulary_size=self.vocabulary_size,
            device=self._runner.device,
        )
        sample = draft_sample(
            _penalize(logits, [item.sequence for item in active], [rows[id(item)].history for item in active]),
            tensors.temperature,
            tensors.seeds,
            tensors.positions,
            top_k=tensors.top_k,
            top_p=tensors.top_p,
            min_p=tensors.min_p,
            num_candidates=self._num_candidates,
            out=self._sample_of(len(active)),
        )
        token_ids = sample.token_ids.tolist()
        candidate_ids = sample.candidate_ids.cpu().numpy()
        candidate_weights = sample.candidate_weights.cpu().numpy().view(np.uint16)
        return [
            (token_id, candidate_ids[row], candidate_weights[row])
            if item.sequence.wants_candidates
            else (token_id, None, None)
            for row, (item, token_id) in enumerate(zip(active, token_ids, strict=True))
        ]

    def _sample_of(self, batch_size: int) -> DraftSample:
        """Room for so many draft tokens, in the types that graphs have: another type would be another kernel."""
        new = partial(torch.empty, device=self._runner.device)
        shape = (batch_size, self._num_candidates)
        return DraftSample(
            new(batch_size, dtype=torch.int32), new(shape, dtype=torch.int32), new(shape, dtype=torch.int16)
        )


def _penalize(
    logits: torch.Tensor,  # [len(sequences), vocab_size]
    sequences: Sequence[DraftSequence],
    histories: Sequence[TokenHistory | None],
) -> torch.Tensor:  # [len(sequences), vocab_size]
    """Shape q as the target will shape p, so that more is accepted; exact it need not be."""
    concerned = [
        penalized(index, sequence.sampling, history)
        for index, (sequence, history) in enumerate(zip(sequences, histories, strict=True))
        if history is not None
    ]
    no_drafts = np.zeros(len(sequences) + 1, dtype=np.int32)
    penalties = Penalties.build(concerned, no_drafts, no_drafts[:0], logits.device)
    if penalties is None:
        return logits
    no_draft_ids = torch.empty(0, dtype=torch.int32, device=logits.device)
    return apply_penalties(logits, penalties, no_draft_ids).dense(slice(None))


class _Rows:
    """The draft of one sequence while it grows."""

    def __init__(self, sequence: DraftSequence) -> None:
        self.token_ids: list[int] = []
        # Counts the draft tokens too; made anew for each draft, as most of them never become part of the sequence.
        self.history = new_history(sequence.sampling, sequence.token_ids, sequence.num_prompt_tokens)
        self._candidate_ids: list[npt.NDArray[np.int32]] = []
        self._candidate_weights: list[npt.NDArray[np.uint16]] = []

    def append(self, token_id: int, ids: npt.NDArray[np.int32] | None, weights: npt.NDArray[np.uint16] | None) -> None:
        self.token_ids.append(token_id)
        if self.history is not None:
            self.history.append([token_id])
        if ids is not None and weights is not None:
            self._candidate_ids.append(ids)
            self._candidate_weights.append(weights)

    def draft(self, sequence: DraftSequence) -> Draft:
        if not self._candidate_ids:
            return Draft(sequence, self.token_ids)
        return Draft(sequence, self.token_ids, np.stack(self._candidate_ids), np.stack(self._candidate_weights))
