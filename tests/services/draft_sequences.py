"""Sequences as a drafter has them, and its answers to verdicts taken apart: one chain each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from drafter_service.drafter import Drafter, Drafts
from drafter_service.sequence import DraftSequence
from outrider.protocol.expansions import ROOT
from outrider.protocol.handshake import DraftLimits
from outrider.protocol.sampling_parameters import SamplingParameters
from outrider.v1 import common_pb2

LIMITS = DraftLimits(max_draft_tokens=32, max_candidates=64, num_children=4, takes_turns=True)
AHEAD = DraftLimits(max_draft_tokens=32, max_candidates=64, num_children=4)


def draft_sequence(token_ids: Sequence[int], **fields: Any) -> DraftSequence:
    """All of it prompt, verified by rejection and drafted for in turns, unless told otherwise."""
    defaults: dict[str, Any] = {
        "sequence_id": 1,
        "token_ids": list(token_ids),
        "num_prompt_tokens": len(token_ids),
        "sampling": SamplingParameters(),
        "verification": common_pb2.VERIFICATION_REJECTION,
        "max_draft_tokens": 4,
        "limits": LIMITS,
    }
    return DraftSequence(**(defaults | fields))


@dataclass(eq=False)
class Chain:
    """Draft tokens behind what is committed, both candidates' arrays [num_tokens, m] or None."""

    sequence: DraftSequence
    token_ids: list[int]
    candidate_ids: npt.NDArray[np.int32] | None
    candidate_weights: npt.NDArray[np.uint16] | None
    num_committed: int
    first_id: int


def chains_of(drafts: Drafts) -> Iterator[Chain]:
    """The chains that a pass of a drafter in turns has made: a root each, and first children behind it."""
    for expanded in drafts.expanded:
        start = 0
        for index, sequence in enumerate(expanded.sequences):
            first_id, count = int(expanded.first_ids[index]), int(expanded.num_expansions[index])
            rows = slice(start, start + count)
            start += count
            assert expanded.parents[rows].tolist() == [ROOT, *range(first_id, first_id + count - 1)]
            assert not expanded.ranks[rows].any()
            yield Chain(
                sequence,
                expanded.child_ids[rows, 0].tolist(),
                None if expanded.candidate_ids is None else expanded.candidate_ids[rows],
                None if expanded.candidate_weights is None else expanded.candidate_weights[rows],
                int(expanded.num_committed[index]),
                first_id,
            )


def commit(drafter: Drafter, sequence: DraftSequence, token_ids: Iterable[int]) -> None:
    """A verdict has come, as the engine tells the drafter."""
    new = list(token_ids)
    sequence.token_ids += new
    drafter.commit(sequence, new)


def begin(drafter: Drafter, sequence: DraftSequence) -> None:
    """Open the sequence at the drafter, with all but its last token, which the first verdict brings."""
    last = sequence.token_ids.pop()
    drafter.open(sequence)
    commit(drafter, sequence, [last])


def all_chains(drafter: Drafter, sequences: Sequence[DraftSequence]) -> list[Chain]:
    """The answer to the last verdict on each of the sequences, in as many passes as it takes."""
    found: dict[DraftSequence, Chain] = {}
    while any(sequence not in found for sequence in sequences):
        assert drafter.has_work
        drafts = drafter.draft()
        assert not drafts.refusals
        found.update((chain.sequence, chain) for chain in chains_of(drafts))
    return [found[sequence] for sequence in sequences]
