"""What a step is on its way: who takes part, what the device found, what was committed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from engine.step import PassKind, Row, Sampled
from outrider.v1 import generation_pb2
from verifier_service.sequence import TargetSequence


@dataclass(slots=True)  # not frozen: one for each sequence of a step
class Scheduled:
    """A sequence's part of a step: `num_new` tokens that are committed but not computed, then `num_drafts` drafts.

    A part that reaches the sequence's end samples there and commits tokens; an inner chunk of a prompt does not. A
    chained part's new token is the one that the sequence's step in flight samples.
    """

    sequence: TargetSequence
    row: Row
    num_new: int
    num_drafts: int
    is_sampled: bool
    chain_length: int = 0  # drafts that were at hand

    @property
    def num_tokens(self) -> int:
        """What the part takes of the step's budget."""
        return self.num_new + self.num_drafts


@dataclass(frozen=True)
class Step:
    """One pass of the model over some sequences that has come back; times in nanoseconds since the epoch."""

    batch: Sequence[Scheduled]
    kind: PassKind
    start_ns: int
    end_ns: int
    # What it took to choose the sequences, before the start.
    schedule_seconds: float = 0.0
    # Tokens of prompts in the pass that the device was busy with before this one.
    num_prefill_tokens_ahead: int = 0

    @cached_property
    def num_prefill_tokens(self) -> int:
        """Tokens of prompts, and of what is computed again, that the pass computed."""
        return sum([part.num_new for part in self.batch if part.num_new > 1])


@dataclass(slots=True)  # not frozen: one for each sequence of a step
class Committed:
    """What a step did to one sequence."""

    part: Scheduled
    sampled: Sampled
    position: int  # of the first new token
    token_ids: list[int]  # those that the sequence keeps
    finish_reason: generation_pb2.FinishReason  # UNSPECIFIED: the sequence goes on
    draft_wait: float  # seconds
    draft_bytes: int

    @property
    def num_accepted(self) -> int:
        """Accepted draft tokens, those behind the sequence's end left out."""
        return min(self.sampled.num_accepted, len(self.token_ids))
