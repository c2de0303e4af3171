"""A drafter that runs ahead with whole trees, in plain Python, as the protocol describes it; no model, no network.

What a path's children are is a function of its tokens alone, so that whoever holds a tree can be asked whether it is
right. What is expanded next is left to chance: the protocol must hold whatever a drafter finds worth its work.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from drafter_service.chain_drafter import ChainDrafter
from drafter_service.drafter import Drafts, Expanded
from drafter_service.sequence import DraftSequence
from outrider.protocol.expansions import ROOT
from outrider.protocol.wire import MAX_DEPTH

# Tokens that are drafted and committed; further ids only stand in candidates.
NUM_TOKENS = 6
NUM_CHILDREN = 3
VOCABULARY = 1 << 20
Path = tuple[int, ...]


@lru_cache(maxsize=1 << 16)
def children_of(path: Path) -> list[int]:
    """The tokens that a drafter expects behind these, the first child first; most of all that there are are not."""
    return random.Random(repr(path)).sample(range(NUM_TOKENS), NUM_CHILDREN)


@dataclass(slots=True)
class Node:
    """An expansion."""

    path: Path  # the sequence's tokens up to its own
    children: list[int]
    expanded: dict[int, int] = field(default_factory=dict)  # ids by rank


@dataclass(slots=True)
class Told:
    """An expansion on its way to the verifier."""

    id: int
    parent: int
    rank: int
    node: Node


class Tree:
    """One sequence's."""

    def __init__(self, sequence: DraftSequence) -> None:
        self.sequence = sequence
        self.nodes: dict[int, Node] = {}
        self.next_id = 0
        self.stand: int | None = None
        # The oldest expansion that the verifier may need while it takes in a frame.
        self.oldest = 0

    @property
    def chain(self) -> list[int]:
        """First children from where it stands, as far as they are known."""
        found, at = [], self.stand
        while at is not None:
            found.append(self.nodes[at].children[0])
            at = self.nodes[at].expanded.get(0)
        return found

    @property
    def has_work(self) -> bool:
        """Whether a root is missing, or something may be expanded."""
        if self.stand is None or len(self.nodes[self.stand].path) < self.sequence.length:
            return True
        return bool(self.candidates())

    def candidates(self) -> list[tuple[int, int]]:
        """(id, rank) of what may be expanded: below where it stands, not too deep, with a place in the ring."""
        if self.stand is None or self.next_id >= self.oldest + self.sequence.limits.max_expansions:
            return []
        found, waiting = [], [self.stand]
        while waiting:
            node = self.nodes[at := waiting.pop()]
            waiting += node.expanded.values()
            if len(node.path) < self.sequence.length + MAX_DEPTH:
                found += [(at, rank) for rank in range(NUM_CHILDREN) if rank not in node.expanded]
        return found

    def advance(self, width: int, chance: random.Random, seen: Counter[str]) -> list[Told]:
        """A pass: take in what was committed, and expand something."""
        tokens = tuple(self.sequence.token_ids)
        told: list[Told] = []
        self.oldest = self.stand if self.stand is not None else self.next_id
        while self.stand is not None and (depth := len(self.nodes[self.stand].path)) < len(tokens):
            node = self.nodes[self.stand]
            rank = node.children.index(tokens[depth]) if tokens[depth] in node.children else -1
            if rank in node.expanded:
                self.stand = node.expanded[rank]
                seen["drafter walked"] += 1
            elif rank >= 0 and (self.stand, rank) in self.candidates() and chance.random() < 0.7:
                # As good as a root, and the verifier may know what it is a child of.
                told.append(self._expand(self.stand, rank))
                self.stand = told[-1].id
                seen["committed before it was expanded"] += 1
            else:
                self.stand = None
                seen["drafter missed"] += 1
        if self.stand is None:
            if not told and chance.random() < 0.3:
                # As if it had computed committed tokens that the verifier need not hear of.
                self.next_id += chance.randint(1, 3)
                seen["ids left out"] += 1
            self.nodes.clear()
            told.append(self._add(Node(tokens, children_of(tokens)), ROOT, 0))
            self.stand, self.oldest = told[-1].id, told[0].id
        prefers_chain = chance.random() < 0.4
        for _ in range(width):
            if not (candidates := self.candidates()):
                seen["ring full"] += self.next_id >= self.oldest + self.sequence.limits.max_expansions
                break
            firsts = [candidate for candidate in candidates if candidate[1] == 0] if prefers_chain else []
            told.append(self._expand(*(max(firsts) if firsts else chance.choice(candidates))))
            seen["depth reached"] += len(told[-1].node.path) == len(tokens) + MAX_DEPTH
        self.oldest = self.stand
        return told

    def _expand(self, parent: int, rank: int) -> Told:
        node = self.nodes[parent]
        path = (*node.path, node.children[rank])
        node.expanded[rank] = self.next_id
        return self._add(Node(path, children_of(path)), parent, rank)

    def _add(self, node: Node, parent: int, rank: int) -> Told:
        new_id, self.next_id = self.next_id, self.next_id + 1
        self.nodes[new_id] = node
        self.nodes.pop(new_id - self.sequence.limits.max_expansions, None)
        return Told(new_id, parent, rank, node)


