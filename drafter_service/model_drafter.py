"""Drafts with a draft model: catch up with the target, then K forward passes, for all sequences at once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch

from drafter_service.draft_graph import MAX_CATCH_UP
from drafter_service.drafter import Draft, NoDraft
from drafter_service.executor import DraftExecutor
from drafter_service.sequence import DraftSequence
from engine.block_manager import BlockManager
from engine.cuda_graph import GraphPool
from engine.late_compilation import warn_of_late_compilation
from engine.model_runner import ModelRunner
from engine.sampling_tensors import new_history
from engine.slots import Slot, SlotPool
from engine.step import Drafted, DraftRow
from kernels.limits import MAX_DRAFT_TOKENS
from kernels.penalties import TokenHistory
from outrider.protocol.fingerprint import TokenizerDigest
from outrider.protocol.handshake import DraftLimits
from outrider.service.logs import about
from outrider.v1 import drafter_pb2

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Held:
    """What a sequence has of the model's memory."""

    slot: Slot
    last_round: int = 0  # in which it was last drafted for
    history: TokenHistory | None = None  # token counts for penalties, from when it is first drafted for


@dataclass(eq=False, slots=True)
class _Planned:
    sequence: DraftSequence
    num_new: int  # tokens to compute in the first forward pass
    num_draft_tokens: int  # 0 while the prompt is not finished
    row: DraftRow


