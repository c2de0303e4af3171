"""A sequence as the verifier sees it."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.block_manager import BlockTable
from engine.slots import Slot
from kernels.penalties import TokenHistory
from outrider.protocol.sampling_parameters import SamplingParameters
from outrider.protocol.verification import Verification
from outrider.service.logs import Subject
from outrider.v1 import common_pb2, generation_pb2
from verifier_service.row_budget import AcceptanceRate
from verifier_service.sequence_trace import SequenceTrace
from verifier_service.speculation import AHEAD, JOINING, LATE, LinkKey, Speculation


@dataclass(eq=False, slots=True)  # slots: a step reads some thousand attributes
class TargetSequence:
    """One sequence of one gateway.

    `token_ids` is the prompt and everything committed. `num_computed` tokens have keys and values in the cache, in
    `block_ids`, or will when the steps in flight have come back; while decoding, all but the last one.
    """

    session_id: int
    sequence_id: int
    # Unique within this verifier: what its drafter calls the sequence.
    link_sequence_id: int
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParameters
    # The sequence ends when it is this long, prompt included.
    length_limit: int
    eos_token_ids: frozenset[int]
    stop_token_ids: frozenset[int]
    # How many log-probabilities beside the chosen token's; None for none at all.
    num_logprobs: int | None
    max_draft_tokens: int  # at least 1
    verification: Verification
    speculation: Speculation
    traceparent: str
    request_id: str
    arrived_ns: int

    # Token counts for penalties and for what is banned below `min_length`; None where there are none.
    history: TokenHistory | None
    # Nothing but the limit ends the sequence before it is this long, prompt included.
    min_length: int = 0
    # None unless the request's trace is sampled.
    trace: SequenceTrace | None = None
    fallbacks: list[common_pb2.Fallback] = field(default_factory=list)  # not yet reported
    num_computed: int = 0
    block_ids: BlockTable = field(default_factory=BlockTable)
    # Its place on the device; None while it does not run.
    slot: Slot | None = None
    # Tokens committed here, as opposed to those that came with the sequence.
    num_committed_here: int = 0
    scheduled_ns: int = 0
    prefilled_ns: int = 0
    # Step, and place in it, of its last part.
    last_turn: tuple[int, int] = (0, 0)
    num_preemptions: int = 0
    # Steps that were submitted with it and have not come back: two where the second takes its token from the first.
    num_in_flight: int = 0
    # Most tokens that these may commit: the host does not know yet how many it will be.
    num_unknown: int = 0
    # Gathering's own: monotonic time at which the last step began, until an answer to its verdict comes.
    step_began: float | None = None
    # How often its draft tokens are accepted.
    acceptance: AcceptanceRate = field(default_factory=AcceptanceRate)
    # Ended or closed: what a step in flight finds for it is nobody's.
    is_over: bool = False

    # Tokens that end the sequence.
    last_token_ids: frozenset[int] = field(init=False)
    # Asked for each row of each step.
    is_coupled: bool = field(init=False)
    # Its draft tokens are tested by p and q: which of them are tested must not depend on what they are.
    is_rejecting: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_coupled = self.verification is Verification.COUPLED
        self.is_rejecting = self.verification is Verification.REJECTION
        self.last_token_ids = self.eos_token_ids | self.stop_token_ids

    @property
    def subject(self) -> Subject:
        """What logs call it."""
        return Subject(self.request_id, self.sequence_id, self.traceparent)

    @property
    def length(self) -> int:
        """Prompt and committed tokens: the position of the next one."""
        return len(self.token_ids)

    @property
    def num_missing(self) -> int:
        """Tokens whose keys and values are not computed."""
        return len(self.token_ids) - self.num_computed

    @property
    def num_wanted_drafts(self) -> int:
        """Most draft tokens that a step could use: the step commits one more token than it accepts.

        All its tokens are below the minimum or none is: what is banned is so for a whole step.
        """
        length = len(self.token_ids)
        room = (self.min_length if length < self.min_length < self.length_limit else self.length_limit) - length - 1
        return self.max_draft_tokens if room >= self.max_draft_tokens else max(room, 0)

    @property
    def gathers_with(self) -> LinkKey | None:
        """The drafter with whose other sequences it takes its steps; None where it waits for nobody.

        A prompt and its first token do not wait, nor does who goes on without a late drafter, or beside one that runs
        ahead. Who needs no drafts, for a last token or where there is no match, does: alone it would take a step as
        long as that of all others.
        """
        speculation = self.speculation
        state = speculation.state
        if state is JOINING or state is LATE or state is AHEAD or len(self.token_ids) - self.num_computed > 1:
            return None
        return speculation.drafter

    def cut(self, token_ids: list[int]) -> tuple[list[int], generation_pb2.FinishReason]:
        """What of newly sampled tokens the sequence keeps, and why it ends there (UNSPECIFIED: it does not)."""
        if len(self.token_ids) + len(token_ids) < self.length_limit and self.last_token_ids.isdisjoint(token_ids):
            return token_ids, generation_pb2.FINISH_REASON_UNSPECIFIED
        for index, token_id in enumerate(token_ids):
            if token_id in self.eos_token_ids:
                reason = generation_pb2.FINISH_REASON_EOS
            elif token_id in self.stop_token_ids:
                reason = generation_pb2.FINISH_REASON_STOP_TOKEN
            elif self.length + index + 1 >= self.length_limit:
                reason = generation_pb2.FINISH_REASON_LENGTH
            else:
                continue
            return token_ids[: index + 1], reason
        return token_ids, generation_pb2.FINISH_REASON_UNSPECIFIED

    def fall_back(self, reason: common_pb2.FallbackReason) -> None:
        """Go on without a drafter, and note what the gateway is to be told."""
        self.speculation.leave()
        self.fallbacks.append(common_pb2.Fallback(reason=reason, position=self.length))
