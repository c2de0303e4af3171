"""Trees forwarded a few nodes at a time against plain forwarding of each path; accepted nodes are kept by copying."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.batch import SequenceSlice, TreeBatch
from engine.model_runner import ModelRunner
from tests.engine.small_models import FAMILIES, VOCAB_SIZE, save_model

BLOCK_SIZE = 16
NUM_BLOCKS = 24
AREA_SIZE = 40  # more than a tree has nodes, no multiple of a block
NUM_AREAS = 4


@dataclass
class Node:
    token_id: int
    parent: int  # index in the tree, -1 for the root
    place: int  # in the sequence's area


@dataclass
class Tree:
    """A sequence with committed tokens in blocks of its own, and nodes behind them."""

    area: int
    token_ids: list[int]  # committed, all of them computed
    block_ids: list[int]
    nodes: list[Node] = field(default_factory=list)

    def ancestors(self, index: int) -> list[int]:
        """From the root to the node itself."""
        path = []
        while index >= 0:
            path.append(index)
            index = self.nodes[index].parent
        return path[::-1]

    def path(self, index: int) -> list[int]:
        """The text up to and including the node."""
        return self.token_ids + [self.nodes[ancestor].token_id for ancestor in self.ancestors(index)]

    def slot(self, position: int) -> int:
        return self.block_ids[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    return torch.device(request.param)


@pytest.fixture(scope="module", params=list(FAMILIES))
def model_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(FAMILIES[request.param](), tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module", params=[False, True], ids=["unfused", "fused"])
def runner(request: pytest.FixtureRequest, model_path: Path, device: torch.device) -> ModelRunner:
    runner = ModelRunner(
        model_path,
        device=device,
        dtype=torch.float32,
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        num_reserved_slots=NUM_AREAS * AREA_SIZE,
        is_fused=request.param,
    )
    for stack in runner._cache.stacks:
        stack.fill_(float("nan"))  # what nobody has written leaves a trace wherever it is read
    return runner


@pytest.fixture(scope="module")
def oracle(model_path: Path) -> PreTrainedModel:
    """The same model with transformers' attention, on the CPU in float32."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        model_path, attn_implementation="eager", dtype=torch.float32
    )
    model.train(False)
    return model


