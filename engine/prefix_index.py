"""Which blocks hold the keys and values of which tokens, for sequences that begin alike.

Keys and values depend on all tokens before them, so a block is found by its own tokens and by the block before it. The
index is therefore a tree: a path from its root is a prefix, cut into blocks. Its branches are told apart by the tokens
themselves and not by a hash of them, so that no two prefixes can ever be taken for each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(eq=False, slots=True)
class Publication:
    """A block that others can find, in its place behind the block that holds the tokens before its own."""

    block_id: int
    parent: Publication | None  # None: the root, which stands for the empty prefix and has no block
    tokens: bytes  # the block's own tokens, each as an int32
    children: dict[bytes, Publication] = field(default_factory=dict)


class PrefixIndex:
    """The published blocks of one KV cache. It knows nothing of who holds them."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._root = Publication(-1, None, b"")
        # By block id. For reading: publish and remove alone change it.
        self.publications: dict[int, Publication] = {}

    def publish(self, block_ids: Sequence[int], token_ids: Sequence[int]) -> None:
        """Let the blocks that `token_ids` fill be found; `block_ids` are those of the sequence, in order.

        Where the index has another block for the same prefix already, that one stays. Raises ValueError if a block is
        published as something else: it was written to without the manager's knowledge, or the tokens are wrong.
        """
        parent = self._root
        for block_id, tokens in zip(block_ids, self._cut(token_ids), strict=False):
            known, own = parent.children.get(tokens), self.publications.get(block_id)
            if own is not None and own is not known:
                raise ValueError(f"block {block_id} is published with other tokens than these")
            if known is None:
                known = parent.children[tokens] = Publication(block_id, parent, tokens)
                self.publications[block_id] = known
            parent = known

    def match(self, token_ids: Sequence[int]) -> list[int]:
        """The blocks of the longest published prefix of `token_ids`, in order; empty if there is none."""
        block_ids: list[int] = []
        place = self._root
        for tokens in self._cut(token_ids):
            child = place.children.get(tokens)
            if child is None:
                break
            block_ids.append(child.block_id)
            place = child
        return block_ids

    def remove(self, block_id: int) -> list[int]:
        """Take back the publication of a block, and with it those behind it, which nobody could reach any more.

        Returns all blocks that are no longer published, `block_id` first.
        """
        publication = self.publications[block_id]
        assert publication.parent is not None
        del publication.parent.children[publication.tokens]
        removed = [publication]
        for gone in removed:  # grows while it is walked
            removed.extend(gone.children.values())
            del self.publications[gone.block_id]
        return [gone.block_id for gone in removed]

    def check(self) -> dict[int, int]:
        """Raise AssertionError unless tree and `publications` agree; returns the place of each block in its prefix."""
        places: dict[int, int] = {}
        level, place = [self._root], 0
        while level:
            children = [(parent, tokens, child) for parent in level for tokens, child in parent.children.items()]
            for parent, tokens, child in children:
                assert child.parent is parent, f"published block {child.block_id} does not know what stands before it"
                assert child.tokens == tokens, f"published block {child.block_id} is found by tokens of another"
                assert self.publications.get(child.block_id) is child, f"block {child.block_id} is published twice"
                places[child.block_id] = place
            level, place = [child for _, _, child in children], place + 1
        assert len(places) == len(self.publications), "a published block cannot be found"
        return places

    def _cut(self, token_ids: Sequence[int]) -> Iterator[bytes]:
        """The tokens of each full block."""
        data = np.asarray(token_ids, dtype=np.int32).tobytes()
        stride = 4 * self._block_size
        return (data[start : start + stride] for start in range(0, len(data) - stride + 1, stride))
