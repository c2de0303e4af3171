"""Runs a draft model: prompts in chunks, and passes over draft trees in graphs where there are any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from drafter_service.device_trees import DeviceTrees
from drafter_service.tree_graph import TreeGraph, TreeParts, TreeShape
from drafter_service.tree_replay import TreeReplay
from engine.batch import SequenceSlice
from engine.cuda_graph import GraphPool, batch_buckets
from engine.model_runner import ModelRunner
from engine.penalty_tables import DevicePenalties
from engine.slots import DeviceSlots, Slot
from engine.step import TreeRow
from kernels.draft_trees import CHAIN_RESERVE, TreeLimits
from kernels.limits import MAX_DRAFT_TOKENS, MAX_OUTCOMES

# Sequences that may have penalties at once. At a vocabulary of 128,000, their tables take 64 MB.
MAX_PENALIZED = 64
# Without graphs, so many shapes are kept for the next replay.
_MAX_SHAPES = 32


@dataclass(frozen=True)
class TreeOptions:
    """How trees are grown."""

    max_rows: int  # sequences of a replay
    max_nodes: int  # expansions of a pass, at least: so many are shared out among its sequences
    num_passes: int  # of a replay that runs ahead
    max_draft_tokens: int  # passes of a replay that takes turns, where it is a graph (K)
    num_children: int  # (F)
    max_expansions: int  # kept of a sequence (E)
    min_probability: float  # of a path that is worth a row where the drafter runs ahead
    num_candidates: int  # (m)

    def width(self, num_rows: int) -> int:
        """Expansions of a sequence in a pass over so many (W)."""
        return min(max(self.max_nodes // num_rows, 1), CHAIN_RESERVE)


class DraftExecutor:
    """The executor over a draft model, with CUDA graphs once `capture` was called. The engine's thread's.

    The runner has room for `num_slots * max_expansions` nodes beside its blocks.
    """

    def __init__(
        self, runner: ModelRunner, *, num_slots: int, options: TreeOptions, max_penalized: int = MAX_PENALIZED
    ) -> None:
        """Room for so many sequences at once; more than `max_penalized` of them are drafted as if they had no
        penalties and biases."""
        self._runner = runner
        # No more than the vocabulary has, nor than are ranked.
        most_children = min(options.num_children, MAX_OUTCOMES, options.num_candidates, runner.vocab_size)
        self.options = options
        self.num_children = most_children
        device, vocab_size = runner.device, runner.vocab_size
        max_blocks = -(-runner.max_length // runner.block_size)
        self._slots = DeviceSlots(num_slots, max_blocks=max_blocks, vocab_size=vocab_size, device=device)
        self.trees = DeviceTrees(
            num_slots, max_expansions=options.max_expansions, num_children=most_children, device=device
        )
        self._penalties = DevicePenalties(min(max_penalized, num_slots), vocab_size=vocab_size, device=device)
        self._parts = TreeParts(
            runner=runner,
            slots=self._slots,
            trees=self.trees.state,
            penalties=self._penalties.tables,
            limits=TreeLimits(
                min_probability=options.min_probability,
                max_length=runner.max_length,
                area_start=runner.first_reserved_slot,
                block_size=runner.block_size,
            ),
            num_candidates=options.num_candidates,
        )
        # Without graphs there is nothing to be gained by filling up.
        self._buckets: Sequence[int] = ()
        self._graphs: dict[TreeShape, TreeGraph] = {}

    @property
    def runs_by_itself(self) -> bool:
        """Whether the device works on while the host does something else."""
        return self._runner.device.type == "cuda"

    def capture(self, pool: GraphPool | None, *, takes_turns: bool | None = None) -> None:
        """From now on, replays are graphs of these shapes, the largest made first, so that the others find its memory.

        `takes_turns`: of one kind alone; None: of both. Without a pool they are not recorded, and run as they are.
        """
        self._buckets = batch_buckets(self.options.max_rows)
        for num_rows in reversed(self._buckets):
            for turns in (False, True) if takes_turns is None else (takes_turns,):
                num_draft_tokens = self.options.max_draft_tokens if turns else 0
                for is_filtered in (False, True):
                    graph = self._graph_of(self._shape(num_rows, num_draft_tokens, is_filtered=is_filtered))
                    if pool is not None:
                        graph.capture(pool)

    @property
    def max_draft_tokens(self) -> int:
        """Of a chain that a replay makes: without graphs as long a one as anybody may ask for."""
        return self.options.max_draft_tokens if self._buckets else MAX_DRAFT_TOKENS

    def warm_up(self) -> None:
        """Run what has kernels of its own and no graph: on a device without graphs, a replay of each kind."""
        if self._buckets:
            return
        for num_draft_tokens in (0, 1):
            for is_filtered in (False, True):
                graph = self._graph_of(self._shape(1, num_draft_tokens, is_filtered=is_filtered))
                graph.launch([], [], wants_candidates=True).collect()

    def compute(self, slices: Sequence[SequenceSlice]) -> None:
        """Compute the keys and values of some committed tokens, behind what was launched before."""
        self._runner.execute(slices)

    def launch(self, rows: Sequence[TreeRow], *, num_draft_tokens: int, wants_candidates: bool) -> TreeReplay:
        """Grow the trees of at most `max_rows` sequences, behind what was launched before, without waiting for it.

        Taking turns, each tree gets a chain of at least `num_draft_tokens` first children; running ahead, where that is
        0, what is worth most. At most one replay before it may be uncollected.
        """
        self._slots.bring_up_to_date(rows)
        self.trees.bring_up_to_date()
        places = self._penalties.bring_up_to_date((row.slot, row.sampling, row.history) for row in rows)
        is_filtered = any(row.sampling.has_filters for row in rows)
        graph = self.graph_of(len(rows), num_draft_tokens=num_draft_tokens, is_filtered=is_filtered)
        return graph.launch(rows, places, wants_candidates=wants_candidates)

    def graph_of(self, num_rows: int, *, num_draft_tokens: int, is_filtered: bool) -> TreeGraph:
        """The smallest graph that has room for so many, at most `max_rows`."""
        if self._buckets:
            num_rows = next(bucket for bucket in self._buckets if bucket >= num_rows)
            num_draft_tokens = self.options.max_draft_tokens if num_draft_tokens else 0
        return self._graph_of(self._shape(num_rows, num_draft_tokens, is_filtered=is_filtered))

    def give_back(self, slot: Slot) -> None:
        """Let others have what the slot's sequence had beside its slot; the slot itself is given back as well."""
        self._penalties.give_back(slot)

    def _shape(self, num_rows: int, num_draft_tokens: int, *, is_filtered: bool) -> TreeShape:
        if num_draft_tokens:
            return TreeShape(num_rows, 1, num_draft_tokens, is_filtered, takes_turns=True)
        options = self.options
        return TreeShape(num_rows, options.width(num_rows), options.num_passes, is_filtered, takes_turns=False)

    def _graph_of(self, shape: TreeShape) -> TreeGraph:
        if (graph := self._graphs.get(shape)) is None:
            if not self._buckets and len(self._graphs) >= _MAX_SHAPES:
                self._graphs.pop(next(iter(self._graphs)))
            graph = self._graphs[shape] = TreeGraph(self._parts, shape)
        return graph