@torch.inference_mode()
def oracle_logits(oracle: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:  # [len(token_ids), vocab_size]
    logits: torch.Tensor = oracle(torch.tensor([token_ids])).logits[0]
    return logits


def assert_same(logits: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(logits.cpu(), expected, atol=1e-4 * max(1.0, float(expected.abs().max())), rtol=0.0)


def grow(tree: Tree, num_nodes: int, numbers: random.Random) -> None:
    """Add nodes at places in no order. Parents are late ones more often than not, so that the tree becomes deep."""
    taken = {node.place for node in tree.nodes}
    places = numbers.sample([place for place in range(AREA_SIZE) if place not in taken], num_nodes)
    for place in places:
        newest = len(tree.nodes) - 1
        parent = newest if numbers.random() < 0.8 else numbers.randint(-1, newest)
        tree.nodes.append(Node(numbers.randrange(VOCAB_SIZE), parent, place))


def tree_batch(
    runner: ModelRunner, trees: list[Tree], chosen: list[list[int]], num_queries: int, numbers: random.Random
) -> TreeBatch:
    """The chosen nodes of each tree, filled up with padding, and a sequence of padding behind them."""
    batch = len(trees) + 1
    token_ids = torch.full((batch, num_queries), 7)
    positions = torch.zeros(batch, num_queries, dtype=torch.int64)
    slot_mapping = torch.full((batch, num_queries), -1)
    is_ancestor = torch.zeros(batch, num_queries, AREA_SIZE, dtype=torch.bool)
    # Of what is nobody's ancestor the position means nothing.
    node_positions = torch.tensor([[numbers.randrange(100) for _ in range(AREA_SIZE)] for _ in range(batch)])
    prefix_lens = torch.zeros(batch, dtype=torch.int32)
    block_tables = torch.full((batch, 10), NUM_BLOCKS - 1, dtype=torch.int32)
    node_starts = torch.full((batch,), runner.first_reserved_slot)
    for row, (tree, indices) in enumerate(zip(trees, chosen, strict=True)):
        prefix_lens[row] = len(tree.token_ids)
        block_tables[row, : len(tree.block_ids)] = torch.tensor(tree.block_ids, dtype=torch.int32)
        node_starts[row] += tree.area * AREA_SIZE
        for query, index in enumerate(indices):
            ancestors = tree.ancestors(index)
            token_ids[row, query] = tree.nodes[index].token_id
            positions[row, query] = len(tree.token_ids) + len(ancestors) - 1
            slot_mapping[row, query] = node_starts[row] + tree.nodes[index].place
            for depth, ancestor in enumerate(ancestors):
                is_ancestor[row, query, tree.nodes[ancestor].place] = True
                node_positions[row, tree.nodes[ancestor].place] = len(tree.token_ids) + depth
    return TreeBatch(
        token_ids=token_ids.flatten().to(runner.device),
        positions=positions.flatten().to(runner.device),
        slot_mapping=slot_mapping.flatten().to(runner.device),
        logit_rows=None,
        prefix_lens=prefix_lens.to(runner.device),
        block_tables=block_tables.to(runner.device),
        node_starts=node_starts.to(runner.device),
        is_ancestor=is_ancestor.to(runner.device),
        node_positions=node_positions.to(runner.device),
    )


def make_trees(runner: ModelRunner, numbers: random.Random) -> list[Tree]:
    """Committed texts of several lengths in their blocks, one of them empty, and areas in no order."""
    blocks = numbers.sample(range(NUM_BLOCKS - 1), NUM_BLOCKS - 1)
    areas = numbers.sample(range(NUM_AREAS), 3)
    trees = []
    for area, length in zip(areas, (37, 0, 16), strict=True):
        token_ids = numbers.choices(range(VOCAB_SIZE), k=length)
        trees.append(Tree(area, token_ids, [blocks.pop() for _ in range(7)]))
        if token_ids:
            runner.execute([SequenceSlice(token_ids, 0, trees[-1].block_ids, 1)])
    return trees


def forward_trees(
    runner: ModelRunner, trees: list[Tree], nodes: list[range], numbers: random.Random
) -> list[dict[int, torch.Tensor]]:  # of each tree, by node: [vocab_size]
    """Compute these nodes of each tree, so many a pass as it happens, ancestors among them."""
    logits: list[dict[int, torch.Tensor]] = [{} for _ in trees]
    waiting = [list(indices) for indices in nodes]
    while any(waiting):
        num_queries = numbers.choice((1, 2, 5, 8))
        chosen = []
        for indices in waiting:
            taken = indices[: numbers.randint(0, num_queries)]
            del indices[: len(taken)]
            chosen.append(numbers.sample(taken, len(taken)))
        output = runner.forward(tree_batch(runner, trees, chosen, num_queries, numbers))
        for row, indices in enumerate(chosen):
            for query, index in enumerate(indices):
                logits[row][index] = output[row * num_queries + query]
    return logits


def assert_paths(oracle: PreTrainedModel, tree: Tree, logits: dict[int, torch.Tensor]) -> None:
    """Each node's logits are those behind its path as a text of its own."""
    paths = [tree.path(index) for index in logits]
    longest = max(len(path) for path in paths)
    # What follows a path's end in its row, it does not see.
    with torch.inference_mode():
        output = oracle(torch.tensor([path + [0] * (longest - len(path)) for path in paths])).logits
    for row, path, expected in zip(logits.values(), paths, output, strict=True):
        assert_same(row, expected[len(path) - 1])


def test_nodes_see_their_path_and_nothing_else(runner: ModelRunner, oracle: PreTrainedModel) -> None:
    numbers = random.Random(1)
    trees = make_trees(runner, numbers)
    for tree, num_nodes in zip(trees, (30, 12, 25), strict=True):
        grow(tree, num_nodes, numbers)
    assert max(len(tree.ancestors(index)) for tree in trees for index in range(len(tree.nodes))) > 16, (
        "no path is longer than the models' windows"
    )
    logits = forward_trees(runner, trees, [range(len(tree.nodes)) for tree in trees], numbers)
    for tree, of_tree in zip(trees, logits, strict=True):
        assert len(of_tree) == len(tree.nodes)
        assert_paths(oracle, tree, of_tree)


def test_accepted_nodes_are_kept_by_copying(runner: ModelRunner, oracle: PreTrainedModel) -> None:
    """A path becomes committed: copied to its places in the blocks, it is what further nodes and tokens see."""
    numbers = random.Random(2)
    trees = make_trees(runner, numbers)
    for tree in trees:
        grow(tree, 14, numbers)
    forward_trees(runner, trees, [range(len(tree.nodes)) for tree in trees], numbers)
    sources, destinations = [-1, 3, -1], [-1, -1, 3]
    for tree in trees:
        accepted = tree.ancestors(max(range(len(tree.nodes)), key=lambda index: len(tree.ancestors(index))))[:9]
        assert len(accepted) > 3
        for depth, index in enumerate(accepted):
            area_start = runner.first_reserved_slot + tree.area * AREA_SIZE
            sources.append(area_start + tree.nodes[index].place)
            destinations.append(tree.slot(len(tree.token_ids) + depth))
        tree.token_ids = tree.path(accepted[-1])
        tree.nodes.clear()
    runner.copy_kv(
        torch.tensor(sources, device=runner.device),
        torch.tensor(destinations, device=runner.device),
    )
    for tree in trees:
        grow(tree, 10, numbers)
    logits = forward_trees(runner, trees, [range(len(tree.nodes)) for tree in trees], numbers)
    for tree, of_tree in zip(trees, logits, strict=True):
        assert_paths(oracle, tree, of_tree)
    more = numbers.choices(range(VOCAB_SIZE), k=5)
    output = runner.execute([SequenceSlice(more, len(tree.token_ids), tree.block_ids, 5) for tree in trees])
    for row, tree in enumerate(trees):
        assert_same(output[5 * row : 5 * row + 5], oracle_logits(oracle, tree.token_ids + more)[-5:])
