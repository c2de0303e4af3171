"""Drafter and verifier walk down the same tree, whatever happens to them and to what travels between them."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field

import pytest

from outrider.protocol.expansions import ROOT
from tests.services.trees import Node, expansions
from verifier_service.draft_tree import SequenceExpansions
from verifier_service.speculation import ALONE, LATE, WAITING, LinkKey, Speculation

VOCABULARY = 4
NUM_CHILDREN = 2
MAX_EXPANSIONS = 64
TIMEOUT = 1.0


def children_of(path: tuple[int, ...]) -> list[int]:
    """What a drafter names behind these tokens: the same for the same tokens, and nothing like it for others."""
    return random.Random(repr(path)).sample(range(VOCABULARY), NUM_CHILDREN)


@dataclass
class Drafter:
    """By the rules, as they are written down: where it stands, what is expanded, and when it makes a root."""

    committed: list[int]
    chance: random.Random
    takes_turns: bool
    next_id: int = 0
    stand: int = ROOT
    paths: dict[int, tuple[int, ...]] = field(default_factory=dict)
    expanded: dict[tuple[int, int], int] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)

    def take(self, token_ids: list[int]) -> None:
        """A verdict: walk, or stand nowhere."""
        for token_id in token_ids:
            self.committed.append(token_id)
            if self.stand == ROOT or self.paths[self.stand] != tuple(self.committed[:-1]):
                # It stays where its tree ends, and walks no further: the next expansion is a root.
                self.stand = ROOT
                continue
            children = children_of(self.paths[self.stand])
            rank = children.index(token_id) if token_id in children else None
            self.stand = self.expanded.get((self.stand, rank), ROOT) if rank is not None else ROOT
            self.seen["miss" if rank is None else "hit" if self.stand != ROOT else "unexpanded"] += 1

    def expand(self) -> SequenceExpansions | None:
        """A pass, and its frame; None where the ring is full."""
        first_id, nodes = self.next_id, list[Node]()
        for _ in range(4 if self.takes_turns else self.chance.randint(1, 4)):
            if self.stand == ROOT:
                self.stand = self._add(nodes, ROOT, 0, tuple(self.committed))
            elif self.next_id >= self.stand + MAX_EXPANSIONS:
                self.seen["full"] += 1
                break
            else:
                parent, rank = self._worth_most()
                path = self.paths[parent]
                self.expanded[parent, rank] = self._add(nodes, parent, rank, (*path, children_of(path)[rank]))
        if not nodes:
            return None
        return expansions(*nodes, num_committed=len(self.committed), first_id=first_id)

    def _add(self, nodes: list[Node], parent: int, rank: int, path: tuple[int, ...]) -> int:
        id_ = self.next_id
        self.paths[id_] = path
        nodes.append(Node(parent, rank, children_of(path)))
        self.next_id += 1
        return id_

    def _worth_most(self) -> tuple[int, int]:
        """A child below where it stands: the chain's next one where turns are taken, else any."""
        parent = self.stand
        while True:
            rank = 0 if self.takes_turns else self.chance.choices(range(NUM_CHILDREN), [3, 1])[0]
            if (parent, rank) not in self.expanded:
                return parent, rank
            parent = self.expanded[parent, rank]


