"""A loaded model drafter, the trees that it tells a verifier of, and what plain forwarding of each path gives."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from drafter_service.drafter import Drafts, Expanded
from drafter_service.executor import DraftExecutor, TreeOptions
from drafter_service.model_drafter import ModelDrafter
from drafter_service.sequence import DraftSequence
from engine.batch import SequenceSlice
from engine.model_runner import ModelRunner
from engine.sampling_tensors import new_history, penalized
from kernels.draft_sample import DraftSample, draft_sample
from kernels.limits import WEIGHT_TOTAL
from kernels.penalties import Penalties
from kernels.random import Purpose, random_words
from kernels.shape_logits import apply_penalties
from outrider.protocol.expansions import ROOT
from outrider.protocol.fingerprint import TokenizerDigest
from outrider.v1 import common_pb2
from tests.service_device import SERVICE_DEVICE, graph_pool

VOCABULARY = 64
NUM_CANDIDATES = 16
OPTIONS = TreeOptions(
    max_rows=5,
    max_nodes=8,
    num_passes=1,
    max_draft_tokens=4,
    num_children=3,
    max_expansions=64,
    min_probability=0.0,
    num_candidates=NUM_CANDIDATES,
)


def make_runner(model: Path, *, num_blocks: int, num_slots: int = 0, max_expansions: int = 0) -> ModelRunner:
    return ModelRunner(
        model,
        device=torch.device(SERVICE_DEVICE),
        dtype=torch.float32,
        num_blocks=num_blocks,
        num_reserved_slots=num_slots * max_expansions,
    )


def loaded_drafter(
    model: Path,
    *,
    num_blocks: int = 128,
    num_slots: int = 8,
    has_graphs: bool = False,
    takes_turns: bool = False,
    max_penalized: int = 64,
    **options: Any,
) -> ModelDrafter:
    """A drafter that forwards trees in graphs' shapes, recorded where there is a GPU, or as they come."""
    chosen = replace(OPTIONS, **options)
    drafter = ModelDrafter(
        lambda: make_runner(model, num_blocks=num_blocks, num_slots=num_slots, max_expansions=chosen.max_expansions),
        lambda runner: DraftExecutor(runner, num_slots=num_slots, options=chosen, max_penalized=max_penalized),
        name="tiny",
        revision="",
        tokenizer=TokenizerDigest(),
        max_num_batched_tokens=64,
        num_slots=num_slots,
        takes_turns=takes_turns,
        has_graphs=False,
    )
    drafter.load()
    if has_graphs:
        drafter._executor.capture(graph_pool(), takes_turns=takes_turns or None)
    return drafter


@dataclass
class Node:
    """An expansion as a verifier hears of it."""

    path: tuple[int, ...]  # the sequence's tokens up to its own
    num_committed: int  # as the drafter knew when it made it
    child_ids: list[int]
    probabilities: list[int]
    candidate_ids: list[int]
    candidate_weights: list[int]


@dataclass
class ToldTree:
    """What a verifier was told of one sequence."""

    sequence: DraftSequence
    nodes: dict[int, Node] = field(default_factory=dict)
    last_id: int = -1
    new: list[Node] = field(default_factory=list)  # those of the last pass


def take(drafts: Drafts, trees: dict[DraftSequence, ToldTree]) -> None:
    """Let verifiers hear of it, and check what frames promise."""
    for tree in trees.values():
        tree.new = []
    told = [sequence for expanded in drafts.expanded for sequence in expanded.sequences]
    assert len(told) == len(set(told))
    for expanded in drafts.expanded:
        start = 0
        for index, sequence in enumerate(expanded.sequences):
            count = int(expanded.num_expansions[index])
            _take_one(expanded, index, start, count, trees[sequence])
            start += count
        assert start == len(expanded.parents)


