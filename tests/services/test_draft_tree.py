"""One sequence's draft tree at the verifier: what it stands on, what the next step tests, what it forgets."""

from __future__ import annotations

import random
from collections import Counter, deque

import numpy as np
import pytest

from outrider.protocol.expansions import ROOT
from tests.services.trees import Node, chain, expansions
from verifier_service.draft_tree import DraftTree, ExpansionError, Outcome

PROMPT = [1, 2, 3]
FIRST, OTHER, MISS, UNSEEN = Outcome


def tree_with(*nodes: Node, committed: list[int] | None = None, max_expansions: int = 64) -> DraftTree:
    """A tree whose first frame has these expansions."""
    tree = DraftTree(max_expansions)
    committed = committed or PROMPT
    tree.take(expansions(*nodes, num_committed=len(committed)), committed)
    return tree


def drafts(tree: DraftTree, committed: list[int], most: int = 99) -> list[int]:
    """What a step may test behind these tokens."""
    if not tree.chain_length(len(committed)):
        return []
    return tree.chain(most).token_ids


def test_the_chain_is_made_of_first_children() -> None:
    tree = tree_with(Node(ROOT, 0, [10, 11]), Node(0, 1, [20, 21]), Node(0, 0, [30, 31]), Node(2, 0, [40, 41]))
    assert drafts(tree, PROMPT) == [10, 30, 40]
    assert drafts(tree, PROMPT, 2) == [10, 30]
    assert tree.chain_length(len(PROMPT)) == 3
    assert tree.chain_length(len(PROMPT) + 1) == 0, "nothing is drafted behind a token that is not committed"


def test_a_hit_on_another_child_makes_its_subtree_the_chain() -> None:
    """Catches a tree that begins anew although what follows is there already."""
    tree = tree_with(Node(ROOT, 0, [10, 11]), Node(0, 0, [30, 31]), Node(0, 1, [20, 21]), Node(2, 0, [22, 23]))
    committed = [*PROMPT, 11]
    assert tree.commit(committed) is OTHER
    assert drafts(tree, committed) == [20, 22]
    committed.append(20)
    assert tree.commit(committed) is FIRST
    assert drafts(tree, committed) == [22]


def test_a_miss_waits_for_a_root() -> None:
    """Catches drafts that stand behind a token that was not committed."""
    tree = tree_with(*chain([10, 11, 12], 0))
    committed = [*PROMPT, 10, 99]
    assert tree.commit(committed) is MISS
    assert tree.is_lost
    assert drafts(tree, committed) == []
    # What still comes for the old path is of no use.
    tree.take(expansions(Node(2, 0, [13]), num_committed=3, first_id=3), committed)
    assert drafts(tree, committed) == []
    tree.take(expansions(*chain([50, 51], 4), num_committed=5, first_id=4), committed)
    assert drafts(tree, committed) == [50, 51]
    assert not tree.is_lost


def test_a_child_that_is_not_expanded_is_waited_for() -> None:
    """Catches a tree that takes the expansion of a committed token for another's, or never finds it."""
    tree = tree_with(Node(ROOT, 0, [10, 11]), Node(0, 0, [12, 13]))
    committed = [*PROMPT, 10, 13]
    assert tree.commit(committed) is OTHER
    assert drafts(tree, committed) == []
    assert not tree.is_lost
    tree.take(expansions(Node(1, 0, [70, 71]), num_committed=3, first_id=2), committed)
    assert drafts(tree, committed) == [], "another child's continuation"
    tree.take(expansions(Node(1, 1, [14, 15]), Node(3, 0, [16, 17]), num_committed=4, first_id=3), committed)
    assert drafts(tree, committed) == [14, 16]


