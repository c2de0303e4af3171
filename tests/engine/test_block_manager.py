"""Who holds which KV block, and which blocks others can use."""

from __future__ import annotations

import pytest

from engine.block_manager import BlockManager, BlockTable

SIZE = 4


def grown(manager: BlockManager, num_tokens: int) -> BlockTable:
    table = BlockTable()
    assert manager.grow(table, num_tokens)
    return table


def published(manager: BlockManager, token_ids: list[int]) -> BlockTable:
    table = grown(manager, len(token_ids))
    manager.publish(table, token_ids)
    return table


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


def test_a_follower_of_a_table_copies_what_changed_and_no_more() -> None:
    """Catches a device's copy that is stale behind an unchanged version, and one that is written anew each step."""
    manager = BlockManager(12, SIZE)
    table = grown(manager, 3 * SIZE)
    assert table.changed_since(0) == 0
    version = table.version
    assert table.changed_since(version) == 3
    manager.shrink(table, 2 * SIZE)
    assert (table.version, table.changed_since(version)) == (version, 2), "the entries that remain are the same"
    manager.grow(table, 4 * SIZE)
    assert table.changed_since(version) == 2
    assert table.changed_since(table.version) == 4

    version = table.version
    twin = manager.fork(table)
    assert (table.version, table.changed_since(version)) == (version, 4), "to be shared changes no entry"
    assert twin.changed_since(0) == 0
    assert manager.make_writable(table, SIZE + 1, SIZE + 2)
    assert table.changed_since(version) == 1
    version = table.version
    manager.grow(table, 5 * SIZE)
    assert table.changed_since(version) == 4

    version = twin.version
    third = manager.fork(twin)
    assert manager.make_writable(twin, 2 * SIZE + 1, 6 * SIZE)
    assert twin.changed_since(version) == 2, "two entries replaced and two added count from the first"
    manager.check([table, twin, third])


def test_a_block_is_free_when_its_last_table_gives_it_back() -> None:
    manager = BlockManager(4, SIZE)
    table = grown(manager, 2 * SIZE)
    twin = manager.fork(table)
    third = manager.fork(twin)
    assert table == twin == third
    assert manager.num_free == 2
    manager.free(table)
    manager.shrink(third, SIZE)
    assert manager.num_free == 2
    manager.shrink(twin, SIZE)
    assert manager.num_free == 3
    manager.check([table, twin, third])
    manager.free(twin)
    manager.free(third)
    assert manager.num_free == 4
    manager.check([])


def test_who_writes_to_a_shared_block_gets_a_copy_of_that_block_alone() -> None:
    manager = BlockManager(8, SIZE)
    table = grown(manager, 2 * SIZE + 1)
    twin = manager.fork(table)
    before = list(table)
    copies = manager.make_writable(twin, 2 * SIZE + 1, 3 * SIZE + 1)
    assert copies == [(before[2], twin[2])]
    assert table == before
    assert twin[:2] == before[:2]
    assert len({*table, *twin}) == 5
    assert manager.make_writable(twin, 2 * SIZE + 1, 3 * SIZE + 1) == [], "the block is the twin's own by now"
    assert manager.make_writable(table, 2 * SIZE + 1, 2 * SIZE + 2) == [], "and this one the other's"
    manager.check([table, twin])


def test_writing_after_truncation_copies_the_full_block_that_is_still_shared() -> None:
    manager = BlockManager(8, SIZE)
    table = grown(manager, 2 * SIZE)
    twin = manager.fork(table)
    manager.shrink(twin, SIZE + 2)
    assert manager.make_writable(twin, SIZE + 2, SIZE + 3) == [(table[1], twin[1])]
    assert twin[0] == table[0]
    manager.check([table, twin])


def test_a_shared_block_that_is_written_whole_needs_no_copy() -> None:
    manager = BlockManager(8, SIZE)
    table = grown(manager, 3 * SIZE)
    twin = manager.fork(table)
    assert manager.make_writable(twin, SIZE, 3 * SIZE - 1) == [(table[2], twin[2])]
    assert twin[0] == table[0]
    assert not {*twin[1:]} & {*table}
    manager.check([table, twin])


def test_making_writable_takes_all_or_nothing() -> None:
    """Catches a copy without a block for the token after it, and blocks that are lost when there are too few."""
    manager = BlockManager(4, SIZE)
    table = grown(manager, SIZE + 1)
    twin = manager.fork(table)
    before = (list(twin), twin.version, manager.num_free)
    assert manager.make_writable(twin, SIZE + 1, 3 * SIZE + 1) is None
    assert (list(twin), twin.version, manager.num_free) == before
    manager.check([table, twin])
    assert manager.make_writable(twin, SIZE + 1, 3 * SIZE) == [(table[1], twin[1])]
    assert manager.num_free == 0
    manager.check([table, twin])
    for start, end in ((3, 3), (4, 3), (-1, 2)):
        with pytest.raises(ValueError, match="no range"):
            manager.make_writable(twin, start, end)


