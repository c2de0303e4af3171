"""One sequence's draft tree as the verifier holds it: expansions come in, committed tokens walk down. No I/O, no clock.

An *expansion* is a token whose continuation the drafter has computed. It brings *children*: tokens that may follow, the
first of which is what a step tests. An expansion is the root of a tree, or continues a child of another expansion:

    root ─┬─ first child, expanded ─┬─ first child, expanded ─── first child      the chain: three draft tokens
          │                         └─ other outcome
          └─ other outcome, expanded ─── first child                              the next chain, if that is chosen

The tree *stands* on the expansion of the last committed token. A committed token that is a child with an expansion
moves it there; one that is a child without waits for the expansion; one that is no child is a *miss*: the tree stands
nowhere until a new root comes. The drafter walks by the same rules, so that neither tells the other where it stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from engine.draft_tokens import DraftRows, DraftTokens
from kernels.limits import MAX_DRAFT_TOKENS
from outrider.protocol.wire import MAX_CHILDREN

# Names of children are kept for so many times the expansions that are; then those of dead ones are cleared out.
_NAMES_PER_EXPANSION = 2


class Outcome(Enum):
    """What the tree had for a token that the target chose."""

    FIRST_CHILD = "first_child"
    OTHER_CHILD = "other_child"
    MISS = "miss"  # the place was expanded, and the token is none of its children
    UNSEEN = "unseen"  # nothing was known of the place


class ExpansionError(ValueError):
    """Expansions that break the protocol; the sequence goes on without its drafter."""


@dataclass(slots=True, eq=False)
class ExpansionRows:
    """The expansions of a drafter's frame, those of each sequence below each other, in the order of their ids."""

    drafts: DraftRows  # the first child of each, and the q that it was drawn from
    first_children: list[int]  # [N]
    child_ids: list[int]  # [N * num_children]
    num_children: int
    # [N]: the name of the child that each continues: its parent's id * MAX_CHILDREN + the rank; below 0: a root.
    names: list[int]
    probabilities: npt.NDArray[np.uint16]  # [N, num_children], in units of 1/65,536

    @property
    def bytes_per_row(self) -> int:
        """What an expansion takes on the wire."""
        return 5 + 6 * self.num_children + 6 * self.drafts.num_candidates


@dataclass(slots=True)
class SequenceExpansions:
    """One sequence's part of a frame."""

    sequence_id: int
    num_committed: int  # tokens that the drafter had of the sequence: where a root stands
    first_id: int  # of its first expansion; the others count up from it
    rows: ExpansionRows
    start: int  # its rows: from here
    end: int  # up to here
    last_root: int  # row of its last root, -1 where it has none

    @property
    def num_bytes(self) -> int:
        """What they took on the wire."""
        return (self.end - self.start) * self.rows.bytes_per_row


