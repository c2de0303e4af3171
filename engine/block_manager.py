"""Who holds which block of the paged KV cache."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt


class BlockTable(list[int]):
    """A sequence's blocks in order. Changed by a BlockManager alone, which keeps `array` the same as the list.

    A step copies the table of every sequence to the device; converting long lists each time would be slow.
    """

    def __init__(self) -> None:
        super().__init__()
        self._array = np.empty(16, dtype=np.int32)
        # Counts the blocks ever added, so that who has a copy knows whether it still begins as the table does.
        self.version = 0

    @property
    def array(self) -> npt.NDArray[np.int32]:
        """The block ids, [num_blocks]; a view that the next change of the table invalidates."""
        return self._array[: len(self)]

    def _push(self, block_id: int) -> None:
        if len(self) == len(self._array):
            self._array = np.concatenate([self._array, np.empty_like(self._array)])
        self._array[len(self)] = block_id
        self.append(block_id)
        self.version += 1


class BlockManager:
    """Hands out the blocks of one KV cache. Not thread-safe: it belongs to the thread that owns the model."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        # Taken from the end, so that a freed block, still warm in a cache, is the next one used.
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def grow(self, block_ids: BlockTable, num_tokens: int) -> bool:
        """Extend `block_ids` in place to cover `num_tokens`; False, and nothing changed, if too few are free."""
        missing = self.blocks_for(num_tokens) - len(block_ids)
        if missing <= 0:
            return True
        if missing > len(self._free):
            return False
        for _ in range(missing):
            block_ids._push(self._free.pop())
        return True

    def shrink(self, block_ids: BlockTable, num_tokens: int) -> None:
        """Give back the blocks of `block_ids`, in place, that `num_tokens` tokens do not need."""
        keep = self.blocks_for(num_tokens)
        if keep >= len(block_ids):
            return
        self._free.extend(reversed(block_ids[keep:]))
        del block_ids[keep:]

    def free(self, block_ids: BlockTable) -> None:
        """Give back all of `block_ids`, emptying it."""
        self.shrink(block_ids, 0)

    def check(self, held: Iterable[Iterable[int]]) -> None:
        """Raise AssertionError unless the free blocks and the `held` ones are all blocks, each once."""
        everything = sorted([*self._free, *(block for blocks in held for block in blocks)])
        assert everything == list(range(self.num_blocks)), "a KV block was lost or is held twice"
