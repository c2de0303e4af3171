"""Draft tokens of several frames, put together for a step."""

from __future__ import annotations

import numpy as np
import pytest

from engine.draft_tokens import NO_DRAFT_TOKENS, DraftRows, DraftTokens, concatenate, copy_rows

# Of each draft token t, q has t and 50 + t; those from 10 on are certain.
FRAMES = [
    DraftRows(
        np.arange(4, 10, dtype=np.int32),
        np.array([[token_id, 50 + token_id] for token_id in range(4, 10)], np.int32),
        np.array([[65536 - token_id, token_id] for token_id in range(4, 10)], np.uint16),
    ),
    DraftRows(np.array([10, 11], np.int32), np.array([[10], [11]], np.int32), np.zeros((2, 1), np.uint16)),
    DraftRows(np.array([12], np.int32), np.empty((1, 0), np.int32), np.empty((1, 0), np.uint16)),
]


def chain(*places: tuple[int, int]) -> DraftTokens:
    """Draft tokens by frame and row."""
    rows = [FRAMES[frame] for frame, _ in places]
    indexes = [index for _, index in places]
    return DraftTokens([int(one.token_ids[index]) for one, index in zip(rows, indexes, strict=True)], rows, indexes)


@pytest.mark.parametrize(
    "drafts",
    [
        [chain((0, 0), (0, 1)), chain((0, 2)), chain((0, 3), (0, 4), (0, 5))],  # as they came
        [chain((0, 3), (0, 4), (0, 5)), chain((0, 0), (0, 1))],
        [chain((0, 5), (0, 1)), chain((0, 3))],
        [chain((0, 2), (1, 0), (0, 5)), chain((1, 1))],  # of two frames, one wider than the other
        [chain((2, 0))],
        [chain((2, 0), (0, 4)), chain((1, 1), (2, 0))],
        [],
    ],
)
def test_draft_tokens_are_put_together_in_any_order(drafts: list[DraftTokens]) -> None:
    """Catches candidates that move to a neighbour when the rows of a frame are copied at once."""
    drafts = [one for draft in drafts for one in (NO_DRAFT_TOKENS, draft)]
    expected = [token_id for draft in drafts for token_id in draft.token_ids]
    together = concatenate(drafts)
    assert together.token_ids.tolist() == expected
    assert together.num_candidates == max((draft.num_candidates for draft in drafts), default=0)
    for token_id, ids, weights in zip(
        expected, together.candidate_ids.tolist(), together.candidate_weights.tolist(), strict=True
    ):
        q = dict(zip(ids, weights, strict=True)) if any(weights) else {}
        assert q == ({token_id: 65536 - token_id, 50 + token_id: token_id} if token_id < 10 else {})
    # Into rows that are wider, more, and hold what another step left.
    target = DraftRows.empty(20, 5)
    target.candidate_weights.fill(7)
    copy_rows(drafts, target)
    assert target.token_ids[: len(expected)].tolist() == expected
    width = together.num_candidates
    np.testing.assert_array_equal(target.candidate_weights[: len(expected), :width], together.candidate_weights)
    assert not target.candidate_weights[: len(expected), width:].any()


def test_parts() -> None:
    draft = chain((0, 2), (1, 0), (0, 5))
    assert draft.part(1).token_ids == [10, 9]
    assert draft.part(1).candidate_ids.tolist() == [[10, 0], [9, 59]]
    assert draft.part(1).candidate_weights.tolist() == [[0, 0], [65527, 9]]
    assert DraftTokens.of([6, 7], FRAMES[0], 2).candidate_ids.tolist() == [[6, 56], [7, 57]]
