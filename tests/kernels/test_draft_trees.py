"""Draft trees on the device, against trees of Python objects, through long random histories."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch

from kernels.draft_trees import MAX_DEPTH, NUM_RECENT, TreeLimits, TreePass, TreeState, advance_trees, grow_trees
from tests.compiling import report_of
from tests.kernels.conftest import TritonDevice
from tests.kernels.tree_oracle import VOCABULARY, Expansion, OracleTree, Tokens, Told, children_of

BLOCK_SIZE = 16
MAX_BLOCKS = 20


class History:
    """Sequences, their trees on the device and beside it, and a cache whose keys are paths."""

    def __init__(
        self, seed: int, device: torch.device, *, ring_size: int, num_children: int, width: int, min_probability: float
    ) -> None:
        self.rng = random.Random(seed)
        self.seed = seed
        self.width = width
        self.device = device
        self.num_slots = 4
        self.state = TreeState.empty(self.num_slots, ring_size, num_children, device)
        area_start = self.num_slots * MAX_BLOCKS * BLOCK_SIZE
        self.limits = TreeLimits(min_probability, MAX_BLOCKS * BLOCK_SIZE, area_start, BLOCK_SIZE)
        tables = torch.arange(self.num_slots * MAX_BLOCKS, dtype=torch.int32).view(self.num_slots, -1)
        self.block_tables = torch.cat([tables, tables[:1]]).to(device)
        self.cache: list[Tokens | None] = [None] * (area_start + (self.num_slots + 1) * ring_size)
        self.trees: dict[int, OracleTree] = {}
        self.seen: Counter[str] = Counter()

    def open(self, slot: int) -> None:
        """A sequence, with all but the last one or few tokens of its prompt computed."""
        committed = [self.rng.randrange(VOCABULARY) for _ in range(self.rng.randint(1, 40))]
        ring_size = self.rng.choice((self.state.max_expansions, max(64, self.state.max_expansions - 7)))
        num_children = self.rng.randint(1, self.state.max_children)
        tree = OracleTree(committed, ring_size, num_children, self.rng.choice((3, MAX_DEPTH)))
        self.trees[slot] = tree
        self.restart(slot)

    def restart(self, slot: int) -> None:
        """Compute a prefix into the paged cache, as prompt passes do, and forget the tree."""
        tree, state = self.trees[slot], self.state
        tree.restart(max(0, len(tree.committed) - self.rng.choice((1, 1, 2, 5, NUM_RECENT))))
        for position in range(tree.num_in_prefix):
            self.cache[self._paged(slot, position)] = tuple(tree.committed[: position + 1])
        state.ring_sizes[slot] = tree.ring_size
        state.num_children[slot] = tree.num_children
        state.max_depths[slot] = tree.max_depth
        state.prefix_lens[slot] = tree.num_in_prefix
        state.stands[slot] = -1
        state.next_ids[slot] = tree.next_id
        self._bring(slot, 0)

    def commit(self, slot: int) -> None:
        """Tokens that may follow the tree for a while and then leave it, or not."""
        tree = self.trees[slot]
        before = len(tree.committed)
        for _ in range(self.rng.choice((1, 1, 2, 3, 5, 12))):
            path = tuple(tree.committed)
            tokens, _ = children_of(path, self.state.max_children, self.seed)
            known = [token for token in tokens if token >= 0]
            choice = self.rng.random()
            token = known[0] if choice < 0.6 else self.rng.choice(known) if choice < 0.85 else self._other(known)
            tree.committed.append(token)
        self._bring(slot, before)

    def run(self, slots: list[int]) -> None:
        """One pass over these sequences and some padding."""
        num_rows = len(slots) + self.rng.randint(0, 2)
        rows = slots + [self.state.padding] * (num_rows - len(slots))
        out = poisoned(num_rows, self.width, self.state.max_expansions, self.device)
        where = torch.tensor(rows, device=self.device)
        advance_trees(self.state, where, self.block_tables[where], self.limits, out)
        self._copy(out)
        expected = [
            self.trees[slot].advance(self.width, self.limits.min_logp, self.limits.max_length) for slot in slots
        ]
        child_tokens = torch.full((num_rows, self.width, self.state.max_children), -1, dtype=torch.int32)
        child_logps = torch.full(child_tokens.shape, -torch.inf)
        for row, (slot, (told, new)) in enumerate(zip(slots, expected, strict=True)):
            self._check_told(out, row, slot, told, new)
            for place, expansion in enumerate(new):
                self._check_place(out, row, place, slot, expansion)
                if place < int(out.first_places[row]):
                    continue  # nobody is told of it
                tokens, logps = children_of(expansion.path, self.state.max_children, self.seed)
                self.trees[slot].grow(expansion, tokens, logps)
                child_tokens[row, place] = torch.tensor(tokens)
                child_logps[row, place] = torch.tensor(logps)
        self._check_places_of_nobody(out, [len(new) for _, new in expected])
        self._store(out)
        grow_trees(
            self.state,
            where,
            out,
            child_tokens.flatten(0, 1).to(self.device),
            child_logps.flatten(0, 1).to(self.device),
        )

    def _check_told(self, out: TreePass, row: int, slot: int, told: Told, new: list[Expansion]) -> None:
        tree = self.trees[slot]
        count, first = int(out.num_told[row]), int(out.first_places[row])
        assert int(out.num_new[row]) == len(new)
        assert int(out.lengths[row]) == len(tree.committed)
        assert tree.stand is not None
        assert int(out.stand_positions[row]) == len(tree.expansions[tree.stand].path) - 1
        assert count == len(told.expansions)
        if count:
            assert int(out.first_ids[row]) == told.first_id
            assert first + count == len(new)
        for place, (parent, rank, path) in enumerate(told.expansions, start=first):
            assert (int(out.parents[row, place]), int(out.ranks[row, place])) == (parent, rank)
            assert parent < 0 or parent in tree.told
            tree.told.add(int(out.first_ids[row]) + place - first)
            assert new[place].path == path
            self.seen["root" if parent < 0 else "child" if rank == 0 else "other"] += 1
        self.seen["hidden"] += len(new) - count
        self.seen["full"] += not new
        self.seen["two"] += len(new) > 1 and told.expansions[:1] != [] and told.expansions[0][0] >= 0

    def _check_place(self, out: TreePass, row: int, place: int, slot: int, expansion: Expansion) -> None:
        tree, index = self.trees[slot], row * self.width + place
        ring_row, position = expansion.id % tree.ring_size, len(expansion.path) - 1
        assert int(out.rows[row, place]) == (ring_row if place >= int(out.first_places[row]) else -1)
        assert int(out.token_ids[index]) == expansion.path[-1]
        assert int(out.positions[index]) == position
        assert int(out.sample_positions[index]) == position + 1
        assert int(out.slot_mapping[index]) == self._area(slot) + ring_row
        assert np.float32(out.logps[row, place].item()) == expansion.logp
        prefix_len = int(out.prefix_lens[row])
        assert prefix_len == tree.num_in_prefix
        # All that it reads, it included, are the keys of its own path.
        found = [self.cache[self._paged(slot, before)] for before in range(prefix_len)]
        self.cache[self._area(slot) + ring_row] = expansion.path
        nodes = torch.nonzero(out.is_ancestor[row, place]).flatten().tolist()
        found += sorted((self.cache[self._area(slot) + node] for node in nodes), key=lambda key: len(key or ()))
        assert found == [expansion.path[: length + 1] for length in range(position + 1)]
        self.seen["deep"] += position - prefix_len == MAX_DEPTH - 1

    def _check_places_of_nobody(self, out: TreePass, counts: list[int]) -> None:
        for row in range(len(out.num_new)):
            count = counts[row] if row < len(counts) else 0
            places = slice(row * self.width + count, (row + 1) * self.width)
            assert (out.rows[row, count:] == -1).all()
            assert not out.is_ancestor[row, count:].any()
            assert (out.slot_mapping[places] == -1).all()
            for values in (out.token_ids, out.positions, out.sample_positions):
                assert (values[places] == 0).all()
        for row in range(len(counts), len(out.num_new)):
            assert int(out.num_new[row]) == int(out.num_told[row]) == int(out.prefix_lens[row]) == 0

    def _copy(self, out: TreePass) -> None:
        pairs = zip(out.copy_sources.tolist(), out.copy_targets.tolist(), strict=True)
        moves = [(source, target) for source, target in pairs if source >= 0 or target >= 0]
        for target, path in [(target, self.cache[source]) for source, target in moves]:
            self.cache[target] = path
        self.seen["copied"] += len(moves)

    def _store(self, out: TreePass) -> None:
        stored = [slot for slot in out.slot_mapping.tolist() if slot >= 0]
        assert len(set(stored)) == len(stored)

    def _bring(self, slot: int, first: int) -> None:
        tree = self.trees[slot]
        for position in range(max(first, len(tree.committed) - NUM_RECENT), len(tree.committed)):
            self.state.recent_tokens[slot, position % NUM_RECENT] = tree.committed[position]
        self.state.lengths[slot] = len(tree.committed)

    def backlog(self, slot: int) -> int:
        """Committed tokens behind where the tree stood last."""
        tree = self.trees[slot]
        return len(tree.committed) - (len(tree.expansions[tree.stand].path) if tree.stand is not None else 0)

    def _other(self, known: list[int]) -> int:
        return self.rng.choice([token for token in range(VOCABULARY) if token not in known])

    def _paged(self, slot: int, position: int) -> int:
        return (slot * MAX_BLOCKS + position // BLOCK_SIZE) * BLOCK_SIZE + position % BLOCK_SIZE

    def _area(self, slot: int) -> int:
        return self.limits.area_start + slot * self.state.max_expansions


def poisoned(batch: int, width: int, max_expansions: int, device: torch.device) -> TreePass:
    out = TreePass.empty(batch, width, max_expansions, device)
    for item in fields(out):
        tensor = getattr(out, item.name)
        tensor.fill_(True if tensor.dtype == torch.bool else 77)
    return out


def play(history: History, num_steps: int) -> Counter[str]:
    rng = history.rng
    for slot in range(history.num_slots):
        history.open(slot)
    for _ in range(num_steps):
        for slot, tree in list(history.trees.items()):
            choice = rng.random()
            if len(tree.committed) > history.limits.max_length - 20:
                history.open(slot)
            elif choice < 0.02:
                history.restart(slot)
            elif choice < 0.35 and history.backlog(slot) <= NUM_RECENT - 26:
                history.commit(slot)
                if rng.random() < 0.2:  # several verdicts at once
                    history.commit(slot)
        slots = [slot for slot in history.trees if rng.random() < 0.8]
        rng.shuffle(slots)
        if slots:
            history.run(slots)
    return history.seen


CASES = [
    # ring, children, width, least probability of a path
    (64, 1, 1, 0.0),
    (64, 4, 4, 0.0),
    (71, 3, 2, 0.01),
    (64, 2, 32, 0.0),
    (512, 4, 8, 0.001),
    (200, 8, 5, 1e-9),
]


def assert_as_the_oracle(
    device: torch.device, case: tuple[int, int, int, float], *, seeds: range, num_steps: int
) -> Counter[str]:
    ring_size, num_children, width, min_probability = case
    total: Counter[str] = Counter()
    for seed in seeds:
        history = History(
            seed,
            device,
            ring_size=ring_size,
            num_children=num_children,
            width=width,
            min_probability=min_probability,
        )
        total += play(history, num_steps)
    return total


@pytest.mark.parametrize("case", CASES)
def test_trees_are_those_of_the_oracle(case: tuple[int, int, int, float]) -> None:
    """Catches a walk that stops early or goes too far, a key that is copied too late or from the wrong place, a node
    that reads its cousins, and an expansion that overwrites what is still needed."""
    total = assert_as_the_oracle(torch.device("cpu"), case, seeds=range(3), num_steps=120)
    ring_size, num_children, width, _ = case
    for event in ("root", "child", "copied", "hidden"):
        assert total[event] > 20, event
    if num_children > 1:
        assert total["other"] > 20
    if ring_size == 64 and width > 1:
        assert total["full"] > 3
    if ring_size == 512:
        assert total["two"] > 20


@pytest.mark.parametrize("case", CASES)
def test_kernels_grow_the_trees_of_the_oracle(triton_device: TritonDevice, case: tuple[int, int, int, float]) -> None:
    """The same of the kernels: the reference is as much the oracle's, token for token and bit for bit."""
    with triton_device() as device:
        total = assert_as_the_oracle(device, case, seeds=range(10, 11), num_steps=25 if device.type == "cpu" else 120)
    assert total["root"] + total["child"] > 5


def test_kernels_compile_for_hopper(tmp_path: Path) -> None:
    """The interpreter also runs what does not compile."""
    result = report_of("tests.kernels.compile_draft_trees", cache=tmp_path)
    assert set(result["kernels"]) == {"_choose_kernel", "_estimate_children_kernel", "_grow_kernel", "_lay_out_kernel"}
    assert result["shared_bytes"] <= 48 * 1024
    assert result["stack_bytes"] == 0
