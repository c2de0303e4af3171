"""Drafts with a draft model: keys of what is committed, then passes over the draft trees of all sequences at once."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from drafter_service.drafter import Drafts, Expanded, NoDraft
from drafter_service.executor import DraftExecutor
from drafter_service.fairness import take_turns
from drafter_service.held import Held
from drafter_service.sequence import DraftSequence
from drafter_service.tree_replay import Grown, TreeReplay
from engine.batch import SequenceSlice
from engine.block_manager import BlockManager
from engine.cuda_graph import GraphPool
from engine.late_compilation import warn_of_late_compilation
from engine.model_runner import ModelRunner
from engine.slots import SlotPool
from outrider.protocol.fingerprint import TokenizerDigest
from outrider.protocol.handshake import DraftLimits
from outrider.service.logs import about
from outrider.v1 import drafter_pb2

logger = logging.getLogger(__name__)

# A tree begins where no more than so many committed tokens are missing, and computes them itself.
_MAX_MISSING = 4
# Tokens of prompts in one pass while others draft, whose verdicts wait for it.
_CHUNK_BESIDE_TREES = 512
# Launches for which a sequence keeps its place while others wait for one.
_TENURE = 64


@dataclass(slots=True)
class _InFlight:
    """A replay that has not been read."""

    replay: TreeReplay
    rows: list[Held]


class ModelDrafter:
    """A draft model over a paged KV cache of its own.

    Where blocks or slots run out, who was drafted for the longest ago loses its keys, which are computed again when
    there is room: a full cache costs time and never a sequence.
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
        num_slots: int,
        takes_turns: bool,
        has_graphs: bool,
    ) -> None:
        """`takes_turns` where it never runs ahead, `has_graphs` where the device is one that can have them."""
        self._make_runner = make_runner
        self._make_executor = make_executor
        self._has_graphs = has_graphs
        self._takes_turns = takes_turns
        self.name = name
        self.revision = revision
        self.tokenizer = tokenizer
        self.vocabulary_size = 0
        self.max_length = 0
        self._max_num_batched_tokens = max_num_batched_tokens
        self._slots = SlotPool(num_slots)
        self._held: dict[DraftSequence, Held] = {}
        # Who is computed, in the order in which places are given; then who has a tree that grows.
        self._computing: dict[DraftSequence, Held] = {}
        self._growing: dict[DraftSequence, Held] = {}
        self._in_flight: deque[_InFlight] = deque()
        self._num_launches = 0
        # Since which launch nobody who is computed has found room.
        self._stuck_since: int | None = None
        self._took_turns_last = False
        self._refusals: list[NoDraft] = []

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
            self._executor.capture(GraphPool(self._runner.device), takes_turns=self._takes_turns or None)
        self._executor.warm_up()
        if has_graphs:
            warn_of_late_compilation()

    @property
    def limits(self) -> DraftLimits:
        """What its graphs make."""
        options = self._executor.options
        return DraftLimits(
            max_draft_tokens=self._executor.max_draft_tokens,
            max_candidates=options.num_candidates,
            num_children=self._executor.num_children,
            max_expansions=options.max_expansions,
            takes_turns=self._takes_turns,
        )

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
        """Whether anything is missing, under way or worth expanding."""
        return bool(self._in_flight or self._computing or self._refusals) or any(
            held.wants_pass for held in self._growing.values()
        )

    def open(self, sequence: DraftSequence) -> None:
        """A sequence is to be drafted for."""
        held = self._held[sequence] = Held(sequence)
        self._computing[sequence] = held
        self._refuse_outgrown(sequence)

    def commit(self, sequence: DraftSequence, token_ids: Sequence[int]) -> None:
        """A verdict has come."""
        self._held[sequence].is_resting = False
        self._refuse_outgrown(sequence)

    def release(self, sequence: DraftSequence) -> None:
        """Free what the sequence has of the model's memory; what a replay under way makes for it is dropped."""
        held = self._held.pop(sequence, None)
        if held is not None:
            held.is_released = True
            self._computing.pop(sequence, None)
            self._give_back(held)

    def draft(self) -> Drafts:
        """Launch a replay over whoever wants one, compute a chunk of what is missing, and read what is done.

        Running ahead on a device that works by itself, one replay is read while the next one runs.
        """
        try:
            drafts = Drafts(refusals=self._refusals)
            self._refusals = []
            launched = self._launch()
            drafts.computing = self._compute()
            most_unread = (
                1 if launched is not None and not launched.takes_turns and self._executor.runs_by_itself else 0
            )
            if self._in_flight and (launched is None or len(self._in_flight) > most_unread):
                in_flight = self._in_flight.popleft()
                grown = in_flight.replay.collect()
                self._take_in(in_flight.rows, grown, drafts)
            return drafts
        except Exception:
            # Whose replays these are is dropped by the engine.
            self._in_flight.clear()
            raise

    def _refuse_outgrown(self, sequence: DraftSequence) -> None:
        if sequence.length >= self.max_length:
            self._refusals.append(NoDraft(sequence, drafter_pb2.REFUSAL_REASON_MAX_LENGTH))
            self.release(sequence)

    # What a replay is launched for.

    def _launch(self) -> Held | None:
        """Launch a replay, if anybody wants one; one of its sequences."""
        wanting = [held for held in self._growing.values() if held.wants_pass]
        self._num_launches += 1
        if not wanting:
            return None
        kinds = {held.takes_turns for held in wanting}
        takes_turns = not self._took_turns_last if len(kinds) == 2 else kinds.pop()
        self._took_turns_last = takes_turns
        wanting = [held for held in wanting if held.takes_turns == takes_turns]
        leaving = self._leaving()
        rows = [
            held
            for held in _share_out(wanting, self._executor.options.max_rows)
            if held is not leaving and self._prepare(held)
        ]
        # Making room for one may have cost another its place.
        rows = [held for held in rows if held.row is not None]
        if not rows:
            return None
        for held in rows:
            held.last_launch = self._num_launches
            held.num_in_flight += 1
        replay = self._executor.launch(
            [held.row for held in rows if held.row is not None],
            num_draft_tokens=max(held.sequence.max_draft_tokens for held in rows) if takes_turns else 0,
            wants_candidates=any(held.sequence.wants_candidates for held in rows),
        )
        self._in_flight.append(_InFlight(replay, rows))
        return rows[0]

    def _prepare(self, held: Held) -> bool:
        """Bring what was committed; False where there is no room for its keys now."""
        if held.row is None:
            return False
        if held.num_to_bring > held.num_brought:
            if not self._make_room(held, held.num_to_bring):
                return False
            held.bring(self._executor.trees)
        return True

    def _leaving(self) -> Held | None:
        """Who is not drafted for any more, so that somebody who has waited for a place for long gets it."""
        if self._stuck_since is None or self._num_launches - self._stuck_since < _TENURE:
            return None
        held = min(self._growing.values(), key=lambda other: other.admitted_at, default=None)
        return held if held is not None and self._num_launches - held.admitted_at >= _TENURE else None

    # What is missing.

    def _compute(self) -> list[DraftSequence]:
        """Compute a chunk of what is missing; whose keys are not all there yet."""
        if not self._computing:
            self._stuck_since = None
            return []
        budget = self._max_num_batched_tokens
        if self._in_flight:
            budget = min(budget, _CHUNK_BESIDE_TREES)
        slices: list[SequenceSlice] = []
        computed: list[tuple[Held, int]] = []
        computing = list(self._computing.values())
        for held in computing:
            sequence = held.sequence
            if budget == 0 or not self._admit(held):
                break
            start = sequence.num_computed
            end = min(sequence.length - held.num_left_to_tree, start + budget)
            if end > start:
                if not self._make_room(held, end):
                    break
                slices.append(SequenceSlice(sequence.token_ids[start:end], start, sequence.block_ids, 0))
                budget -= end - start
            computed.append((held, end))
        if computed:
            self._stuck_since = None
        elif self._stuck_since is None:
            self._stuck_since = self._num_launches
        if slices:
            self._executor.compute(slices)
        for held, end in computed:
            # Making room for one behind it does not cost it its place.
            sequence = held.sequence
            sequence.num_computed = end
            if sequence.length - end <= _MAX_MISSING:
                del self._computing[sequence]
                self._growing[sequence] = held
                held.begin(self._executor.trees, self._executor.num_children)
        return [held.sequence for held in computing]

    def _admit(self, held: Held) -> bool:
        if held.slot is None:
            if not self._slots.num_free and not self._evict_for(held):
                return False
            held.slot = self._slots.take()
            held.admitted_at = self._num_launches
        return True

    def _make_room(self, held: Held, num_tokens: int) -> bool:
        """Let its blocks cover so many tokens, at others' cost where need be."""
        while not self._blocks.grow(held.sequence.block_ids, num_tokens):
            if not self._evict_for(held):
                return False
        return True

    def _evict_for(self, held: Held) -> bool:
        """Take away what another one holds; False where nobody can be asked to give way now."""
        # Who was drafted for the longest ago; what a replay under way is for stays. Then the last of those that are
        # computed, where its turn comes after.
        idle = [other for other in self._growing.values() if other.num_in_flight == 0 and other is not held]
        victim = min(idle, key=lambda other: other.last_launch, default=None)
        if victim is None:
            computing = list(self._computing.values())
            behind = computing[computing.index(held) + 1 :] if held in computing else computing
            victim = next((other for other in reversed(behind) if other.slot is not None), None)
        if victim is None:
            return False
        with about(victim.sequence.subject):
            logger.debug("evicting the cache of a sequence")
        self._give_back(victim)
        victim.lose()
        self._computing.pop(victim.sequence, None)
        self._computing[victim.sequence] = victim
        return True

    def _give_back(self, held: Held) -> None:
        self._growing.pop(held.sequence, None)
        self._blocks.free(held.sequence.block_ids)
        if held.slot is not None:
            self._executor.give_back(held.slot)
            self._slots.give_back(held.slot)
            held.slot = None

    # What a replay has made.

    def _take_in(self, rows: list[Held], grown: Grown, drafts: Drafts) -> None:
        is_there = np.array([not held.is_released for held in rows])
        for held, length, stand_position, last_id, is_idle, num_told in zip(
            rows,
            grown.lengths.tolist(),
            grown.stand_positions.tolist(),
            grown.last_ids.tolist(),
            grown.is_idle.tolist(),
            grown.num_told.tolist(),
            strict=True,
        ):
            held.num_in_flight -= 1
            held.stand_position = stand_position
            held.next_id = last_id + 1
            has_caught_up = stand_position == length - 1
            if is_idle and has_caught_up and length == held.sequence.length:
                held.is_resting = True
            if held.takes_turns and has_caught_up and not held.is_released:
                held.num_answered = length
                if not num_told:
                    drafts.refusals = [
                        *drafts.refusals,
                        NoDraft(held.sequence, drafter_pb2.REFUSAL_REASON_NO_MATCH),
                    ]
        is_told = is_there & (grown.num_told > 0)
        wants_candidates = np.array([held.sequence.wants_candidates for held in rows])
        drafts.expanded = [
            _expanded(rows, grown, which, has_candidates=has_candidates)
            for has_candidates in (False, True)
            for which in (is_told & (wants_candidates == has_candidates),)
            if which.any()
        ]


