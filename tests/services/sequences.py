"""Sequences of the verifier as the units below the engine see them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.draft_tokens import DraftRows, DraftTokens
from engine.step import Pass, Row, Sampled
from outrider.protocol.sampling_parameters import SamplingParameters
from outrider.protocol.verification import Verification
from verifier_service.sequence import TargetSequence
from verifier_service.speculation import LinkKey, Speculation

LINK = LinkKey("drafter:1", 1)
VOCABULARY = 64

_ids = itertools.count(1)


class NoModel:
    """An executor for those who only plan steps; `can_chain` is whether rows may follow a step in flight."""

    max_in_flight = 2

    def __init__(self, *, can_chain: bool = False) -> None:
        self.can_chain = can_chain

    def can_overlap(self, row: Row) -> bool:
        return self.can_chain and row.history is None

    def submit(self, rows: Sequence[Row]) -> Sequence[Pass[Sampled]]:
        raise AssertionError("nothing is submitted here")


def target_sequence(
    length: int = 4, *, length_limit: int = 64, drafter: LinkKey | None = LINK, **fields: Any
) -> TargetSequence:
    """A greedy sequence that has just arrived, with a drafter unless told otherwise."""
    number = next(_ids)
    defaults: dict[str, Any] = {
        "session_id": 1,
        "sequence_id": number,
        "link_sequence_id": number,
        "token_ids": [number % VOCABULARY] * length,
        "num_prompt_tokens": length,
        "sampling": SamplingParameters(temperature=0.0),
        "length_limit": length_limit,
        "eos_token_ids": frozenset[int](),
        "stop_token_ids": frozenset[int](),
        "num_logprobs": None,
        "max_draft_tokens": 4,
        "verification": Verification.GREEDY,
        "speculation": Speculation(drafter),
        "traceparent": "",
        "request_id": f"request {number}",
        "arrived_ns": 0,
        "history": None,
    }
    return TargetSequence(**(defaults | fields))


def propose(sequence: TargetSequence, tokens: Sequence[int]) -> None:
    """Let a one-hot proposal arrive behind what the sequence has."""
    none = np.empty((len(tokens), 0), np.int32)
    arrive(sequence, DraftTokens(list(tokens), DraftRows(np.array(tokens, np.int32), none, none)))


def arrive(sequence: TargetSequence, drafts: DraftTokens, now: float = 0.0) -> None:
    """Let a proposal arrive behind what the sequence has."""
    speculation = sequence.speculation
    position = sequence.length + len(speculation.drafts)
    speculation.arrive(speculation.epoch, position, drafts, sequence.token_ids, now)


def commit(sequence: TargetSequence, tokens: list[int], num_accepted: int) -> None:
    """What the engine does to a sequence after a step that reached its end."""
    sequence.num_computed += num_accepted
    sequence.token_ids.extend(tokens)
    sequence.num_committed_here += len(tokens)
    sequence.speculation.commit(tokens, 0.0, has_room=sequence.length + 1 < sequence.length_limit)
