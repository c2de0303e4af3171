"""Who holds which KV block."""

from __future__ import annotations

import random

import pytest

from engine.block_manager import BlockManager, BlockTable


def test_growing_takes_whole_blocks_and_only_when_needed() -> None:
    manager = BlockManager(4, 16)
    blocks = BlockTable()
    assert manager.grow(blocks, 1)
    assert len(blocks) == 1
    assert manager.grow(blocks, 16)
    assert len(blocks) == 1
    assert manager.grow(blocks, 17)
    assert len(blocks) == 2
    assert manager.grow(blocks, 5)
    assert len(blocks) == 2, "growing never shrinks"
    assert manager.num_free == 2


def test_growing_takes_all_or_nothing() -> None:
    """Catches blocks that are lost when a sequence gets only a part of what it asked for."""
    manager = BlockManager(3, 16)
    blocks = BlockTable()
    assert not manager.grow(blocks, 49)
    assert (blocks, manager.num_free) == ([], 3)
    assert manager.grow(blocks, 48)
    assert manager.num_free == 0


def test_shrinking_gives_back_whole_blocks() -> None:
    manager = BlockManager(4, 16)
    blocks = BlockTable()
    manager.grow(blocks, 64)
    kept = blocks[:2]
    manager.shrink(blocks, 17)
    assert blocks == kept
    assert manager.num_free == 2
    manager.free(blocks)
    assert (blocks, manager.num_free) == ([], 4)


def test_random_use_keeps_every_block_exactly_once() -> None:
    chance = random.Random(2)
    manager = BlockManager(60, 1)
    held = [BlockTable() for _ in range(5)]
    copies: list[tuple[int, list[int]]] = [(0, [])] * 5  # as who keeps a copy does: version and blocks
    num_refused = 0
    for _ in range(2000):
        index = chance.randrange(5)
        blocks = held[index]
        before = list(blocks)
        num_tokens = chance.randint(0, 40)
        if chance.random() < 0.6:
            is_grown = manager.grow(blocks, num_tokens)
            assert blocks[: len(before)] == before
            assert len(blocks) == (max(len(before), num_tokens) if is_grown else len(before))
            num_refused += not is_grown
        else:
            manager.shrink(blocks, num_tokens)
            assert blocks == before[:num_tokens]
        manager.check(held)
        assert blocks.array.tolist() == blocks, "what a step uploads is not what the sequence holds"
        if copies[index][0] != blocks.version:
            copies[index] = (blocks.version, list(blocks))
        assert copies[index][1][: len(blocks)] == blocks, "a copy that passes for good is not"
    assert num_refused > 100


def test_a_lost_or_doubled_block_is_noticed() -> None:
    manager = BlockManager(3, 16)
    blocks = BlockTable()
    manager.grow(blocks, 20)
    for wrong in ([blocks[:1]], [blocks, blocks], []):
        with pytest.raises(AssertionError, match="lost or is held twice"):
            manager.check(wrong)
