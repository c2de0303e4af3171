"""What a pass made, as frames: each verifier gets what is its sequences'."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from drafter_service.drafter import Expanded
from outrider.protocol.expansions import Expansions, pack_expansions
from outrider.protocol.handshake import DraftLimits
from outrider.v1 import drafter_pb2


def split_by_session(expanded: Expanded) -> Iterator[tuple[int, drafter_pb2.Expansions]]:
    """Each session with expansions in the pass, and those that are its sequences', as wide as its stream takes."""
    sessions = np.array([sequence.session_id for sequence in expanded.sequences], np.int64)
    found, firsts = np.unique(sessions, return_index=True)
    if len(found) == 1:
        yield int(found[0]), _pack(expanded, slice(None), slice(None), expanded.sequences[0].limits)
        return
    session_of_expansion = np.repeat(sessions, expanded.num_expansions)
    for session_id, first in zip(found.tolist(), firsts.tolist(), strict=True):
        limits = expanded.sequences[first].limits
        yield session_id, _pack(expanded, sessions == session_id, session_of_expansion == session_id, limits)


# Which entries: all of them, or a mask.
_Which = slice | npt.NDArray[np.bool_]


def _pack(
    expanded: Expanded, of_sequences: _Which, of_expansions: _Which, limits: DraftLimits
) -> drafter_pb2.Expansions:
    sequence_ids = np.array([sequence.sequence_id for sequence in expanded.sequences], np.uint64)
    num_expansions = expanded.num_expansions[of_sequences]
    if expanded.candidate_ids is None or expanded.candidate_weights is None:
        nothing = np.empty((int(num_expansions.sum()), 0))
        candidate_ids, candidate_weights = nothing.astype(np.int32), nothing.astype(np.uint16)
    else:
        candidate_ids = expanded.candidate_ids[of_expansions, : limits.max_candidates]
        candidate_weights = expanded.candidate_weights[of_expansions, : limits.max_candidates]
    return pack_expansions(
        Expansions(
            sequence_ids[of_sequences],
            expanded.num_committed[of_sequences],
            num_expansions,
            expanded.first_ids[of_sequences],
            expanded.parents[of_expansions],
            expanded.ranks[of_expansions],
            expanded.child_ids[of_expansions, : limits.num_children],
            expanded.probabilities[of_expansions, : limits.num_children],
            candidate_ids,
            candidate_weights,
        )
    )
