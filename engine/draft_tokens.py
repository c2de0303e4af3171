"""Draft tokens with their q, and how those of many sequences are put together for a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    """Draft tokens of one sequence, which stand in `rows` from `first_row` on.

    The sequences of a frame share their rows: a step that takes them in the same order copies them all at once.
    """

    token_ids: list[int]
    rows: DraftRows
    first_row: int = 0

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def candidate_ids(self) -> npt.NDArray[np.int32]:
        """[num_tokens, m]."""
        return self.rows.candidate_ids[self.first_row : self.first_row + len(self.token_ids)]

    @property
    def candidate_weights(self) -> npt.NDArray[np.integer]:
        """[num_tokens, m]."""
        return self.rows.candidate_weights[self.first_row : self.first_row + len(self.token_ids)]

    @property
    def num_bytes(self) -> int:
        """What they took on the wire: ids of 4 bytes, weights of 2."""
        return len(self.token_ids) * (4 + 6 * self.rows.num_candidates)

    def part(self, start: int, end: int | None = None) -> DraftTokens:
        """The draft tokens from `start` up to `end`."""
        return DraftTokens(self.token_ids[start:end], self.rows, self.first_row + start)


NO_DRAFT_TOKENS = DraftTokens([], DraftRows.empty(0, 0))


def copy_rows(drafts: Sequence[DraftTokens], target: DraftRows) -> None:
    """Copy all draft tokens in order to the first rows of `target`, their candidates padded with weight 0."""
    start = 0
    for rows, first, last in _stretches(drafts):
        end, width = start + last - first, rows.num_candidates
        target.token_ids[start:end] = rows.token_ids[first:last]
        target.candidate_ids[start:end, :width] = rows.candidate_ids[first:last]
        target.candidate_weights[start:end, :width] = rows.candidate_weights[first:last]
        target.candidate_weights[start:end, width:] = 0
        start = end


def concatenate(drafts: Sequence[DraftTokens], *, min_candidates: int = 0) -> DraftRows:
    """All draft tokens in order, as wide as the widest, and at least `min_candidates`."""
    width = max((draft.rows.num_candidates for draft in drafts), default=0)
    width = max(width, min_candidates)
    together = DraftRows.empty(sum(len(draft) for draft in drafts), width)
    together.candidate_ids.fill(0)
    copy_rows(drafts, together)
    return together


def _stretches(drafts: Sequence[DraftTokens]) -> Iterator[tuple[DraftRows, int, int]]:
    """The draft tokens as ranges of rows, those taken together that are neighbours: usually all of them are."""
    rows, first, last = NO_DRAFT_TOKENS.rows, 0, 0
    for draft in drafts:
        if not draft.token_ids:
            continue
        if draft.rows is not rows or draft.first_row != last:
            if last > first:
                yield rows, first, last
            rows, first = draft.rows, draft.first_row
            last = first
        last += len(draft.token_ids)
    if last > first:
        yield rows, first, last