class TreeDrafter(ChainDrafter):
    """Runs ahead. What a pass has made comes back with the next call, as from a device that works by itself."""

    kind = "tree"
    name = "tree"
    vocabulary_size = VOCABULARY

    def __init__(self, chance: random.Random, seen: Counter[str]) -> None:
        super().__init__()
        self._chance = chance
        self._seen = seen
        self._width = chance.choice([1, 2, 4, 8])
        self.trees: dict[DraftSequence, Tree] = {}
        self._is_overlapping = chance.random() < 0.5
        self._under_way: list[tuple[Tree, int, list[Told]]] = []
        # The tokens that each candidate's first child was drafted behind: a q that gets to another place is found out.
        self.contexts: list[Path] = []

    @property
    def has_work(self) -> bool:
        """Whether something is under way, or may be expanded."""
        return bool(self._under_way) or any(tree.has_work for tree in self.trees.values())

    def open(self, sequence: DraftSequence) -> None:
        """Take it in."""
        self.trees[sequence] = Tree(sequence)

    def commit(self, sequence: DraftSequence, token_ids: Sequence[int]) -> None:
        """The next pass looks for itself."""

    def release(self, sequence: DraftSequence) -> None:
        """Forget it, and what is under way for it."""
        del self.trees[sequence]

    def restart(self) -> None:
        """Some tree is given up, as if its memory had gone to another sequence."""
        if self.trees:
            tree = self._chance.choice(list(self.trees.values()))
            tree.nodes.clear()
            tree.stand = None

    def draft(self) -> Drafts:
        """One pass over some of those that have work."""
        working = [tree for tree in self.trees.values() if tree.has_work]
        chosen = [tree for tree in working if self._chance.random() < 0.8] or working
        begun = [(tree, tree.sequence.length, tree.advance(self._width, self._chance, self._seen)) for tree in chosen]
        if self._is_overlapping:
            begun, self._under_way = self._under_way, begun
        # A sequence that was opened anew is another one.
        begun = [(tree, length, told) for tree, length, told in begun if self.trees.get(tree.sequence) is tree and told]
        with_q = [part for part in begun if part[0].sequence.wants_candidates]
        without = [part for part in begun if not part[0].sequence.wants_candidates]
        computing = [tree.sequence for tree in working if tree not in chosen]
        return Drafts([self._expanded_trees(parts) for parts in (without, with_q) if parts], (), computing)

    def _expanded_trees(self, parts: list[tuple[Tree, int, list[Told]]]) -> Expanded:
        sequences = [tree.sequence for tree, _, _ in parts]
        told = [one for _, _, of_one in parts for one in of_one]
        expanded = Expanded(
            sequences,
            np.array([length for _, length, _ in parts]),
            np.array([len(of_one) for _, _, of_one in parts]),
            np.array([of_one[0].id for _, _, of_one in parts]),
            np.array([one.parent for one in told], np.int32),
            np.array([one.rank for one in told], np.uint8),
            np.array([one.node.children for one in told], np.int32),
            np.full((len(told), NUM_CHILDREN), 9, np.uint16),
        )
        if sequences[0].wants_candidates:
            # Of two candidates one names the path.
            first = NUM_TOKENS + len(self.contexts)
            self.contexts += [one.node.path for one in told]
            ids = np.stack([expanded.child_ids[:, 0], np.arange(first, first + len(told), dtype=np.int32)], axis=1)
            expanded.candidate_ids = ids
            expanded.candidate_weights = np.tile(np.array([[65535, 1]], np.uint16), (len(told), 1))
        return expanded


class RuleDrafter(ChainDrafter):
    """A chain for each verdict, of a length that chance decides, or nothing."""

    kind = "rule"
    name = "rule"
    vocabulary_size = VOCABULARY

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self._chance = chance

    def find(self, sequence: DraftSequence) -> list[int]:
        """First children, one behind the other."""
        path = tuple(sequence.token_ids)
        for _ in range(self._chance.randint(0, sequence.max_draft_tokens)):
            path = (*path, children_of(path)[0])
        return list(path[sequence.length :])
