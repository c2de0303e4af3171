"""Random histories of sequences that share blocks, against a model that is too simple to be wrong.

What a position of a block holds stands for its keys and values: a number for the token and all tokens before it. A
block that is shared wrongly, a copy that was forgotten or a stale match shows as a number that is not the sequence's.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.block_manager import BlockManager, BlockTable

NUM_HISTORIES = 2000
NUM_STEPS = 14


@dataclass(eq=False)
class Sharer:
    token_ids: list[int]  # those whose contents are in the blocks, or will be after the next step
    table: BlockTable
    num_written: int  # of the tokens, before the next step
    writes: list[tuple[int, int, int]] = field(default_factory=list)  # block, place in it, content: of the next step
    num_kept: int = 0  # of the tokens, after the next step
    is_planned: bool = False
    version: int = 0
    copy: list[int] = field(default_factory=list)  # as a device has it of the table


class Contents:
    """A number for each prefix."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int], int] = {}

    def of(self, token_ids: Sequence[int]) -> list[int]:
        numbers, before = [], 0
        for token_id in token_ids:
            before = self._numbers.setdefault((before, token_id), len(self._numbers) + 1)
            numbers.append(before)
        return numbers


class Publications:
    """The published prefixes by their tokens, and when each block was given back: the manager has to agree."""

    def __init__(self, num_blocks: int) -> None:
        self._blocks: dict[tuple[int, ...], int] = {}
        self._given_back = [0] * num_blocks
        self._clock = 0
        self.num_dropped = 0

    def publish(self, table: Sequence[int], token_ids: Sequence[int], size: int) -> None:
        for index in range(len(token_ids) // size):
            self._blocks.setdefault(tuple(token_ids[: (index + 1) * size]), table[index])

    def match(self, token_ids: Sequence[int], size: int) -> list[int]:
        found = []
        for end in range(size, len(token_ids), size):
            block = self._blocks.get(tuple(token_ids[:end]))
            if block is None:
                break
            found.append(block)
        return found

    def drop(self, block: int) -> None:
        for gone in [prefix for prefix, owner in self._blocks.items() if owner == block]:
            self._blocks = {prefix: owner for prefix, owner in self._blocks.items() if prefix[: len(gone)] != gone}
            self.num_dropped += 1

    def give_back(self, block: int) -> None:
        self._clock += 1
        self._given_back[block] = self._clock

    def expect_taken(self, block: int, held: set[int]) -> None:
        """A block that was unheld is taken: rightly so if no other should have gone before it."""
        unheld = set(range(len(self._given_back))) - held
        unpublished = unheld - set(self._blocks.values())
        if unpublished:
            assert block in unpublished, "what others could use was taken, and there was an unpublished block"
        else:
            assert block == min(unheld, key=self._given_back.__getitem__), "not the longest unused block was taken"
        self.drop(block)


class History:
    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.size = self.chance.randint(1, 4)
        self.num_blocks = self.chance.randint(4, 24)
        self.manager = BlockManager(self.num_blocks, self.size)
        self.device = [[0] * self.size for _ in range(self.num_blocks)]
        self.contents = Contents()
        self.publications = Publications(self.num_blocks)
        self.living: list[Sharer] = []
        self.copies: list[tuple[int, int]] = []
        self.seen: Counter[str] = Counter()

    def run(self) -> Counter[str]:
        for _ in range(NUM_STEPS):
            for _ in range(self.chance.randint(1, 4)):
                self._change()
                self._check()
            self._write()
            for sequence in self.living:
                self._commit(sequence)
                self._check()
        self.seen["dropped"] = self.publications.num_dropped
        return self.seen

    def _change(self) -> None:
        kind = self.chance.random()
        if not self.living or kind < 0.15:
            self._open()
            return
        sequence = self.chance.choice(self.living)
        if kind < 0.3:
            self.seen["forked"] += 1
            fork = self.manager.fork(sequence.table)
            self._shrink(fork, sequence.num_written)
            self.living.append(Sharer(sequence.token_ids[: sequence.num_written], fork, sequence.num_written))
        elif kind < 0.3 + 0.1 * len(self.living):
            self.living.remove(sequence)
            self._shrink(sequence.table, 0)
        elif not sequence.is_planned:
            self._plan_write(sequence)

    def _open(self) -> None:
        """A sequence that begins with what is published of its tokens."""
        prompt = [self.chance.randrange(2) for _ in range(self.chance.randint(0, 10))]
        if self.living:
            other = self.chance.choice(self.living).token_ids
            prompt = other[: self.chance.randint(0, len(other))] + prompt
        table = self.manager.match(prompt)
        assert table == self.publications.match(prompt, self.size), "not the longest published prefix was matched"
        self.seen["matched"] += len(table)
        num_tokens = len(table) * self.size
        self.living.append(Sharer(prompt[:num_tokens], table, num_tokens))

    def _plan_write(self, sequence: Sharer) -> None:
        """Write from the last tokens on, of which some will turn out to be rejected; perhaps back to where it was."""
        start = len(sequence.token_ids)
        if self.chance.random() < 0.4:
            start = self.chance.randint(0, start)
            if self.chance.random() < 0.5:
                self._shrink(sequence.table, start)
        num_new = self.chance.randint(1, 2 * self.size + 1)
        token_ids = sequence.token_ids[:start] + [self.chance.randrange(2) for _ in range(num_new)]
        sequence.token_ids, sequence.num_written = sequence.token_ids[:start], start
        if not self._make_writable(sequence.table, start, len(token_ids)):
            return
        for position, content in list(enumerate(self.contents.of(token_ids)))[start:]:
            block = sequence.table[position // self.size]
            sequence.writes.append((block, position % self.size, content))
        sequence.token_ids, sequence.is_planned = token_ids, True
        sequence.num_kept = self.chance.randint(start, len(token_ids))

    def _make_writable(self, table: BlockTable, start: int, end: int) -> bool:
        size, before, held = self.size, list(table), Counter(block for s in self.living for block in s.table)
        touched = range(start // size, min(-(-end // size), len(before)))
        shared = [index for index in touched if held[before[index]] > 1]
        num_new = max(0, -(-end // size) - len(before))
        copies = self.manager.make_writable(table, start, end)
        assert (copies is None) == (len(shared) + num_new > self.num_blocks - len(held))
        if copies is None:
            self.seen["refused"] += 1
            assert table == before
            return False
        for index in touched:
            if index not in shared:
                self.publications.drop(before[index])
        owned = set(held)
        for index in [*shared, *range(len(before), len(before) + num_new)]:
            self.publications.expect_taken(table[index], owned)
            owned.add(table[index])
        assert all(table[index] == before[index] for index in range(len(before)) if index not in shared)
        is_whole = {index: start <= index * size and (index + 1) * size <= end for index in shared}
        assert copies == [(before[index], table[index]) for index in shared if not is_whole[index]]
        self.seen["copied"] += len(copies)
        self.seen["replaced"] += sum(is_whole.values())
        self.copies += copies
        return True

    def _shrink(self, table: BlockTable, num_tokens: int) -> None:
        surplus = table[-(-num_tokens // self.size) :]
        self.manager.shrink(table, num_tokens)
        held = {block for sequence in self.living for block in sequence.table}
        for block in reversed(surplus):
            if block not in held:
                self.publications.give_back(block)

    def _write(self) -> None:
        """A step of the device: first all copies in the order in which they were asked for, then what is written."""
        for source, destination in self.copies:
            self.device[destination] = list(self.device[source])
        self.copies.clear()
        for sequence in self.living:
            for block, place, content in sequence.writes:
                self.device[block][place] = content
            sequence.writes.clear()
        for sequence in self.living:
            held = [content for block in sequence.table for content in self.device[block]][: len(sequence.token_ids)]
            assert held == self.contents.of(sequence.token_ids), "a sequence finds what another one wrote"

    def _commit(self, sequence: Sharer) -> None:
        if sequence.is_planned:
            sequence.is_planned = False
            del sequence.token_ids[sequence.num_kept :]
            self._shrink(sequence.table, len(sequence.token_ids))
        sequence.num_written = len(sequence.token_ids)
        if self.chance.random() < 0.5:
            self.manager.publish(sequence.table, sequence.token_ids)
            self.publications.publish(sequence.table, sequence.token_ids, self.size)

    def _check(self) -> None:
        self.manager.check(sequence.table for sequence in self.living)
        held = {block for sequence in self.living for block in sequence.table}
        assert self.manager.num_free == self.num_blocks - len(held)
        for sequence in self.living:
            if self.chance.random() < 0.5:
                continue  # who follows a table may miss many of its changes
            table = sequence.table
            first = table.changed_since(sequence.version)
            assert first >= len(table) or table.version != sequence.version, "a change that no version tells of"
            assert sequence.copy[:first] == table[:first], "an entry changed that was said to be as it was"
            sequence.version, sequence.copy = table.version, list(table)


def test_no_history_of_sharing_mixes_up_what_sequences_hold() -> None:
    """Catches a forgotten copy, a shared block that is freed, a stale match, a lost block and a stale follower."""
    seen: Counter[str] = Counter()
    for seed in range(NUM_HISTORIES):
        try:
            seen += History(seed).run()
        except AssertionError as error:
            error.add_note(f"in history {seed}")
            raise
    assert min(seen[kind] for kind in ("forked", "matched", "copied", "replaced", "refused", "dropped")) > 300, seen