def test_a_published_prefix_is_matched_in_full_blocks_and_never_whole() -> None:
    manager = BlockManager(8, SIZE)
    tokens = list(range(2 * SIZE + 1))
    table = published(manager, tokens)
    assert manager.match(tokens) == table[:2], "the third block is not full"
    assert manager.match(tokens[: 2 * SIZE]) == table[:1], "one token at least is left to compute"
    assert manager.match(tokens[:SIZE]) == []
    assert manager.match([]) == []
    assert manager.match([*tokens[:SIZE], 99, *tokens[SIZE:]]) == table[:1]
    assert manager.match([*tokens[: SIZE - 1], 99, *tokens[SIZE:]]) == [], "all tokens of a block count"


def test_the_same_tokens_behind_another_prefix_are_not_matched() -> None:
    """Catches blocks found by their own tokens alone: their keys and values depend on all before them."""
    manager = BlockManager(8, SIZE)
    first = published(manager, [1] * SIZE + [7] * SIZE)
    second = published(manager, [2] * SIZE + [7] * SIZE)
    assert manager.match([2] * SIZE + [7] * (SIZE + 1)) == second
    assert manager.match([1] * SIZE + [7] * (SIZE + 1)) == first
    assert manager.match([3] * SIZE + [7] * (SIZE + 1)) == []


def test_cached_blocks_count_as_free_and_go_when_they_are_needed() -> None:
    """First what nobody can use, then what was unused for the longest time, of a prefix its end first."""
    manager = BlockManager(5, SIZE)
    old, young = [1] * (2 * SIZE + 1), [2] * (2 * SIZE + 1)
    tables = [published(manager, tokens[:-1]) for tokens in (old, young)]
    old_blocks = list(tables[0])
    for table in tables:
        manager.free(table)
    assert manager.num_free == 5
    manager.check([])

    used = grown(manager, SIZE)
    assert used[0] not in old_blocks
    again = manager.match(old)
    assert again == old_blocks, "what is used stays for the next one"
    assert manager.num_free == 2
    manager.free(again)
    manager.grow(used, 2 * SIZE)
    rest = manager.match(young)
    assert len(rest) == 1, "the younger prefix was unused for longer by now"
    manager.check([used, rest])


def test_a_block_that_is_used_anew_is_no_longer_matched() -> None:
    manager = BlockManager(2, SIZE)
    tokens = list(range(2 * SIZE + 1))
    table = published(manager, tokens[:-1])
    manager.free(table)
    used = grown(manager, 2 * SIZE)
    assert manager.match(tokens) == []
    manager.check([used])


def test_a_published_block_that_is_written_to_is_no_longer_matched_nor_what_is_behind_it() -> None:
    manager = BlockManager(4, SIZE)
    tokens = list(range(3 * SIZE + 1))
    table = published(manager, tokens[:-1])
    kept = table[:1]
    fork = manager.fork(table)
    manager.shrink(table, SIZE + 2)
    assert manager.make_writable(table, SIZE + 2, SIZE + 3) == [(fork[1], table[1])]
    manager.free(table)
    matched = manager.match(tokens)
    assert matched == fork, "the fork's own are as they were"
    manager.free(matched)
    manager.shrink(fork, SIZE + 2)
    assert manager.make_writable(fork, SIZE + 2, SIZE + 3) == []
    matched = manager.match(tokens)
    assert matched == kept
    assert manager.num_free == 2
    manager.check([fork, matched])


def test_what_is_published_twice_keeps_its_first_blocks() -> None:
    manager = BlockManager(8, SIZE)
    tokens = list(range(2 * SIZE + 1))
    first = published(manager, tokens[:SIZE])
    second = published(manager, tokens[:-1])
    assert manager.match(tokens) == [first[0], second[1]]


def test_a_block_is_not_published_as_something_else() -> None:
    manager = BlockManager(8, SIZE)
    table = published(manager, [1] * SIZE)
    with pytest.raises(ValueError, match="other tokens"):
        manager.publish(table, [2] * SIZE)


def test_check_notices_what_is_wrong() -> None:
    manager = BlockManager(4, SIZE)
    table = published(manager, [1] * 2 * SIZE)
    manager.check([table])
    for wrong in ([table[:1]], [table, table], []):
        with pytest.raises(AssertionError, match="more or less often than tables name it"):
            manager.check(wrong)
    manager._free.append(table[0])
    with pytest.raises(AssertionError, match="lost or is held twice"):
        manager.check([table])
    manager._free.pop()
    table._array[1] = 3
    with pytest.raises(AssertionError, match="array is not what its list is"):
        manager.check([table])
    table._array[1] = table[1]
    table.reverse()
    table._array[:2] = table
    with pytest.raises(AssertionError, match="published for another position"):
        manager.check([table])
