"""Refuses distributions q that would make verification wrong."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from outrider.protocol.wire import WEIGHT_TOTAL

# A field, which rows of it are bad, and what is wrong with them.
BadRows = tuple[str, npt.NDArray[np.bool_], str]


def find_bad_candidates(
    token_ids: npt.NDArray[np.int32],  # [num_rows]
    candidate_ids: npt.NDArray[np.int32],  # [num_rows, m]; ids from 2**31 on are below zero
    candidate_weights: npt.NDArray[np.uint16],  # [num_rows, m], in units of 1/65,536
    vocabulary_size: int,
) -> Iterator[BadRows]:
    """What is wrong with the distributions that the tokens are said to be sampled from, if anything.

    A row must sum to 65,536 or be all zero; where a candidate has weight, it must be in the vocabulary and stand in its
    row once; the token must have weight. Where the usual case has a test of its own that takes less time, the exact one
    follows only if that fails.
    """
    if not candidate_ids.size:
        return
    totals = np.add.reduce(candidate_weights, axis=1, dtype=np.int32)  # as many as 1,024 weights of 16 bits fit
    is_sampled = totals == WEIGHT_TOTAL
    num_sampled = np.count_nonzero(is_sampled)
    if num_sampled < len(totals) and num_sampled < np.count_nonzero(totals):
        is_bad = ~np.isin(totals, (0, WEIGHT_TOTAL))
        yield "candidate_weights", is_bad, f"a row must sum to {WEIGHT_TOTAL} or be all zero"
    has_weight = candidate_weights > 0
    in_order = np.sort(candidate_ids.view(np.uint32), axis=1)
    if in_order[:, -1].max() >= vocabulary_size:
        is_unknown = (candidate_ids.view(np.uint32) >= vocabulary_size) & has_weight
        yield "candidate_ids", np.any(is_unknown, axis=1), f"an id is not below the vocabulary size {vocabulary_size}"
    # Row behind row, with the neighbours of two rows compared as well.
    in_order = in_order.ravel()
    if may_repeat := bool(np.count_nonzero(in_order[1:] == in_order[:-1])):
        yield "candidate_ids", _has_repeated(candidate_ids, has_weight), "a candidate stands twice in a row"
    is_drawn = (candidate_ids == token_ids[:, None]) & has_weight
    # Where none stands twice, a row that was sampled has its token once or not at all.
    if may_repeat or np.count_nonzero(is_drawn) < num_sampled:
        yield (
            "candidate_weights",
            np.logical_and(is_sampled, ~np.any(is_drawn, axis=1)),
            "a draft token has no weight in its own distribution",
        )


def _has_repeated(
    candidate_ids: npt.NDArray[np.int32],  # [num_rows, m]
    has_weight: npt.NDArray[np.bool_],  # [num_rows, m]
) -> npt.NDArray[np.bool_]:  # [num_rows]
    """Whether a row has a candidate twice among those with weight."""
    # Padding gets ids of its own, below every id and all different, so that only real candidates can collide.
    padding = np.arange(-1, -1 - candidate_ids.shape[1], -1, dtype=np.int64)
    in_order = np.sort(np.where(has_weight, candidate_ids.view(np.uint32), padding), axis=1)
    found: npt.NDArray[np.bool_] = (in_order[:, 1:] == in_order[:, :-1]).any(axis=1)
    return found
