"""Reads a drafter's frames, so that the engine's thread finds each sequence's part ready to be taken in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.draft_tokens import DraftRows
from outrider.protocol.expansions import ROOT, Expansions, unpack_expansions
from outrider.protocol.handshake import DraftLimits
from outrider.protocol.verdicts import Verdict, pack_verdicts
from outrider.protocol.wire import MAX_CHILDREN
from outrider.v1 import drafter_pb2
from verifier_service.draft_tree import ExpansionError, ExpansionRows, SequenceExpansions


@dataclass(frozen=True)
class RefusedExpansions:
    """One sequence's part of a frame, in which something is wrong."""

    sequence_id: int
    error: ExpansionError


def read_expansions(
    messages: Iterable[drafter_pb2.Expansions], vocabulary_size: int, limits: DraftLimits
) -> list[SequenceExpansions | RefusedExpansions]:
    """Each sequence's expansions in a frame, or what is wrong with them.

    Raises InvalidArgumentError, naming the field, when a frame's arrays do not fit each other.
    """
    found: list[SequenceExpansions | RefusedExpansions] = []
    for message in messages:
        expansions, errors = unpack_expansions(message, vocabulary_size=vocabulary_size, limits=limits)
        parts = split_expansions(expansions)
        if not errors:
            found += parts
            continue
        found += [
            RefusedExpansions(part.sequence_id, ExpansionError(errors[index].message)) if index in errors else part
            for index, part in enumerate(parts)
        ]
    return found


def split_expansions(expansions: Expansions) -> list[SequenceExpansions]:
    """Each sequence's part. What all have in common is made once, and no loop runs over the expansions."""
    num_rows = len(expansions.parents)
    if not num_rows:
        return []
    is_root = expansions.parents == ROOT
    # By row the last root up to there, among all sequences' rows.
    last_roots = np.maximum.accumulate(np.where(is_root, np.arange(num_rows), -1))
    ends = expansions.ends
    starts = ends - expansions.num_expansions
    last_roots = last_roots[np.maximum(ends - 1, 0)]
    rows = ExpansionRows(
        drafts=DraftRows(
            np.ascontiguousarray(expansions.child_ids[:, 0]), expansions.candidate_ids, expansions.candidate_weights
        ),
        first_children=expansions.child_ids[:, 0].tolist(),
        child_ids=expansions.child_ids.ravel().tolist(),
        num_children=expansions.child_ids.shape[1],
        names=(expansions.parents.astype(np.int64) * MAX_CHILDREN + expansions.ranks).tolist(),
        probabilities=expansions.probabilities,
    )
    return [
        SequenceExpansions(sequence_id, num_committed, first_id, rows, start, end, root)
        for sequence_id, num_committed, first_id, start, end, root in zip(
            expansions.sequence_ids.tolist(),
            expansions.num_committed.tolist(),
            expansions.first_ids.tolist(),
            starts.tolist(),
            ends.tolist(),
            np.where(last_roots >= starts, last_roots, -1).tolist(),
            strict=True,
        )
    ]


@dataclass
class LinkFrame:
    """What a drafter is to be told."""

    closes: list[int] = field(default_factory=list)  # the sequences' ids
    opens: list[drafter_pb2.OpenSequence] = field(default_factory=list)
    _verdicts: dict[int, Verdict] = field(default_factory=dict)

    def commit(self, sequence_id: int, num_committed: int, token_ids: Sequence[int]) -> None:
        """These are the last of so many tokens that are committed."""
        if (verdict := self._verdicts.get(sequence_id)) is not None:
            token_ids = [*verdict.token_ids, *token_ids]
        self._verdicts[sequence_id] = Verdict(sequence_id, num_committed, token_ids)

    def to_message(self) -> drafter_pb2.DraftRequest:
        """As it travels."""
        return drafter_pb2.DraftRequest(
            closes=[drafter_pb2.CloseSequence(sequence_id=sequence_id) for sequence_id in self.closes],
            opens=self.opens,
            verdicts=pack_verdicts([*self._verdicts.values()]) if self._verdicts else None,
        )
