"""A sequence as the drafter sees it: what the target has committed and what was proposed behind that."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count

from engine.block_manager import BlockTable
from outrider.protocol.errors import InvalidArgumentError
from outrider.protocol.sampling_parameters import SamplingParameters
from outrider.service.logs import Subject
from outrider.service.step_spans import StepSpans
from outrider.v1 import drafter_pb2

_serials = count()


@dataclass(eq=False)
class DraftSequence:
    """One sequence of one verifier.

    `token_ids` are committed; `proposed` are draft tokens that no verdict has reached yet and stand right behind them.
    `num_computed` tokens of both together have their keys and values in the drafter's cache, in `block_ids`.
    """

    sequence_id: int
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParameters
    max_draft_tokens: int
    # Whether q must travel with the tokens: not where the verifier only compares with the target's most likely token.
    wants_candidates: bool
    traceparent: str = ""
    # None unless the request's trace is sampled.
    spans: StepSpans | None = None
    epoch: int = 0
    proposed: list[int] = field(default_factory=list)
    # Lockstep: true from the opening or a verdict that used up the proposals until the next proposal is made.
    wants_draft: bool = True
    # Verdicts that came before the answer to the opening, held back until it is given: what is drafted must not depend
    # on whether the target's first token was faster. None once the answer is given.
    early_verdicts: list[drafter_pb2.Verdict] | None = field(default_factory=list)
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
        """Take in a verdict: compare it with the proposals, and end the epoch where they differ.

        Raises InvalidArgumentError when the verdict does not continue what is committed, or is of an epoch that has not
        begun.
        """
        if not token_ids:
            raise InvalidArgumentError("verdict.token_ids", "is empty")
        if self.length + len(token_ids) != num_committed:
            raise InvalidArgumentError(
                "verdict.num_committed",
                f"is {num_committed}, but {self.length} tokens are committed and {len(token_ids)} are new",
            )
        compared = self.proposed[: len(token_ids)]
        if compared == token_ids[: len(compared)]:
            del self.proposed[: len(compared)]
        else:
            num_accepted = next(index for index, token_id in enumerate(compared) if token_id != token_ids[index])
            self.epoch += 1
            self.proposed.clear()
            # Keys and values from here on were computed for tokens that are no part of the sequence.
            self.num_computed = min(self.num_computed, self.length + num_accepted)
        self.token_ids += token_ids
        if epoch > self.epoch:
            raise InvalidArgumentError("verdict.epoch", f"is {epoch}, but the sequence is in epoch {self.epoch}")
        # Proposals that the verdict has not reached yet are still good: there is nothing to add to them in lockstep.
        self.wants_draft = not self.proposed