def _expanded(rows: Sequence[Held], grown: Grown, which: npt.NDArray[np.bool_], *, has_candidates: bool) -> Expanded:
    """What was made for some of the sequences."""
    of_expansions = np.repeat(which, grown.num_told)
    candidate_ids, candidate_weights = grown.candidate_ids, grown.candidate_weights
    return Expanded(
        sequences=[rows[index].sequence for index in np.flatnonzero(which).tolist()],
        num_committed=grown.lengths[which],
        num_expansions=grown.num_told[which],
        first_ids=grown.first_ids[which],
        parents=grown.parents[of_expansions],
        ranks=grown.ranks[of_expansions],
        child_ids=grown.child_ids[of_expansions],
        probabilities=grown.probabilities[of_expansions],
        candidate_ids=candidate_ids[of_expansions] if has_candidates and candidate_ids is not None else None,
        candidate_weights=candidate_weights[of_expansions]
        if has_candidates and candidate_weights is not None
        else None,
    )


def _share_out(wanting: list[Held], most: int) -> list[Held]:
    """At most so many, the same number for each verifier where all want more, who has waited longest first."""
    if len(wanting) <= most:
        return wanting
    waiting = {held.sequence: held for held in sorted(wanting, key=lambda held: held.last_launch)}
    return [waiting[sequence] for sequence in take_turns(waiting)[:most]]