class History:
    """One sequence's life, with frames and verdicts that take their time: first in, first out."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.takes_turns = self.chance.random() < 0.5
        self.committed = [1, 2, 3]
        self.now = 0.0
        self.seen: Counter[str] = Counter()
        self._join(is_new=True)

    def _join(self, *, is_new: bool) -> None:
        """A drafter takes the sequence as it is now."""
        key = LinkKey("drafter:1", self.chance.randrange(1 << 30))
        arguments = {"takes_turns": self.takes_turns, "max_expansions": MAX_EXPANSIONS}
        self.speculation = (
            Speculation(key, **arguments) if is_new else Speculation.joined(key, self.now, **arguments)  # type: ignore[arg-type]
        )
        self.drafter = Drafter(list(self.committed), self.chance, self.takes_turns)
        self.to_drafter: deque[list[int]] = deque()
        self.to_verifier: deque[SequenceExpansions] = deque()

    def step(self) -> None:
        """The target commits: some of the drafts, and a token of its own."""
        speculation = self.speculation
        if speculation.state is WAITING:
            return
        drafts = speculation.chain(self.chance.randint(0, 5)).token_ids
        self._check(drafts)
        accepted = drafts[: self.chance.choice([0, 1, 2, 9])]
        likely = children_of((*self.committed, *accepted))
        new = [*accepted, self.chance.choice([likely[0], likely[1], self.chance.randrange(VOCABULARY)])]
        self.committed += new
        self.seen["accepted"] += len(accepted)
        self.seen[speculation.commit(self.committed, self.now, has_room=True).value] += 1
        if speculation.state is not ALONE:
            self.to_drafter.append(new)

    def _check(self, drafts: list[int]) -> None:
        path = tuple(self.committed)
        for token_id in drafts:
            assert token_id == children_of(path)[0], "a draft token that stands somewhere else"
            path = (*path, token_id)

    def hear_verdict(self) -> bool:
        if not self.to_drafter:
            return False
        self.drafter.take(self.to_drafter.popleft())
        if self.takes_turns:
            self.expand()
        return True

    def expand(self) -> None:
        if (frame := self.drafter.expand()) is not None:
            self.to_verifier.append(frame)

    def hear_frame(self) -> bool:
        if not self.to_verifier:
            return False
        frame = self.to_verifier.popleft()
        self.seen["overtaken"] += frame.num_committed < len(self.committed)
        self.speculation.take(frame, self.committed, self.now)
        return True

    def play(self) -> None:
        moves = ["step", "step", "verdict", "frame", "frame", "time", "lose"]
        weights = [3, 3, 3, 3, 3, 1, 0.05]
        for move in self.chance.choices(moves, weights, k=150):
            match move:
                case "step":
                    self.step()
                case "verdict":
                    self.hear_verdict()
                case "frame":
                    self.hear_frame()
                case "time":
                    self.now += self.chance.choice([0.1, 1.1]) * TIMEOUT
                    self.seen["late"] += self.speculation.give_up_waiting(self.now, TIMEOUT)
                case "lose":
                    self.speculation.leave()
                    self._join(is_new=False)
            if not self.takes_turns and self.chance.random() < 0.5:
                self.expand()
        self.settle()

    def settle(self) -> None:
        """All that is under way arrives: both stand at the same place, and nobody waits."""
        while self.hear_verdict() or self.hear_frame():
            pass
        if not self.takes_turns:
            self.expand()
            self.hear_frame()
        if self.committed == [1, 2, 3] or (self.takes_turns and self.drafter.next_id == 0):
            return  # no verdict since the drafter came
        assert self.speculation.tree._stand == self.drafter.stand
        assert self.drafter.paths[self.drafter.stand] == tuple(self.committed)
        assert self.speculation.state not in (WAITING, LATE, ALONE)
        assert self.speculation.num_drafts > 0
        self._check(self.speculation.chain(99).token_ids)
        self.seen += self.drafter.seen
        self.seen["settled"] += 1


@pytest.mark.parametrize("first_seed", range(0, 900, 300))
def test_both_sides_agree_whatever_happens(first_seed: int) -> None:
    """Catches a side that stands elsewhere than the other, drafts for another place, and a wait that never ends.

    Neither side tells the other where it stands: over 900 histories of delays in both directions, drafters that come
    and go, rings that fill up, and outcomes of every kind.
    """
    seen: Counter[str] = Counter()
    for seed in range(first_seed, first_seed + 300):
        history = History(seed)
        try:
            history.play()
        except Exception as error:
            error.add_note(f"in the history of seed {seed}")
            raise
        seen += history.seen
    assert seen["settled"] > 280, seen
    for what in ("accepted", "miss", "hit", "unexpanded", "overtaken", "first_child", "other_child", "unseen"):
        assert seen[what] > 300, (what, seen)
    assert seen["late"] > 100, seen
    assert seen["full"] > 5, seen
