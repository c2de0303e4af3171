"""Passes of fixed shape over draft trees in one CUDA graph: each expands what is worth most, and the host looks on.

What a sequence has committed, how it is sampled, where its blocks are and its tree are in its slot on the device, its
penalties in a table there; the host names the slots and reads what was made while the next replay runs. Penalties count
what is committed, not what the tree has behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from drafter_service.tree_replay import PassArrays, TreeReplay
from engine.batch import TreeBatch
from engine.cuda_graph import GraphPool
from engine.model_runner import ModelRunner
from engine.penalty_tables import NO_PLACE
from engine.slots import DeviceSlots
from engine.static_tensors import StaticTensors, TensorSpec
from engine.step import TreeRow
from kernels.child_probabilities import ChildEstimates, estimate_children
from kernels.draft_sample import DraftSample, draft_sample
from kernels.draft_trees import TreeLimits, TreePass, TreeState, advance_trees, grow_trees
from kernels.penalty_tables import PenaltyTables, apply_penalty_tables

# Places of a sequence in the first pass of a replay, at least. After full acceptance two tokens are missing: the last
# draft token, which nobody has expanded, and the bonus token.
_MIN_FIRST_WIDTH = 2
# Of the pass before the last read: one replay is read while the next one runs.
_NUM_MIRRORS = 2


@dataclass(frozen=True)
class TreeShape:
    """What a graph is captured for."""

    num_rows: int
    width: int  # expansions of a sequence in a pass (W)
    num_passes: int
    is_filtered: bool  # whether top-k, top-p and min-p are looked at
    takes_turns: bool  # whether every child is worth a row

    @property
    def widths(self) -> list[int]:
        """Of each pass."""
        return [max(self.width, _MIN_FIRST_WIDTH), *[self.width] * (self.num_passes - 1)]


@dataclass(frozen=True)
class TreeParts:
    """What all graphs of a drafter work on."""

    runner: ModelRunner
    slots: DeviceSlots
    trees: TreeState
    penalties: PenaltyTables
    limits: TreeLimits
    num_candidates: int


class TreeGraph:
    """One shape, captured or not. Belongs to the engine's thread."""

    def __init__(self, parts: TreeParts, shape: TreeShape) -> None:
        self.shape = shape
        self._parts = parts
        limits = parts.limits
        self._limits = replace(limits, min_probability=0.0) if shape.takes_turns else limits
        device, batch, num_children = parts.runner.device, shape.num_rows, parts.trees.max_children
        i16, i32, i64 = torch.int16, torch.int32, torch.int64
        self._inputs = StaticTensors(
            {
                "slots": TensorSpec((batch,), i64),
                "max_candidates": TensorSpec((batch,), i32),
                "penalty_places": TensorSpec((batch,), i32),
            },
            device,
            num_mirrors=_NUM_MIRRORS,
        )
        made: dict[str, TensorSpec] = {}
        candidates: dict[str, TensorSpec] = {}
        for index, width in enumerate(shape.widths):
            for name in PassArrays.OF_SEQUENCES:
                made[f"{name}.{index}"] = TensorSpec((batch,), i32)
            for name in PassArrays.OF_PLACES:
                made[f"{name}.{index}"] = TensorSpec((batch, width), i32)
            made[f"child_ids.{index}"] = TensorSpec((batch * width, num_children), i32)
            made[f"probabilities.{index}"] = TensorSpec((batch * width, num_children), i16)
            candidates[f"candidate_ids.{index}"] = TensorSpec((batch * width, parts.num_candidates), i32)
            candidates[f"candidate_weights.{index}"] = TensorSpec((batch * width, parts.num_candidates), i16)
        self._made = StaticTensors(made, device, num_mirrors=_NUM_MIRRORS)
        # Copied to the host where somebody wants them: much more than all else.
        self._candidates = StaticTensors(candidates, device, num_mirrors=_NUM_MIRRORS)
        self._passes = [self._new_pass(index, width) for index, width in enumerate(shape.widths)]
        self._graph: torch.cuda.CUDAGraph | None = None

    def _new_pass(self, index: int, width: int) -> TreePass:
        made = self._made.device
        names = (*PassArrays.OF_SEQUENCES, *PassArrays.OF_PLACES)
        state = self._parts.trees
        return TreePass.empty(
            self.shape.num_rows,
            width,
            state.max_expansions,
            self._parts.runner.device,
            **{name: made[f"{name}.{index}"] for name in names},
        )

    def capture(self, pool: GraphPool) -> None:
        """Record the graph. The passes run on padding, which leaves cache and trees alone."""
        self._fill([], [])
        self._inputs.upload()
        self._graph = pool.capture(self._compute)

    @property
    def is_captured(self) -> bool:
        """Whether it is a CUDA graph."""
        return self._graph is not None

    def launch(self, rows: Sequence[TreeRow], penalty_places: Sequence[int], *, wants_candidates: bool) -> TreeReplay:
        """Begin a replay behind those before it, of which at most one may not have been read.

        Slots, trees and tables are up to date. `penalty_places` says where in the tables each row's penalties are, if
        anywhere.
        """
        for tensors in (self._inputs, self._made, self._candidates):
            tensors.turn()
        self._fill(rows, penalty_places)
        self._inputs.upload()
        self.replay()
        self._made.download()
        if wants_candidates:
            self._candidates.download()
        event = None
        if self._parts.runner.device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._parts.runner.device))
        host = {**self._made.host, **(self._candidates.host if wants_candidates else {})}
        return TreeReplay(len(rows), [PassArrays(host, index) for index in range(self.shape.num_passes)], event)

    def replay(self) -> None:
        """Run over what the inputs on the device hold, without waiting for it."""
        if self._graph is None:
            self._compute()
        else:
            self._graph.replay()

    def _fill(self, rows: Sequence[TreeRow], penalty_places: Sequence[int]) -> None:
        host, num_rows = self._inputs.host, len(rows)
        host["slots"][:num_rows] = [row.slot.index for row in rows]
        host["slots"][num_rows:] = self._parts.slots.padding
        host["max_candidates"][:num_rows] = [row.max_candidates for row in rows]
        host["max_candidates"][num_rows:] = 1
        host["penalty_places"][:num_rows] = penalty_places
        host["penalty_places"][num_rows:] = NO_PLACE

    @torch.inference_mode()
    def _compute(self) -> None:
        parts, slots = self._parts, self._inputs.device["slots"]
        block_tables = parts.slots.state.block_tables[slots]
        # Padding has no area, and reads none.
        areas = torch.where(slots < parts.slots.padding, slots, 0)
        node_starts = parts.limits.area_start + areas * parts.trees.max_expansions
        sampling: _TokenSampling | None = None
        for index, tree_pass in enumerate(self._passes):
            width = tree_pass.rows.shape[1]
            if sampling is None or width != self._passes[index - 1].rows.shape[1]:
                sampling = self._token_sampling(width)
            advance_trees(parts.trees, slots, block_tables, self._limits, tree_pass)
            parts.runner.copy_kv(tree_pass.copy_sources, tree_pass.copy_targets)
            logits = parts.runner.forward(
                TreeBatch(
                    token_ids=tree_pass.token_ids,
                    positions=tree_pass.positions,
                    slot_mapping=tree_pass.slot_mapping,
                    logit_rows=None,
                    prefix_lens=tree_pass.prefix_lens,
                    block_tables=block_tables,
                    node_starts=node_starts,
                    is_ancestor=tree_pass.is_ancestor,
                )
            )
            self._grow(index, tree_pass, logits, sampling, slots)

    def _token_sampling(self, width: int) -> _TokenSampling:
        """How each token of a pass is sampled: as its sequence is."""
        state, inputs = self._parts.slots.state, self._inputs.device
        slots = inputs["slots"].repeat_interleave(width)
        temperature, is_coupled = state.temperature[slots], state.is_coupled[slots]
        return _TokenSampling(
            temperature=temperature,
            seeds=state.seeds[slots],
            filters=(state.top_k[slots], state.top_p[slots], state.min_p[slots]) if self.shape.is_filtered else None,
            is_coupled=is_coupled,
            is_tested=(temperature > 0) & (is_coupled == 0),
            max_candidates=inputs["max_candidates"].repeat_interleave(width),
            penalty_places=inputs["penalty_places"].repeat_interleave(width),
        )

    def _grow(
        self,
        index: int,
        tree_pass: TreePass,
        logits: torch.Tensor,  # [T, vocab_size], changed where there are penalties
        sampling: _TokenSampling,
        slots: torch.Tensor,  # [B] int64
    ) -> None:
        parts, made, candidates = self._parts, self._made.device, self._candidates.device
        apply_penalty_tables(logits, sampling.penalty_places, parts.penalties)
        top_k, top_p, min_p = sampling.filters or (None, None, None)
        child_ids = made[f"child_ids.{index}"]
        num_tokens, num_children = child_ids.shape
        sample = DraftSample(
            child_ids.new_empty(num_tokens),
            candidates[f"candidate_ids.{index}"],
            # 16 bits hold every weight: one that took everything would be written as none at all.
            candidates[f"candidate_weights.{index}"],
            child_ids,
            torch.empty(num_tokens, num_children, device=child_ids.device),
        )
        draft_sample(
            logits,
            sampling.temperature,
            sampling.seeds,
            tree_pass.sample_positions,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            num_candidates=parts.num_candidates,
            max_candidates=sampling.max_candidates,
            is_coupled=sampling.is_coupled,
            num_outcomes=num_children,
            out=sample,
        )
        assert sample.outcome_scores is not None
        estimates = ChildEstimates(torch.empty_like(sample.outcome_scores), made[f"probabilities.{index}"])
        estimate_children(sample.outcome_scores, sample.candidate_weights[:, 0], sampling.is_tested, estimates)
        grow_trees(parts.trees, slots, tree_pass, child_ids, estimates.logps)


@dataclass(frozen=True)
class _TokenSampling:
    """How the tokens of a pass are sampled, each as its sequence is."""

    temperature: torch.Tensor  # [T] float32
    seeds: torch.Tensor  # [T] int64
    filters: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None  # each [T]: top-k, top-p, min-p
    is_coupled: torch.Tensor  # [T] int32
    is_tested: torch.Tensor  # [T] bool
    max_candidates: torch.Tensor  # [T] int32
    penalty_places: torch.Tensor  # [T] int32
