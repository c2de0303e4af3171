"""Drafts with a draft model, in turns with the target: catch up with it, then K passes, for all sequences at once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import torch

from drafter_service.chain_drafter import chains
from drafter_service.draft_graph import MAX_CATCH_UP
from drafter_service.drafter import Drafts, Expanded, NoDraft
from drafter_service.executor import DraftExecutor
from drafter_service.fairness import take_turns
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
from outrider.protocol.wire import MAX_EXPANSIONS
from outrider.service.logs import about
from outrider.v1 import drafter_pb2

logger = logging.getLogger(__name__)

# The probability of every child, in units of 1/65,536: nobody asks for more where turns are taken.
_NO_ESTIMATE = 1 << 15


@dataclass(eq=False, slots=True)
class _Held:
    """What a sequence has of the model's memory."""

    slot: Slot
    last_round: int = 0  # in which it was last drafted for
    history: TokenHistory | None = None  # token counts for penalties, from when it is first drafted for


@dataclass(eq=False, slots=True)
class _Owed:
    """What a sequence's verifier knows of its drafts, and whether it waits for some."""

    is_wanted: bool = False  # a verdict has come; before the first, only the prompt is computed
    next_id: int = 0  # of its next expansion
    proposed: Sequence[int] = ()  # the chain behind the committed tokens, which the next verdict is about


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
        self._owed: dict[DraftSequence, _Owed] = {}
        # Who has something to be computed, in the order in which they came to.
        self._wanting: dict[DraftSequence, None] = {}
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
        return DraftLimits(most, self._executor.num_candidates, max_expansions=MAX_EXPANSIONS, takes_turns=True)

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

    @property
    def has_work(self) -> bool:
        """Whether a prompt is to be computed, or a verdict to be answered."""
        return bool(self._wanting)

    def open(self, sequence: DraftSequence) -> None:
        """The prompt is computed, but for its last token; what follows it, once the first verdict has come."""
        self._owed[sequence] = _Owed()
        if _num_to_compute(sequence, is_wanted=False):
            self._wanting[sequence] = None

    def commit(self, sequence: DraftSequence, token_ids: Sequence[int]) -> None:
        """Forget what was computed for draft tokens that were not accepted; an answer is wanted."""
        owed = self._owed[sequence]
        num_accepted = _num_alike(owed.proposed, token_ids)
        # Keys and values from there on were computed for tokens that are no part of the sequence. The last token is
        # computed in any case, as drafts are made of what follows from it.
        base = sequence.length - len(token_ids)
        sequence.num_computed = min(sequence.num_computed, base + num_accepted, sequence.length - 1)
        owed.proposed, owed.is_wanted = (), True
        self._wanting[sequence] = None

    def release(self, sequence: DraftSequence) -> None:
        """Free what the sequence has of the model's memory, and forget it."""
        self._evict(sequence)
        self._owed.pop(sequence, None)
        self._wanting.pop(sequence, None)

    def draft(self) -> Drafts:
        """One round: what is missing of every sequence, prompts in chunks, then up to K tokens for those caught up."""
        refusals = [
            NoDraft(sequence, drafter_pb2.REFUSAL_REASON_MAX_LENGTH)
            for sequence in self._wanting
            if sequence.length >= self.max_length
        ]
        for refusal in refusals:
            del self._wanting[refusal.sequence]
        planned = self._in_turn(self._plan(list(self._wanting)))
        answers: list[tuple[DraftSequence, Drafted]] = []
        for part in self._executor.submit([item.row for item in planned]):
            for index, drafted in zip(part.rows, part.collect(), strict=True):
                item = planned[index]
                sequence = item.sequence
                sequence.num_computed += item.num_new
                if drafted is not None:
                    # The last token is sampled but not computed; what a graph computes beyond it for a longer neighbour
                    # is overwritten later, like rejected tokens.
                    sequence.num_computed += item.num_draft_tokens - 1
                    answers.append((sequence, drafted))
                    del self._wanting[sequence]
                elif not _num_to_compute(sequence, is_wanted=self._owed[sequence].is_wanted):
                    del self._wanting[sequence]
        return Drafts(self._expanded(answers), refusals, list(self._wanting))

    def _expanded(self, answers: Sequence[tuple[DraftSequence, Drafted]]) -> list[Expanded]:
        """The chains, each of which begins anew at what is committed; those with candidates apart from the others."""
        found = []
        for wants_candidates in (False, True):
            # Who takes fewer candidates than the model's has no weight in those that are cut.
            chosen = [answer for answer in answers if answer[0].wants_candidates is wants_candidates]
            if not chosen:
                continue
            all_owed = [self._owed[sequence] for sequence, _ in chosen]
            first_ids = [owed.next_id for owed in all_owed]
            for owed, (_, drafted) in zip(all_owed, chosen, strict=True):
                owed.next_id += len(drafted.token_ids)
                owed.proposed = drafted.token_ids
            expanded = chains(
                [sequence for sequence, _ in chosen],
                np.array(first_ids, np.int64),
                np.array([len(drafted.token_ids) for _, drafted in chosen], np.int64),
                np.concatenate([np.array(drafted.token_ids, np.int32) for _, drafted in chosen]),
                probability=_NO_ESTIMATE,
            )
            if wants_candidates:
                expanded.candidate_ids = np.concatenate([drafted.candidate_ids for _, drafted in chosen])
                expanded.candidate_weights = np.concatenate([drafted.candidate_weights for _, drafted in chosen])
            found.append(expanded)
        return found

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
        for sequence in self._in_order(wanting):
            if budget == 0:
                break
            # Counted anew: one that came before may have evicted this one.
            length, missing, is_wanted = sequence.length, sequence.num_missing, self._owed[sequence].is_wanted
            # The last token is left to whoever drafts behind it: a graph, or a later round.
            is_left = not is_wanted or (graphs is not None and missing > MAX_CATCH_UP)
            if is_left or missing > budget:
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

    def _in_order(self, wanting: Sequence[DraftSequence]) -> list[DraftSequence]:
        """Those that miss little go first, as a target waits for them; a long prompt fills what they leave."""
        graphs = self._executor.graphs
        little = [sequence for sequence in wanting if sequence.num_missing <= MAX_CATCH_UP]
        much = [sequence for sequence in wanting if sequence.num_missing > MAX_CATCH_UP]
        much.sort(key=attrgetter("num_missing"))
        num_places = graphs.max_rows if graphs is not None else len(little)
        return [*take_turns(little)[:num_places], *take_turns(much)]

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
            self._evict(victim)
        return True

    def _evict(self, sequence: DraftSequence) -> None:
        self._blocks.free(sequence.block_ids)
        if (held := self._holding.pop(sequence, None)) is not None:
            self._executor.give_back(held.slot)
            self._slots.give_back(held.slot)
        sequence.num_computed = 0


