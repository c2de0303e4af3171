"""Sequences of the verifier as the units below the engine see them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from engine.step import Pass, Row, Sampled
from outrider.protocol.sampling_parameters import SamplingParameters
from outrider.protocol.verification import Verification
from tests.services.trees import chain, expansions
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
    length: int = 4,
    *,
    length_limit: int = 64,
    drafter: LinkKey | None = LINK,
    takes_turns: bool = True,
    **fields: Any,
) -> TargetSequence:
    """A greedy sequence that has just arrived, with a drafter that takes turns unless told otherwise."""
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
        "speculation": Speculation(drafter, takes_turns=takes_turns),
        "traceparent": "",
        "request_id": f"request {number}",
        "arrived_ns": 0,
        "history": None,
    }
    return TargetSequence(**(defaults | fields))


def propose(sequence: TargetSequence, tokens: Sequence[int]) -> None:
    """Let the answer to the last verdict come: a root and a chain of these tokens."""
    first_id = sequence.speculation.tree.num_expansions
    answer = expansions(*chain(tokens, first_id), num_committed=sequence.length, first_id=first_id)
    sequence.speculation.take(answer, sequence.token_ids, 0.0)


def commit(sequence: TargetSequence, tokens: list[int], num_accepted: int) -> None:
    """What the engine does to a sequence after a step that reached its end."""
    sequence.num_computed += num_accepted
    sequence.token_ids.extend(tokens)
    sequence.num_committed_here += len(tokens)
    has_room = sequence.length + 1 < sequence.length_limit
    sequence.speculation.commit(sequence.token_ids, 0.0, has_room=has_room)