def _take_one(expanded: Expanded, index: int, start: int, count: int, tree: ToldTree) -> None:
    first_id, num_committed = int(expanded.first_ids[index]), int(expanded.num_committed[index])
    assert count > 0
    assert first_id > tree.last_id
    tree.last_id = first_id + count - 1
    for row in range(start, start + count):
        parent, rank = int(expanded.parents[row]), int(expanded.ranks[row])
        if parent == ROOT:
            assert rank == 0
            path = tuple(tree.sequence.token_ids[:num_committed])
        else:
            node = tree.nodes[parent]
            path = (*node.path, node.child_ids[rank])
        node = Node(
            path,
            num_committed,
            expanded.child_ids[row].tolist(),
            expanded.probabilities[row].tolist(),
            [] if expanded.candidate_ids is None else expanded.candidate_ids[row].tolist(),
            [] if expanded.candidate_weights is None else expanded.candidate_weights[row].tolist(),
        )
        tree.nodes[first_id + row - start] = node
        tree.new.append(node)


class Plain:
    """Forwards each path on its own, from its first token on."""

    def __init__(self, model: Path) -> None:
        self._runner = make_runner(model, num_blocks=32)
        self._found: dict[tuple[Any, ...], DraftSample] = {}

    def sample(self, sequence: DraftSequence, node: Node, num_children: int) -> DraftSample:
        """What follows the node's path: children are its outcomes."""
        num_committed = node.num_committed if sequence.sampling.has_penalties else 0
        key = (sequence.sampling.seed, sequence.verification, sequence.limits.max_candidates, num_committed, node.path)
        if key not in self._found:
            blocks = range(-(-len(node.path) // self._runner.block_size))
            logits = self._runner.execute([SequenceSlice(list(node.path), 0, blocks, 1)])
            if num_committed:
                logits = self._penalized(sequence, num_committed, logits)
            self._found[key] = self._sample(sequence, len(node.path), logits, num_children)
        return self._found[key]

    def _penalized(self, sequence: DraftSequence, num_committed: int, logits: torch.Tensor) -> torch.Tensor:
        """As penalties count what is committed, in the order that the target has them."""
        history = new_history(sequence.sampling, sequence.token_ids[:num_committed], sequence.num_prompt_tokens)
        assert history is not None
        no_drafts = np.zeros(2, np.int32)
        penalties = Penalties.build([penalized(0, sequence.sampling, history)], no_drafts, no_drafts[:0], logits.device)
        assert penalties is not None
        no_draft_ids = torch.empty(0, dtype=torch.int32, device=logits.device)
        return apply_penalties(logits, penalties, no_draft_ids).dense(slice(None))

    def _sample(self, sequence: DraftSequence, position: int, logits: torch.Tensor, num_children: int) -> DraftSample:
        sampling, device = sequence.sampling, logits.device
        is_greedy = sequence.verification == common_pb2.VERIFICATION_GREEDY
        is_coupled = sequence.verification == common_pb2.VERIFICATION_COUPLED

        def one(value: float, dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor([value], dtype=dtype, device=device)

        return draft_sample(
            logits,
            one(0.0 if is_greedy else sampling.temperature, torch.float32),
            torch.from_numpy(np.array([sampling.seed], np.uint64).view(np.int64)).to(device),
            one(position, torch.int64),
            top_k=one(sampling.top_k, torch.int32),
            top_p=one(sampling.top_p, torch.float32),
            min_p=one(sampling.min_p, torch.float32),
            num_candidates=NUM_CANDIDATES,
            max_candidates=one(max(sequence.limits.max_candidates, 1), torch.int32),
            is_coupled=one(is_coupled, torch.int32),
            num_outcomes=num_children,
        )


def drawn_from(node: Node, seed: int) -> int:
    """The token that DRAFT noise draws from the very q that was sent with the expansion."""
    weights = np.array(node.candidate_weights)
    if not weights.any():
        return node.child_ids[0]
    assert weights.sum() == WEIGHT_TOTAL
    seeds = torch.from_numpy(np.array([seed], np.uint64).view(np.int64))
    words = random_words(seeds, torch.tensor([len(node.path)]), Purpose.DRAFT)
    return node.candidate_ids[int((weights.cumsum() <= int(words[0, 0]) >> 16).sum())]
