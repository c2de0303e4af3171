"""A sequence as the drafter sees it: what the target has committed and what was proposed behind that."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count

from drafter_service.proposing import Proposing
from engine.block_manager import BlockTable
from outrider.protocol.sampling_parameters import SamplingParameters
from outrider.protocol.wire import MAX_CANDIDATES
from outrider.service.logs import Subject
from outrider.service.step_spans import StepSpans

_serials = count()


@dataclass(eq=False)
class DraftSequence:
    """One sequence of one verifier.

    `token_ids` are committed; what `proposing` has out stands right behind them. `num_computed` tokens of both together
    have their keys and values in the drafter's cache, in `block_ids`.
    """

    sequence_id: int
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParameters
    max_draft_tokens: int
    # Whether q must travel with the tokens: not where the verifier only compares with a token of the target's own.
    wants_candidates: bool
    # Most candidates of a draft token that the verifier takes.
    max_candidates: int = MAX_CANDIDATES
    # Whether each draft token shall be what the target would draw if q were its distribution.
    is_coupled: bool = False
    traceparent: str = ""
    # None unless the request's trace is sampled.
    spans: StepSpans | None = None
    proposing: Proposing = field(default_factory=Proposing)
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

    def commit(self, token_ids: list[int], num_committed: int, epoch: int) -> None:
        """Take in a verdict, and forget what was computed for draft tokens that it did not accept.

        Raises InvalidArgumentError when the verdict does not continue what is committed, or is of an epoch that has not
        begun.
        """
        difference = self.proposing.take(token_ids, num_committed, epoch, length=len(self.token_ids))
        if difference is not None:
            # Keys and values from here on were computed for tokens that are no part of the sequence.
            self.num_computed = min(self.num_computed, len(self.token_ids) + difference)
        self.token_ids += token_ids
