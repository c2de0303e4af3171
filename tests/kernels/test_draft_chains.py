"""Draft trees by slot: kernels against plain torch, and both against trees of dictionaries, over random histories."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, fields

import torch

from kernels.draft_chains import (
    NUM_RECENT_TOKENS,
    ROOT,
    DraftInputs,
    DraftTrees,
    NewExpansions,
    pick_chains,
    take_expansions,
)
from tests.kernels.conftest import TritonDevice

NUM_SLOTS, MAX_EXPANSIONS, NUM_CHILDREN, NUM_CANDIDATES, MOST = 4, 16, 3, 5, 4


@dataclass
class Node:
    number: int
    tokens: list[int]
    q: list[tuple[int, int]]
    below: dict[int, Node] = field(default_factory=dict)  # by rank


@dataclass
class Sequence:
    """A drafter that knows the target's tokens with a delay, as plain objects."""

    tokens: list[int]
    known: int  # tokens that the drafter has heard of
    nodes: dict[int, Node] = field(default_factory=dict)
    stand: Node | None = None
    next_id: int = 0

    def expand(self, rng: random.Random, parent: Node | None, rank: int) -> tuple[Node, int]:
        tokens = rng.sample(range(6), rng.randint(1, NUM_CHILDREN))
        q = [(rng.randrange(100), rng.randrange(1, 100)) for _ in range(rng.choice((0, 2, NUM_CANDIDATES)))]
        node = Node(self.next_id, tokens, q)
        self.next_id += 1
        self.nodes[node.number] = node
        if parent is None:
            self.stand = node
        else:
            parent.below[rank] = node
        return node, (ROOT if parent is None else parent.number)

    def hear(self) -> None:
        """All that is committed; without a child for it there is nothing to stand on."""
        while self.known < len(self.tokens) and self.stand is not None:
            token = self.tokens[self.known]
            if token not in self.stand.tokens:
                self.stand = None
                break
            below = self.stand.below.get(self.stand.tokens.index(token))
            if below is None:
                break
            self.stand = below
            self.known += 1
        if self.stand is None:
            self.known = len(self.tokens)

    @property
    def can_expand(self) -> bool:
        return self.stand is None or self.next_id < self.stand.number + MAX_EXPANSIONS


def chain_of(sequence: Sequence, most: int) -> list[Node]:
    """What a step would verify: for a drafter that has heard all, and stands at the sequence's end."""
    sequence.hear()
    node = sequence.stand if sequence.known == len(sequence.tokens) else None
    chain: list[Node] = []
    while node is not None and len(chain) < most:
        chain.append(node)
        node = node.below.get(0)
    return chain


def last_of(sequence: Sequence, accepted: list[int]) -> Node | None:
    """The expansion of the last one of so many accepted draft tokens, of none that of the last committed token."""
    node = sequence.stand if sequence.known == len(sequence.tokens) else None
    for _ in accepted:
        node = node.below.get(0) if node is not None else None
    return node