def _row(sequence: DraftSequence, held: _Held, num_new: int, num_draft_tokens: int) -> DraftRow:
    start = sequence.num_computed
    return DraftRow(
        held.slot,
        sequence.sampling,
        sequence.block_ids,
        start=start,
        token_ids=sequence.token_ids[start : start + num_new],
        num_draft_tokens=num_draft_tokens,
        max_candidates=sequence.limits.max_candidates,
        history=_history(sequence, held) if num_draft_tokens else None,
    )


def _history(sequence: DraftSequence, held: _Held) -> TokenHistory | None:
    """Token counts of all that is committed; None for a sequence without penalties."""
    if held.history is None:
        held.history = new_history(sequence.sampling, sequence.token_ids, sequence.num_prompt_tokens)
    else:
        held.history.append(sequence.token_ids[sequence.num_prompt_tokens + held.history.num_outputs :])
    return held.history


def _num_to_compute(sequence: DraftSequence, *, is_wanted: bool) -> int:
    """How many committed tokens are to be computed now; before the first verdict the last one is left."""
    return sequence.num_missing - (not is_wanted)


def _num_alike(proposed: Sequence[int], committed: Sequence[int]) -> int:
    """How many tokens both begin with."""
    for index, (one, other) in enumerate(zip(proposed, committed, strict=False)):
        if one != other:
            return index
    return min(len(proposed), len(committed))