class ModelDrafter:
    """A draft model over a paged KV cache of its own.

    Sequences that do not want a draft keep their cache until somebody else needs the blocks; what was evicted is
    computed again when it is wanted, so a full cache costs time and never a sequence.
    """

    kind = "model"

    def __init__(
        self,
        make_runner: Callable[[], ModelRunner],
        make_executor: Callable[[ModelRunner], DraftExecutor],
        *,
        name: str,
        revision: str,
        tokenizer: TokenizerDigest,
        max_num_batched_tokens: int,
        max_sequences: int,
        has_graphs: bool,
    ) -> None:
        """`has_graphs` where the device is one that can have them."""
        self._make_runner = make_runner
        self._make_executor = make_executor
        self._has_graphs = has_graphs
        self.name = name
        self.revision = revision
        self.tokenizer = tokenizer
        self.vocabulary_size = 0
        self.max_length = 0
        self._max_num_batched_tokens = max_num_batched_tokens
        self._slots = SlotPool(max_sequences)
        # Who holds blocks: the one that was drafted for the longest ago is evicted first.
        self._holding: dict[DraftSequence, _Held] = {}
        self._round = 0
        self._was_put_off = False

    def load(self) -> None:
        """Load the model, size the cache and warm up."""
        self._runner = self._make_runner()
        self._blocks = BlockManager(self._runner.num_blocks, self._runner.block_size)
        self.vocabulary_size = self._runner.vocab_size
        self.max_length = min(self._runner.max_length, self._runner.num_blocks * self._runner.block_size)
        self._executor = self._make_executor(self._runner)
        self._runner.warm_up()
        has_graphs = self._has_graphs and self._runner.device.type == "cuda"
        if has_graphs:
            self._executor.use_graphs(GraphPool(self._runner.device))
        self._executor.warm_up()
        if has_graphs:
            warn_of_late_compilation()

    @property
    def limits(self) -> DraftLimits:
        """Without graphs, as many draft tokens as anybody may ask for."""
        graphs = self._executor.graphs
        most = graphs.max_draft_tokens if graphs is not None else MAX_DRAFT_TOKENS
        return DraftLimits(most, self._executor.num_candidates)

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
        """Free what the sequence has of the model's memory."""
        self._blocks.free(sequence.block_ids)
        if (held := self._holding.pop(sequence, None)) is not None:
            self._executor.give_back(held.slot)
            self._slots.give_back(held.slot)
        sequence.num_computed = 0

    def draft(self, wanting: Sequence[DraftSequence]) -> Sequence[Draft | NoDraft]:
        """One round: what is missing of every sequence, prompts in chunks, then up to K tokens for those caught up."""
        answers: list[Draft | NoDraft] = [
            NoDraft(sequence, drafter_pb2.NO_PROPOSAL_REASON_MAX_LENGTH)
            for sequence in wanting
            if sequence.length >= self.max_length
        ]
        planned = self._in_turn(self._plan([sequence for sequence in wanting if sequence.length < self.max_length]))
        for part in self._executor.submit([item.row for item in planned]):
            for index, drafted in zip(part.rows, part.collect(), strict=True):
                item = planned[index]
                item.sequence.num_computed += item.num_new
                if drafted is not None:
                    # The last token is sampled but not computed; what a graph computes beyond it for a longer neighbour
                    # is overwritten later, like rejected tokens.
                    item.sequence.num_computed += item.num_draft_tokens - 1
                    answers.append(_answer(item.sequence, drafted))
        return answers

    def _in_turn(self, planned: list[_Planned]) -> list[_Planned]:
        """Those of this round: what a graph holds does not wait for prompts, which come in every other round then."""
        in_graph = [item for item in planned if self._executor.fits(item.row)]
        if not in_graph or len(in_graph) == len(planned):
            self._was_put_off = False
            return planned
        self._was_put_off = not self._was_put_off
        return in_graph if self._was_put_off else [item for item in planned if not self._executor.fits(item.row)]

    def _plan(self, wanting: Sequence[DraftSequence]) -> list[_Planned]:
        planned: list[_Planned] = []
        self._round += 1
        budget, block_size = self._max_num_batched_tokens, self._blocks.block_size
        graphs = self._executor.graphs
        num_places = graphs.max_rows if graphs is not None else len(wanting)
        # Those that miss little go first: a target waits for them, and a long prompt fills what they leave.
        for sequence in sorted(wanting, key=attrgetter("num_missing"))[:num_places]:
            if budget == 0:
                break
            # Counted anew: one that came before may have evicted this one.
            length, missing = sequence.length, sequence.num_missing
            # A prompt leaves its last token to a graph, which drafts behind it.
            is_left = graphs is not None and missing > MAX_CATCH_UP
            if missing - is_left > budget or is_left:
                num_new, num_draft_tokens = min(missing - is_left, budget), 0
                needed = sequence.num_computed + num_new
            else:
                num_new, num_draft_tokens = missing, min(sequence.max_draft_tokens, self.max_length - length)
                # The last draft token's key and value are computed only if it is accepted, by the next catch-up.
                needed = length + num_draft_tokens - 1
            if needed > len(sequence.block_ids) * block_size and not self._make_room(sequence, needed):
                # Those planned hold what is missing and will be idle after this round.
                continue
            if (held := self._holding.get(sequence)) is None:
                held = self._holding[sequence] = _Held(self._slots.take())
            held.last_round = self._round
            row = _row(sequence, held, num_new, num_draft_tokens)
            planned.append(_Planned(sequence, num_new, num_draft_tokens, row))
            budget -= num_new
        return planned

    def _make_room(self, sequence: DraftSequence, num_tokens: int) -> bool:
        while not self._blocks.grow(sequence.block_ids, num_tokens):
            idle = [
                other
                for other, held in self._holding.items()
                if held.last_round < self._round and other is not sequence
            ]
            if not idle:
                return False
            victim = min(idle, key=lambda other: self._holding[other].last_round)
            with about(victim.subject):
                logger.debug("evicting the cache of a sequence")
            self.release(victim)
        return True


def _row(sequence: DraftSequence, held: _Held, num_new: int, num_draft_tokens: int) -> DraftRow:
    start = sequence.num_computed
    return DraftRow(
        held.slot,
        sequence.sampling,
        sequence.block_ids,
        start=start,
        token_ids=sequence.token_ids[start : start + num_new],
        num_draft_tokens=num_draft_tokens,
        max_candidates=sequence.max_candidates,
        is_coupled=sequence.is_coupled,
        history=_history(sequence, held) if num_draft_tokens else None,
    )


def _history(sequence: DraftSequence, held: _Held) -> TokenHistory | None:
    """Token counts of all that is committed; None for a sequence without penalties."""
    if held.history is None:
        held.history = new_history(sequence.sampling, sequence.token_ids, sequence.num_prompt_tokens)
    else:
        held.history.append(sequence.token_ids[sequence.num_prompt_tokens + held.history.num_outputs :])
    return held.history


def _answer(sequence: DraftSequence, drafted: Drafted) -> Draft:
    if not sequence.wants_candidates:
        return Draft(sequence, drafted.token_ids)
    # What is cut has no weight.
    kept = (slice(None), slice(sequence.max_candidates))
    return Draft(sequence, drafted.token_ids, drafted.candidate_ids[kept], drafted.candidate_weights[kept])