def frame(rng: random.Random, sequences: list[Sequence], device: torch.device) -> NewExpansions:
    """A few expansions of some sequences, as a drafter makes them that has heard all."""
    rows: list[tuple[int, Node, int, int, int]] = []
    width, num_candidates = 1, 0
    for slot, sequence in enumerate(sequences):
        sequence.hear()
        for _ in range(rng.choice((0, 1, 3, 6, 9))):
            if not sequence.can_expand:
                continue
            if sequence.stand is None:
                node, parent = sequence.expand(rng, None, 0)
                rank = 0
            else:
                free = [
                    (node, rank)
                    for node in subtree(sequence.stand)
                    for rank in range(len(node.tokens))
                    if rank not in node.below
                ]
                if sequence.known < len(sequence.tokens) and rng.random() < 0.8:  # what is committed, first of all
                    committed = (sequence.stand, sequence.stand.tokens.index(sequence.tokens[sequence.known]))
                    free = [committed] if committed in free else free
                first = [(node, rank) for node, rank in free if rank == 0]
                above, rank = rng.choice(first if first and rng.random() < 0.8 else free)
                node, parent = sequence.expand(rng, above, rank)
            rows.append((slot, node, parent, rank, sequence.known))
            width, num_candidates = max(width, len(node.tokens)), max(num_candidates, len(node.q))

    def column(values: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    def matrix(values: list[list[int]], columns: int, padding: int) -> torch.Tensor:
        padded = [row + [padding] * (columns - len(row)) for row in values]
        return torch.tensor(padded, dtype=torch.int32, device=device).view(len(values), columns)

    return NewExpansions(
        slots=column([row[0] for row in rows]),
        ids=column([row[1].number for row in rows]),
        parents=column([row[2] for row in rows]),
        ranks=column([row[3] for row in rows]),
        lengths=column([row[4] for row in rows], torch.int64),
        child_tokens=matrix([row[1].tokens for row in rows], width, -1),
        candidate_ids=matrix([[one for one, _ in row[1].q] for row in rows], num_candidates, 0),
        candidate_weights=matrix([[weight for _, weight in row[1].q] for row in rows], num_candidates, 0),
    )


def subtree(node: Node) -> list[Node]:
    return [node, *(found for below in node.below.values() for found in subtree(below))]


def room(device: torch.device) -> DraftInputs:
    total = NUM_SLOTS * MOST
    shape = (total, NUM_CANDIDATES)
    return DraftInputs(
        torch.full((total,), 77, dtype=torch.int32, device=device),
        torch.full(shape, 77, dtype=torch.int32, device=device),
        torch.full(shape, 77, dtype=torch.int32, device=device),
    )


def run_history(device: torch.device, seed: int, num_moves: int) -> dict[str, int]:
    """One history on a device, each chain compared with the objects'; what has happened, by name."""
    rng = random.Random(seed)
    trees = DraftTrees.empty(
        NUM_SLOTS + 1,
        max_expansions=MAX_EXPANSIONS,
        num_children=NUM_CHILDREN,
        num_candidates=NUM_CANDIDATES,
        device=device,
    )
    sequences = [Sequence([rng.randrange(6) for _ in range(3)], 3) for _ in range(NUM_SLOTS)]
    seen = {"chains": 0, "full": 0, "empty": 0, "given": 0, "laps": 0}
    for _ in range(num_moves):
        if rng.random() < 0.05:
            slot = rng.randrange(NUM_SLOTS)
            sequences[slot] = Sequence([rng.randrange(6) for _ in range(3)], 3)
            trees.forget(torch.tensor([slot], device=device))
        lengths = torch.tensor([*(len(sequence.tokens) for sequence in sequences), 0], device=device)
        take_expansions(trees, lengths, frame(rng, sequences, device))
        order = rng.sample(range(NUM_SLOTS), rng.randint(1, NUM_SLOTS))
        most = [rng.choice((-1, 0, 1, MOST, MOST + 3)) for _ in order]
        limits = [len(sequences[slot].tokens) + rng.choice((1, 2, 50)) for slot in order]
        given, out = room(device), room(device)
        given.token_ids.copy_(torch.arange(1000, 1000 + len(given.token_ids)))
        own = [rng.randint(0, MOST) if number < 0 else 0 for number in most]
        lens = torch.tensor([1 + number for number in own], dtype=torch.int32, device=device)
        pick_chains(
            trees,
            lengths,
            torch.tensor(order, dtype=torch.int32, device=device),
            torch.tensor(most, dtype=torch.int32, device=device),
            torch.tensor(limits, device=device),
            lens,
            given,
            max_num_draft_tokens=MOST,
            out=out,
        )
        start = num_given = 0
        for row, slot in enumerate(order):
            if most[row] < 0:
                assert lens[row] == 1 + own[row]
                expected = list(range(1000 + num_given, 1000 + num_given + own[row]))
                assert out.token_ids[start : start + own[row]].tolist() == expected
                start, num_given = start + own[row], num_given + own[row]
                seen["given"] += own[row]
                continue
            sequence = sequences[slot]
            wanted = max(min(most[row], MOST, limits[row] - len(sequence.tokens) - 1), 0)
            chain = chain_of(sequence, wanted)
            end = start + len(chain)
            assert lens[row] == 1 + len(chain)
            assert out.token_ids[start:end].tolist() == [node.tokens[0] for node in chain]
            for place, node in enumerate(chain, start):
                padding = [0] * (NUM_CANDIDATES - len(node.q))
                assert out.candidate_weights[place].tolist() == [weight for _, weight in node.q] + padding
                assert out.candidate_ids[place, : len(node.q)].tolist() == [one for one, _ in node.q]
            start = end
            seen["chains"] += bool(chain)
            seen["full"] += len(chain) == MOST
            seen["empty"] += wanted > 0 and not chain
        for slot, sequence in enumerate(sequences):
            likely = [node.tokens[0] for node in chain_of(sequence, MOST)]
            seen["laps"] += sequence.next_id > MAX_EXPANSIONS
            accepted = likely[: rng.randint(0, MOST)]
            outcomes = below.tokens if (below := last_of(sequence, accepted)) and rng.random() < 0.8 else range(6)
            for token in [*accepted, rng.choice(outcomes)]:
                trees.recent_tokens[slot, len(sequence.tokens) % NUM_RECENT_TOKENS] = token
                sequence.tokens.append(token)
    return seen


def test_chains_are_those_of_the_trees() -> None:
    """Catches a walk that stops at, or passes, a child that is not expanded; a link to what another lies upon now; a
    chain beyond the limit; q of a neighbour; a tree that outlives its sequence."""
    happened: dict[str, int] = {}
    for seed in range(25):
        for name, number in run_history(torch.device("cpu"), seed, 50).items():
            happened[name] = happened.get(name, 0) + number
    assert min(happened.values()) > 100, happened


def test_kernels_do_the_same(triton_device: TritonDevice) -> None:
    """The histories above, on the kernels."""
    with triton_device() as device:
        for seed in range(2):
            assert run_history(device, seed, 14)["chains"] > 3


def test_what_lies_too_far_behind_is_left() -> None:
    """Catches a walk by tokens that the slot no longer remembers."""
    trees = DraftTrees.empty(1, max_expansions=8, num_children=1, num_candidates=0, device=torch.device("cpu"))
    none = torch.empty((1, 0), dtype=torch.int32)
    one = torch.ones(1, dtype=torch.int32)
    take_expansions(
        trees,
        torch.tensor([10]),
        NewExpansions(0 * one, 0 * one, -1 * one, 0 * one, torch.tensor([10]), one.view(1, 1), none, none),
    )
    assert trees.stands.tolist() == [0]
    out = DraftInputs(one.clone(), none.clone(), none.clone())
    for length, expected in ((10 + NUM_RECENT_TOKENS, 0), (11 + NUM_RECENT_TOKENS, -1)):
        trees.recent_tokens.fill_(1)
        lens = torch.zeros(1, dtype=torch.int32)
        pick_chains(
            trees,
            torch.tensor([length]),
            0 * one,
            one,
            torch.tensor([1000]),
            lens,
            out,
            max_num_draft_tokens=1,
            out=out,
        )
        assert trees.stands.tolist() == [expected]
        assert lens.tolist() == [1]


def test_fields_are_copied_where_they_are() -> None:
    """Every field of the trees belongs to a slot: a room for each, and one that is nobody's."""
    trees = DraftTrees.empty(3, max_expansions=4, num_children=2, num_candidates=2, device=torch.device("cpu"))
    assert all(getattr(trees, each.name).shape[0] == 3 for each in fields(trees))
