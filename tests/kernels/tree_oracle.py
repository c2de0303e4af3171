"""Draft trees of one sequence each in plain Python, as `kernels.draft_trees` describes them, and a model's stand-in.

What a key depends on is all tokens up to its own. Here a key *is* these tokens, so that whoever reads a wrong one, or
one that was overwritten, is found out.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from kernels.draft_trees import CHAIN_RESERVE, MAX_DEPTH

VOCABULARY = 12
Tokens = tuple[int, ...]


def children_of(path: Tokens, num_children: int, seed: int) -> tuple[list[int], list[float]]:
    """Distinct tokens that may follow, and the logarithms of their probabilities: of few values, so that many tie."""
    rng = random.Random(hash((path, seed)))
    tokens = rng.sample(range(VOCABULARY), num_children)
    shares = sorted((rng.choice((1, 2, 4, 8)) for _ in tokens), reverse=True)
    logps = [float(np.float32(np.log(share / 16))) for share in shares]
    if num_children > 1 and rng.random() < 0.2:
        tokens[-1], logps[-1] = -1, -np.inf  # no such child
    return tokens, logps


@dataclass
class Expansion:
    """One of them, with what its children are."""

    id: int
    path: Tokens  # the sequence's tokens up to its own
    logp: np.float32
    child_tokens: list[int] = field(default_factory=list)
    child_logps: list[np.float32] = field(default_factory=list)
    expanded: dict[int, int] = field(default_factory=dict)  # ids by rank


@dataclass
class Told:
    """What the verifier hears of a pass."""

    first_id: int
    expansions: list[tuple[int, int, Tokens]]  # parent, rank, path


@dataclass
class OracleTree:
    """One sequence."""

    committed: list[int]
    ring_size: int
    num_children: int
    max_depth: int
    next_id: int = 0
    stand: int | None = None
    expansions: dict[int, Expansion] = field(default_factory=dict)
    num_in_prefix: int = 0
    told: set[int] = field(default_factory=set)  # ids that the verifier has heard of

    def restart(self, num_in_prefix: int) -> None:
        """Its keys were given up and are computed anew up to here; ids go on counting."""
        self.expansions.clear()
        self.stand = None
        self.num_in_prefix = num_in_prefix

    def advance(self, num_places: int, min_logp: float, max_length: int) -> tuple[Told, list[Expansion]]:
        """What a pass tells, and all that it expands."""
        self._walk()
        base = self.num_in_prefix if self.stand is None else len(self.expansions[self.stand].path)
        if self.stand is not None:
            self.num_in_prefix = base - 1
        missing = self.committed[base:]
        if missing:
            return self._chain(base, missing, num_places)
        assert self.stand is not None
        return self._best(num_places, min_logp, max_length)

    def _walk(self) -> None:
        while self.stand is not None:
            here = self.expansions[self.stand]
            if len(here.path) == len(self.committed):
                return
            token = self.committed[len(here.path)]
            if token not in here.child_tokens or (rank := here.child_tokens.index(token)) not in here.expanded:
                return
            self.stand = here.expanded[rank]

    def _chain(self, base: int, missing: list[int], num_places: int) -> tuple[Told, list[Expansion]]:
        count = min(len(missing), num_places, MAX_DEPTH - 1)
        new = [
            Expansion(self._take_id(), tuple(self.committed[: base + 1 + index]), np.float32(0))
            for index in range(count)
        ]
        parent, rank = -1, 0
        if self.stand is not None and len(missing) == 1:
            children = self.expansions[self.stand].child_tokens[: self.num_children]
            if missing[0] in children:
                parent, rank = self.stand, children.index(missing[0])
        self.stand = new[-1].id
        self._forget(new)
        told = [(parent, rank, new[-1].path)] if count == len(missing) else []
        return Told(new[-1].id, told), new

    def _best(self, num_places: int, min_logp: float, max_length: int) -> tuple[Told, list[Expansion]]:
        assert self.stand is not None
        root = self.expansions[self.stand]
        last = min(len(root.path) - 1 + min(MAX_DEPTH - 1, self.max_depth), max_length - 2)
        alive, waiting = [], [root]
        while waiting:
            alive.append(expansion := waiting.pop())
            waiting += [self.expansions[child] for child in expansion.expanded.values()]
        candidates = [
            (-logp, expansion.id % self.ring_size, rank, expansion)
            for expansion in alive
            if len(expansion.path) <= last
            for rank, logp in enumerate(expansion.child_logps[: self.num_children])
            if rank not in expansion.expanded and logp > -np.inf and logp - root.logp >= min_logp
        ]
        room = max(0, root.id + self.ring_size - CHAIN_RESERVE - self.next_id)
        told, new = Told(self.next_id, []), []
        for _, _, rank, parent in sorted(candidates, key=lambda entry: entry[:3])[: min(num_places, room)]:
            path = (*parent.path, parent.child_tokens[rank])
            child = Expansion(self._take_id(), path, parent.child_logps[rank])
            parent.expanded[rank] = child.id
            told.expansions.append((parent.id, rank, path))
            new.append(child)
        self._forget(new)
        return told, new

    def _take_id(self) -> int:
        self.next_id += 1
        return self.next_id - 1

    def _forget(self, new: list[Expansion]) -> None:
        for expansion in new:
            self.expansions[expansion.id] = expansion
            self.expansions.pop(expansion.id - self.ring_size, None)

    def grow(self, expansion: Expansion, tokens: list[int], logps: list[float]) -> None:
        """Its children."""
        expansion.child_tokens = tokens
        expansion.child_logps = [np.float32(np.float32(logp) + expansion.logp) for logp in logps]