def test_tokens_committed_meanwhile_are_walked_when_expansions_come() -> None:
    tree = tree_with(Node(ROOT, 0, [10, 11]))
    committed = [*PROMPT, 10, 20]
    assert tree.commit(committed) is UNSEEN
    committed.append(30)
    assert tree.commit(committed) is UNSEEN
    late = (Node(0, 0, [21, 20]), Node(1, 1, [30, 33]), Node(2, 0, [31, 32]))
    tree.take(expansions(*late, num_committed=3, first_id=1), committed)
    assert drafts(tree, committed) == [31]
    # A root may be overtaken as well, and its path may have been left.
    tree.take(expansions(*chain([20, 30, 40], 4), num_committed=4, first_id=4), committed)
    assert drafts(tree, committed) == [40]
    tree.take(expansions(*chain([20, 31, 40], 7), num_committed=4, first_id=7), committed)
    assert tree.is_lost


def test_chains_over_several_frames_keep_their_q() -> None:
    """Catches draft tokens and distributions that are cut at different places."""
    ids = np.array([[6, 8], [7, 9]], np.int32)
    weights = np.array([[65000, 536], [60000, 5536]], np.uint16)
    tree = DraftTree(64)
    tree.take(expansions(*chain([6, 7], 0), num_committed=3, candidates=(ids, weights)), PROMPT)
    more = (np.array([[5, 4]], np.int32), np.array([[40000, 25536]], np.uint16))
    tree.take(expansions(Node(1, 0, [5]), num_committed=3, first_id=2, candidates=more), PROMPT)
    tree.commit([*PROMPT, 6])
    found = tree.chain(9)
    assert found.token_ids == [7, 5]
    assert found.candidate_ids.tolist() == [[7, 9], [5, 4]]
    assert found.candidate_weights.tolist() == [[60000, 5536], [40000, 25536]]


@pytest.mark.parametrize(
    ("num_committed", "first_id", "problem"),
    [(4, 3, "num_committed"), (3, 2, "first_ids"), (3, 0, "first_ids")],
    ids=["what is not committed", "an id used twice", "ids from the beginning"],
)
def test_what_breaks_the_protocol(num_committed: int, first_id: int, problem: str) -> None:
    tree = tree_with(*chain([10, 11, 12], 0))
    with pytest.raises(ExpansionError, match=problem):
        tree.take(expansions(*chain([5], 9), num_committed=num_committed, first_id=first_id), PROMPT)
    assert drafts(tree, PROMPT) == [10, 11, 12]
    with pytest.raises(ExpansionError, match="num_expansions"):
        tree.take(expansions(*chain(range(65), 3), num_committed=3, first_id=3), PROMPT)


def test_what_stood_in_a_place_that_is_taken_is_gone() -> None:
    """Catches an expansion that is found where another has taken its place, as a drafter may skip ids."""
    tree = tree_with(*chain([10, 11, 12], 0), max_expansions=64)
    tree.take(expansions(Node(2, 0, [13]), num_committed=3, first_id=66), PROMPT)
    assert tree.is_lost
    assert drafts(tree, PROMPT) == []
    tree.take(expansions(*chain([20], 67), num_committed=3, first_id=67), PROMPT)
    assert drafts(tree, PROMPT) == [20]


def test_memory_is_bounded() -> None:
    """Catches expansions, names or frames of dead branches that stay for as long as the sequence lives."""
    tree, committed, next_id = DraftTree(64), list(PROMPT), 0
    for _ in range(2_000):
        # The target always chooses what the tree has not; every eighth time the tree grows on and on.
        tree.take(expansions(*chain([5, 6, 7, 8], next_id), num_committed=len(committed), first_id=next_id), committed)
        next_id += 4
        for _ in range(random.Random(next_id).choice([0, 0, 0, 100])):
            parent = next_id - 1
            tree.take(expansions(Node(parent, 0, [1]), num_committed=len(committed), first_id=next_id), committed)
            next_id += 1
        committed.append(random.Random(next_id).choice([5, 9]))
        tree.commit(committed)
        assert len(tree._expanded) <= 2 * 64 + 4
        assert len(tree._sources) == len(tree._indexes) == 64
        assert len(tree._chain) <= 32
    assert tree.num_expansions == next_id


