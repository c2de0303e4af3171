"""Who holds which block of the paged KV cache, and which blocks hold what others can use.

A block may stand in several tables: `fork` makes a second table of the same blocks, and `match` finds blocks that were
published with the same tokens. The references to each block are counted. It is available to others when the last table
has given it back: at once if it is not published, and if it is, when no other is left (the longest unused first).

**Writing.** What is written to a shared block would show in every table that holds it, and what is written to a
published one in every table to come. Whoever writes to a table that was forked, matched or published therefore asks
`make_writable` first, each time; for a table that never was, `grow` is enough. The manager moves no data: it says which
blocks have to be copied, as pairs of (source, destination), and the caller copies them on the device, in all layers,

* after everything that earlier steps write, and before anything that the coming step writes or reads;
* the pairs of one call in any order or at once, those of several calls one call after another: a block that one call
  names can be named again by the next, when its table was given up in between.

So blocks may be given back, matched or taken anew while copies are still due, as nothing is written before those.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.prefix_index import PrefixIndex


class BlockCopy(NamedTuple):
    """A block whose contents the caller has to copy to another."""

    source: int
    destination: int


class BlockTable(list[int]):
    """A sequence's blocks in order. Changed by a BlockManager alone, which keeps `array` the same as the list.

    A step copies the table of every sequence to the device; converting long lists each time would be slow. Who keeps a
    copy keeps the `version` with it, and follows the table so:

        if table.version != version:
            first = table.changed_since(version)
            copy[first : len(table)] = table.array[first:]
            version = table.version

    Giving back blocks at the end changes no version, as the entries that remain are still those of the copy.
    """

    def __init__(self) -> None:
        super().__init__()
        self._array = np.empty(16, dtype=np.int32)
        # Counts the entries ever written; to replace some counts as writing all from the first of them to the end. Only
        # ever grows, and says nothing of other tables: who turns to another one begins at version 0.
        self.version = 0

    @property
    def array(self) -> npt.NDArray[np.int32]:
        """The block ids, [num_blocks]; a view that the next change of the table invalidates."""
        return self._array[: len(self)]

    def changed_since(self, version: int) -> int:
        """The first index whose entry may differ from what it was at `version`; `len(table)` where none does.

        Exact for who asks after each call that changed the table; else it may be lower than need be, never higher. 0
        for version 0, which is the empty table's.
        """
        # Each entry written since then lies at most as far from the end as the version has grown: writing at the end
        # moves both by one, replacing moves the version by that distance, and shrinking only brings the end nearer.
        return max(0, len(self) - (self.version - version))

    def _push(self, block_id: int) -> None:
        index = len(self)
        if index == len(self._array):
            self._array = np.concatenate([self._array, np.empty_like(self._array)])
        self._array[index] = block_id
        self.append(block_id)
        self.version += 1

    def _replace(self, entries: Mapping[int, int]) -> None:
        for index, block_id in entries.items():
            self[index] = block_id
            self._array[index] = block_id
        self.version += len(self) - min(entries)


class BlockManager:
    """Hands out the blocks of one KV cache. Not thread-safe: it belongs to the thread that owns the model."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        # How often each block stands in a table.
        self._num_references = [0] * num_blocks
        # Neither referenced nor published. Taken from the end, so that a freed block, still warm in a cache, is the
        # next one used.
        self._free = list(range(num_blocks - 1, -1, -1))
        # Published and not referenced, the longest unused first.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._index = PrefixIndex(block_size)

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, those included that wait for a sequence that begins with their tokens."""
        return len(self._free) + len(self._cached)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def grow(self, block_ids: BlockTable, num_tokens: int) -> bool:
        """Extend `block_ids` in place to cover `num_tokens`; False, and nothing changed, if too few are free."""
        # Once for every sequence of every step: blocks_for and num_free are written out.
        missing = -(-num_tokens // self.block_size) - len(block_ids)
        if missing <= 0:
            return True
        if missing > len(self._free) + len(self._cached):
            return False
        free, references = self._free, self._num_references
        for _ in range(missing):
            block_id = free.pop() if free else self._reclaim()
            references[block_id] = 1
            block_ids._push(block_id)
        return True

    def make_writable(self, block_ids: BlockTable, start: int, end: int) -> list[BlockCopy] | None:
        """Let the caller write positions `start` to `end - 1`: grow `block_ids` to cover them and let it share none.

        Returns the copies that the caller has to make before it writes (the module's docstring says when); mostly none.
        They leave the positions outside of `start` to `end` as they were, so a block that will be written whole is
        replaced without a copy. None, and nothing changed, if too few blocks are free. A block that was published and
        is nobody else's is written in place and loses its publication.

        Raises ValueError if the range is empty or negative.
        """
        if not 0 <= start < end:
            raise ValueError(f"positions {start} to {end} are no range to write to")
        references, published = self._num_references, self._index.publications
        num_needed, num_held = -(-end // self.block_size), len(block_ids)
        touched = range(start // self.block_size, min(num_needed, num_held))
        shared = [index for index in touched if references[block_ids[index]] > 1]
        if len(shared) + max(0, num_needed - num_held) > len(self._free) + len(self._cached):
            return None
        for index in touched:
            if block_ids[index] in published and references[block_ids[index]] == 1:
                self._unpublish(block_ids[index])
        copies = self._replace_shared(block_ids, shared, start, end) if shared else []
        self.grow(block_ids, end)
        return copies

    def shrink(self, block_ids: BlockTable, num_tokens: int) -> None:
        """Give back the blocks of `block_ids`, in place, that `num_tokens` tokens do not need."""
        keep = -(-num_tokens // self.block_size)
        if keep >= len(block_ids):
            return
        references, published = self._num_references, self._index.publications
        # From the end, so that of a cached prefix the last block goes first: without it, the others are still of use.
        while len(block_ids) > keep:
            block_id = block_ids.pop()
            references[block_id] -= 1
            if references[block_id] > 0:
                continue
            if block_id in published:
                self._cached[block_id] = None
            else:
                self._free.append(block_id)

    def free(self, block_ids: BlockTable) -> None:
        """Give back all of `block_ids`, emptying it."""
        self.shrink(block_ids, 0)

    def fork(self, block_ids: BlockTable) -> BlockTable:
        """A second table of the same blocks, for a sequence with the same tokens so far. Needs no free block.

        What is written afterwards shows in one of the two alone. What `make_writable` had allowed before, and no step
        has written yet, is written to the shared block: the fork must not count on it, and shrinks to what there is.
        """
        return self._hold(block_ids)

    def publish(self, block_ids: BlockTable, token_ids: Sequence[int]) -> None:
        """Let `match` find the blocks of `block_ids` that `token_ids` fill to the last position.

        `token_ids` are the sequence's from its first on, as far as their keys and values are in the blocks, or will be
        before any step reads them that is launched from now on. A prefix that is published already stays with the
        blocks that it has. The cost is one look-up for each block of the sequence, so not for every token.

        Raises ValueError if a block is published with other tokens.
        """
        self._index.publish(block_ids, token_ids)

    def match(self, token_ids: Sequence[int]) -> BlockTable:
        """A table of the published blocks for the longest prefix of `token_ids`, perhaps empty.

        `len(table) * block_size` tokens have their keys and values in it: full blocks only, and never all of
        `token_ids`, as a sequence needs the logits of its last token. The table holds the blocks like any other.
        """
        block_ids = self._index.match(token_ids[: max(0, len(token_ids) - 1)])
        for block_id in block_ids:
            self._cached.pop(block_id, None)
        return self._hold(block_ids)

    def check(self, held: Iterable[Iterable[int]]) -> None:
        """Raise AssertionError unless each block is free, cached or referenced as often as the `held` tables name it.

        Also that the tables' arrays equal their lists, and that published blocks are found where they belong. For
        tests: takes time for every block.
        """
        places = self._index.check()
        named: Counter[int] = Counter()
        for table in held:
            block_ids = list(table)
            named.update(block_ids)
            assert len(set(block_ids)) == len(block_ids), "a KV block stands twice in one table"
            if isinstance(table, BlockTable):
                assert table.array.tolist() == block_ids, "a table's array is not what its list is"
            for index, block_id in enumerate(block_ids):
                assert places.get(block_id, index) == index, f"KV block {block_id} is published for another position"
        references = [named[block_id] for block_id in range(self.num_blocks)]
        assert references == self._num_references, "a KV block is referenced more or less often than tables name it"
        unheld = [block_id for block_id, count in enumerate(references) if not count]
        assert sorted([*self._free, *self._cached]) == unheld, "a KV block was lost or is held twice"
        assert self._cached.keys() <= places.keys(), "a cached KV block is not published"
        assert not places.keys() & set(self._free), "a free KV block is published"

    def _replace_shared(self, block_ids: BlockTable, indices: Sequence[int], start: int, end: int) -> list[BlockCopy]:
        """Put blocks of the table's own in place of shared ones; what of these is to be copied."""
        own = {index: self._free.pop() if self._free else self._reclaim() for index in indices}
        copies = []
        for index, block_id in own.items():
            self._num_references[block_ids[index]] -= 1
            self._num_references[block_id] = 1
            if index * self.block_size < start or (index + 1) * self.block_size > end:
                copies.append(BlockCopy(block_ids[index], block_id))
        block_ids._replace(own)
        return copies

    def _reclaim(self) -> int:
        """A block to use anew where none is free: the longest unused of the cached ones, of which there must be one."""
        self._unpublish(next(iter(self._cached)))
        return self._free.pop()

    def _unpublish(self, block_id: int) -> None:
        """Take back the publication of a block and of those behind it; of these, the cached ones become free."""
        for gone in reversed(self._index.remove(block_id)):
            if gone in self._cached:
                del self._cached[gone]
                self._free.append(gone)

    def _hold(self, block_ids: Iterable[int]) -> BlockTable:
        table = BlockTable()
        for block_id in block_ids:
            self._num_references[block_id] += 1
            table._push(block_id)
        return table
