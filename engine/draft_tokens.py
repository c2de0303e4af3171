"""Draft tokens with their q, and how those of many sequences are put together for a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt


@dataclass(slots=True, eq=False)
class DraftRows:
    """Draft tokens one below the other: those of a drafter's frame, or of a step."""

    token_ids: npt.NDArray[np.int32]  # [num_rows]
    candidate_ids: npt.NDArray[np.int32]  # [num_rows, m]
    candidate_weights: npt.NDArray[np.integer]  # [num_rows, m] uint16 or int32; a row of zeros is one-hot
    num_candidates: int = field(init=False)  # m

    def __post_init__(self) -> None:
        self.num_candidates = self.candidate_ids.shape[1]

    @staticmethod
    def empty(num_rows: int, num_candidates: int) -> DraftRows:
        """Room for so many."""
        shape = (num_rows, num_candidates)
        return DraftRows(np.empty(num_rows, np.int32), np.empty(shape, np.int32), np.empty(shape, np.int32))


# Not frozen: that triples the time of making one, and a step makes several for each sequence.
@dataclass(slots=True, eq=False)
class DraftTokens:
    """Draft tokens of one sequence: a chain, whose links may have come with different frames.

    Token i stands in `rows[i]`, at `indexes[i]`.
    """

    token_ids: list[int]
    rows: list[DraftRows]
    indexes: list[int]

    @staticmethod
    def of(token_ids: list[int], rows: DraftRows, first_row: int = 0) -> DraftTokens:
        """Draft tokens that stand below each other, from `first_row` on."""
        num_tokens = len(token_ids)
        return DraftTokens(token_ids, [rows] * num_tokens, list(range(first_row, first_row + num_tokens)))

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_candidates(self) -> int:
        """Of the token that has most."""
        return max([rows.num_candidates for rows in self.rows], default=0)

    @property
    def candidate_ids(self) -> npt.NDArray[np.int32]:
        """[num_tokens, num_candidates], padded with candidates of weight 0."""
        return concatenate([self]).candidate_ids

    @property
    def candidate_weights(self) -> npt.NDArray[np.integer]:
        """[num_tokens, num_candidates]."""
        return concatenate([self]).candidate_weights

    def part(self, start: int, end: int | None = None) -> DraftTokens:
        """The draft tokens from `start` up to `end`."""
        return DraftTokens(self.token_ids[start:end], self.rows[start:end], self.indexes[start:end])


NO_DRAFT_TOKENS = DraftTokens([], [], [])


def copy_rows(drafts: Sequence[DraftTokens], target: DraftRows) -> None:
    """Copy all draft tokens in order to the first rows of `target`, their candidates padded with weight 0."""
    sources: list[DraftRows] = []
    indexes: list[int] = []
    for draft in drafts:
        sources += draft.rows
        indexes += draft.indexes
    if not sources:
        return
    # A few frames at most: each is copied at once.
    first = sources[0]
    if sources.count(first) == len(sources):
        _copy(first, indexes, target, slice(len(indexes)))
        return
    by_source: dict[int, tuple[DraftRows, list[int], list[int]]] = {}
    for place, (rows, index) in enumerate(zip(sources, indexes, strict=True)):
        _, taken, places = by_source.setdefault(id(rows), (rows, [], []))
        taken.append(index)
        places.append(place)
    for rows, taken, places in by_source.values():
        _copy(rows, taken, target, places)


def concatenate(drafts: Sequence[DraftTokens], *, min_candidates: int = 0) -> DraftRows:
    """All draft tokens in order, as wide as the widest, and at least `min_candidates`."""
    width = max((draft.num_candidates for draft in drafts), default=0)
    together = DraftRows.empty(sum(len(draft) for draft in drafts), max(width, min_candidates))
    together.candidate_ids.fill(0)
    copy_rows(drafts, together)
    return together


def _copy(rows: DraftRows, indexes: list[int], target: DraftRows, places: slice | list[int]) -> None:
    width = rows.num_candidates
    first, num_rows = indexes[0], len(indexes)
    # One stretch, as where each sequence's chain is all that a frame has for it, need not be gathered.
    taken = slice(first, first + num_rows) if indexes == [*range(first, first + num_rows)] else np.array(indexes)
    target.token_ids[places] = rows.token_ids[taken]
    if width:
        target.candidate_ids[places, :width] = rows.candidate_ids[taken]
        target.candidate_weights[places, :width] = rows.candidate_weights[taken]
    target.candidate_weights[places, width:] = 0