class DraftTree:
    """Keeps the last `max_expansions` expansions, each in the place that its id gives it, and the chain from here.

    `committed` is always all of the sequence's tokens, prompt included. Ids grow from parent to child, so that what the
    tree stands on is the oldest of all that it can still reach.
    """

    __slots__ = (
        "_chain",
        "_depth",
        "_drafts",
        "_expanded",
        "_indexes",
        "_max_expansions",
        "_next_id",
        "_rows",
        "_sources",
        "_stand",
        "num_expansions",
        "num_walked",
    )

    def __init__(self, max_expansions: int) -> None:
        self._max_expansions = max_expansions
        # By id modulo `max_expansions`: the frame's rows, and the row there.
        self._sources: list[ExpansionRows | None] = [None] * max_expansions
        self._indexes = [0] * max_expansions
        self._expanded: dict[int, int] = {}  # ids by the names of the children that they continue
        self._next_id = 0
        # The expansion on which the tree stands, -1: none; and how many tokens are committed there.
        self._stand = -1
        self._depth = 0
        # Ids from where the tree stands along first children, and what they bring.
        self._chain: list[int] = []
        self._drafts = DraftTokens([], [], [])
        # They only ever grow: expansions that came, and those of them on which the tree has stood.
        self.num_expansions = 0
        self.num_walked = 0

    def chain_length(self, num_committed: int) -> int:
        """Draft tokens at hand for the positions behind so many committed tokens."""
        return len(self._chain) if self._depth == num_committed else 0

    @property
    def is_lost(self) -> bool:
        """Whether the tree stands nowhere, and nothing but a root will help."""
        return self._stand < 0

    def chain(self, num_tokens: int) -> DraftTokens:
        """The first draft tokens from here, `num_tokens` at most, where `chain_length` says that there are any."""
        return self._drafts.part(0, num_tokens)

    def take(self, expansions: SequenceExpansions, committed: Sequence[int]) -> None:
        """Take in what the drafter has expanded. Raises ExpansionError when it breaks the protocol."""
        num_rows, first_id = expansions.end - expansions.start, expansions.first_id
        if expansions.num_committed > len(committed):
            raise ExpansionError(f"num_committed: is {expansions.num_committed}, {len(committed)} tokens are committed")
        if first_id < self._next_id:
            raise ExpansionError(f"first_ids: {first_id} was used already, {self._next_id} comes next")
        if num_rows > self._max_expansions:
            raise ExpansionError(f"num_expansions: {num_rows}, at most {self._max_expansions} are kept")
        if not num_rows:
            return
        self._store(expansions, num_rows)
        if expansions.last_root >= 0:
            # It stands there itself by now.
            self._move(first_id + expansions.last_root - expansions.start, expansions.num_committed)
        elif self._stand >= 0 and self._next_id - self._stand > self._max_expansions:
            self._leave()  # its place was taken
        self._walk(committed)
        self._extend()

    def commit(self, committed: Sequence[int]) -> Outcome:
        """The last ones of these are new; what the tree had for the very last."""
        last = len(committed) - 1
        if len(self._chain) > 1 and self._depth <= last:
            self._accept(committed)
        outcome = self._walk(committed) if self._depth <= last else Outcome.FIRST_CHILD
        self._extend()
        return outcome

    def _accept(self, committed: Sequence[int]) -> None:
        """Go on along the chain, as far as it is expanded and committed: what most tokens of a step do."""
        token_ids, depth = self._drafts.token_ids, self._depth
        most = min(len(self._chain) - 1, len(committed) - depth)
        number = 0
        while number < most and token_ids[number] == committed[depth + number]:
            number += 1
        if number:
            stand = self._stand
            self._stand, self._depth = self._chain[number], depth + number
            self.num_walked += number
            self._cut_chain(number)
            self._let_go(stand)

    def _walk(self, committed: Sequence[int]) -> Outcome:
        """Go on as far as committed tokens and expansions reach; what there was for the last token."""
        last = len(committed) - 1
        while self._stand >= 0 and self._depth <= last:
            place = self._stand % self._max_expansions
            rows, index = self._sources[place], self._indexes[place]
            assert rows is not None
            width = rows.num_children
            children = rows.child_ids[index * width : (index + 1) * width]
            token_id, is_last = committed[self._depth], self._depth == last
            if token_id not in children:
                self._leave()
                return Outcome.MISS if is_last else Outcome.UNSEEN
            rank = children.index(token_id)
            expansion = self._expanded.get(self._stand * MAX_CHILDREN + rank)
            if expansion is not None:
                self._move(expansion, self._depth + 1)
            if is_last:
                return Outcome.OTHER_CHILD if rank else Outcome.FIRST_CHILD
            if expansion is None:
                break
        return Outcome.UNSEEN

    def _move(self, expansion: int, depth: int) -> None:
        stand = self._stand
        self._stand, self._depth = expansion, depth
        self.num_walked += 1
        if self._chain[1:2] == [expansion]:
            self._cut_chain(1)
        else:
            self._clear_chain()
        if stand >= 0:
            self._let_go(stand)

    def _cut_chain(self, number: int) -> None:
        drafts = self._drafts
        del self._chain[:number], drafts.token_ids[:number], drafts.rows[:number], drafts.indexes[:number]

    def _let_go(self, stand: int) -> None:
        """Hold no frames of what nothing can reach any more: from where the tree stood before to where it stands."""
        oldest = max(stand, self._next_id - self._max_expansions)
        number = self._stand - oldest
        place = oldest % self._max_expansions
        num_before_end = min(number, self._max_expansions - place)
        if number > 0:
            self._sources[place : place + num_before_end] = [None] * num_before_end
            self._sources[: number - num_before_end] = [None] * (number - num_before_end)

    def _leave(self) -> None:
        self._stand = -1
        self._clear_chain()
        self._expanded.clear()
        self._sources = [None] * self._max_expansions

    def _clear_chain(self) -> None:
        self._chain, self._drafts = [], DraftTokens([], [], [])

    def _extend(self) -> None:
        """Let the chain reach as far as first children are expanded."""
        if self._stand < 0:
            return
        chain, drafts = self._chain, self._drafts
        next_id: int | None = self._expanded.get(chain[-1] * MAX_CHILDREN) if chain else self._stand
        while next_id is not None and len(chain) < MAX_DRAFT_TOKENS:
            place = next_id % self._max_expansions
            rows, index = self._sources[place], self._indexes[place]
            assert rows is not None
            chain.append(next_id)
            drafts.token_ids.append(rows.first_children[index])
            drafts.rows.append(rows.drafts)
            drafts.indexes.append(index)
            next_id = self._expanded.get(next_id * MAX_CHILDREN)

    def _store(self, expansions: SequenceExpansions, num_rows: int) -> None:
        rows, first_id, start = expansions.rows, expansions.first_id, expansions.start
        self._next_id = first_id + num_rows
        self.num_expansions += num_rows
        if len(self._expanded) > _NAMES_PER_EXPANSION * self._max_expansions:
            oldest = self._next_id - self._max_expansions
            self._expanded = {name: id_ for name, id_ in self._expanded.items() if id_ >= oldest}
        place = first_id % self._max_expansions
        num_before_end = min(num_rows, self._max_expansions - place)
        for at, first, number in (
            (place, start, num_before_end),
            (0, start + num_before_end, num_rows - num_before_end),
        ):
            self._sources[at : at + number] = [rows] * number
            self._indexes[at : at + number] = range(first, first + number)
        self._expanded.update(zip(rows.names[start : expansions.end], range(first_id, self._next_id), strict=True))