class Naive:
    """Says by brute force what a tree has: every expansion with its whole path, none ever forgotten."""

    def __init__(self) -> None:
        self.children: dict[int, list[int]] = {}
        self.paths: dict[int, tuple[int, ...]] = {}  # the tokens that lead to it, from the sequence's beginning

    def add(self, id_: int, node: Node, committed: list[int], num_committed: int) -> None:
        self.children[id_] = list(node.children)
        if node.parent == ROOT:
            self.paths[id_] = tuple(committed[:num_committed])
        elif node.parent in self.paths:
            self.paths[id_] = (*self.paths[node.parent], self.children[node.parent][node.rank])

    def chain(self, committed: list[int], root: int) -> list[int]:
        """First children behind what is committed, of expansions that the newest root leads to."""
        here = tuple(committed)
        by_path = {path: id_ for id_, path in self.paths.items() if id_ >= root and path}
        found: list[int] = []
        while here in by_path and len(found) < 32:
            found.append(self.children[by_path[here]][0])
            here = (*here, found[-1])
        return found


def test_random_histories_agree_with_brute_force() -> None:
    """Catches a place in the tree that is off by one, a path taken for another's, and a chain that is cut or stale.

    A drafter that keeps the rules expands whatever it likes, frames come late, and the target commits what it likes.
    """
    seen: Counter[str] = Counter()
    for seed in range(400):
        chance = random.Random(seed)
        tree, naive, committed = DraftTree(64), Naive(), list(PROMPT)
        drafter = RandomDrafter(chance)
        delayed: deque[tuple[list[Node], int, int]] = deque()
        root = 0
        for _ in range(60):
            match chance.choice(["expand", "expand", "hear", "hear", "hear", "commit", "verdict"]):
                case "expand":
                    delayed.append(drafter.expand())
                case "hear" if delayed and delayed[0][0]:
                    nodes, first_id, num_committed = delayed.popleft()
                    for id_, node in enumerate(nodes, first_id):
                        naive.add(id_, node, committed, num_committed)
                        root = id_ if node.parent == ROOT else root
                    tree.take(expansions(*nodes, num_committed=num_committed, first_id=first_id), committed)
                case "commit":
                    tokens = drafts(tree, committed)[: chance.randint(0, 3)]
                    committed += [*tokens, chance.randrange(3)]
                    seen[tree.commit(committed).value] += 1
                case "verdict":
                    drafter.hear(len(committed))
            expected = naive.chain(committed, root) if naive.children else []
            assert drafts(tree, committed) == expected, seed
            seen["drafts"] += bool(expected)
    assert all(seen[outcome.value] > 100 for outcome in Outcome), seen
    assert seen["drafts"] > 2_000, seen


class RandomDrafter:
    """Expands children at random, and begins anew where it has heard of much."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._num_committed = len(PROMPT)
        self._next_id = self._root = 0
        self._unexpanded: list[tuple[int, int]] = []  # children, by parent and rank
        self._has_news = True

    def hear(self, num_committed: int) -> None:
        self._has_news = num_committed - self._num_committed > 1
        self._num_committed = num_committed

    def expand(self) -> tuple[list[Node], int, int]:
        """New expansions, the first one's id, and how many tokens were known to be committed."""
        first_id, nodes = self._next_id, []
        for _ in range(self._chance.randint(1, 6)):
            if self._has_news or not self._unexpanded or self._next_id >= self._root + 64:
                self._root, self._has_news = self._next_id, False
                self._unexpanded.clear()
                parent, rank = ROOT, 0
            else:
                parent, rank = self._unexpanded.pop(self._chance.randrange(len(self._unexpanded)))
            nodes.append(Node(parent, rank, self._chance.sample(range(3), 2)))
            self._unexpanded += [(self._next_id, 0), (self._next_id, 1)]
            self._next_id += 1
        return nodes, first_id, self._num_committed
