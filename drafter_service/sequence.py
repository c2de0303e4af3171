"""A sequence as the drafter sees it: what the target has committed, and how it is to be drafted for."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count

from engine.block_manager import BlockTable
from outrider.protocol.handshake import DraftLimits
from outrider.protocol.sampling_parameters import SamplingParameters
from outrider.service.logs import Subject
from outrider.service.step_spans import StepSpans
from outrider.v1 import common_pb2

_serials = count()


@dataclass(eq=False, slots=True)
class DraftSequence:
    """One sequence of one verifier.

    `token_ids` are committed. The engine appends what verdicts bring and then tells the drafter; nobody else writes
    them.
    """

    sequence_id: int
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParameters
    # Resolved: GREEDY, REJECTION or COUPLED.
    verification: common_pb2.Verification
    # Most draft tokens that a step verifies (K).
    max_draft_tokens: int
    # What holds on the stream.
    limits: DraftLimits
    # Which stream: no two of the process have the same.
    session_id: int = 0
    traceparent: str = ""
    # None unless the request's trace is sampled.
    spans: StepSpans | None = None
    # Of the model drafter: how many committed tokens have their keys and values in its cache, and where.
    num_computed: int = 0
    block_ids: BlockTable = field(default_factory=BlockTable)
    # No other sequence of the process has it, whatever verifier it comes from.
    serial: int = field(default_factory=_serials.__next__)

    @property
    def subject(self) -> Subject:
        """What logs call it."""
        return Subject(sequence_id=self.sequence_id, traceparent=self.traceparent)

    @property
    def length(self) -> int:
        """Committed tokens: the position of the next one."""
        return len(self.token_ids)

    @property
    def num_missing(self) -> int:
        """Committed tokens whose keys and values are not computed."""
        return self.length - self.num_computed

    @property
    def wants_candidates(self) -> bool:
        """Whether q must travel with its first children: the others are only compared with the target's own token."""
        return self.verification == common_pb2.VERIFICATION_REJECTION and self.limits.max_candidates > 0
