"""One verifier's stream as the engine sees it: its sequences, and what is said about them next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from drafter_service.sequence import DraftSequence
from outrider.protocol.errors import InvalidArgumentError
from outrider.protocol.handshake import DraftLimits
from outrider.protocol.sampling_parameters import SamplingParameters
from outrider.protocol.verdicts import Verdict, unpack_verdicts
from outrider.protocol.wire import unpack_tokens
from outrider.v1 import common_pb2, drafter_pb2

_VERIFICATIONS = (
    common_pb2.VERIFICATION_GREEDY,
    common_pb2.VERIFICATION_REJECTION,
    common_pb2.VERIFICATION_COUPLED,
)


@dataclass(frozen=True)
class SessionOpened:
    """A verifier's stream was accepted; what is drafted for it is held to `limits`."""

    session_id: int
    limits: DraftLimits


@dataclass(frozen=True)
class FrameArrived:
    """A verifier's frame, as far as it can be checked without its sequences."""

    session_id: int
    closes: Sequence[drafter_pb2.CloseSequence]
    opens: Sequence[drafter_pb2.OpenSequence]
    verdicts: Sequence[Verdict]

    @staticmethod
    def of(session_id: int, frame: drafter_pb2.DraftRequest) -> FrameArrived:
        """Raises InvalidArgumentError, naming the field, for a frame whose arrays do not fit each other."""
        return FrameArrived(session_id, frame.closes, frame.opens, [*unpack_verdicts(frame.verdicts)])


@dataclass(frozen=True)
class SessionClosed:
    """A verifier's stream ended."""

    session_id: int


@dataclass
class Session:
    """A stream's limits and sequences, and the refusals that its next frame will have."""

    session_id: int
    limits: DraftLimits
    sequences: dict[int, DraftSequence] = field(default_factory=dict)
    refusals: list[drafter_pb2.Refusal] = field(default_factory=list)

    def refuse(
        self, sequence_id: int, reason: drafter_pb2.RefusalReason, *, num_committed: int = 0, detail: str = ""
    ) -> None:
        """Let the next frame say so."""
        self.refusals.append(
            drafter_pb2.Refusal(sequence_id=sequence_id, reason=reason, num_committed=num_committed, detail=detail)
        )

    def parse(self, opening: drafter_pb2.OpenSequence, vocabulary_size: int) -> DraftSequence:
        """The sequence that is to be opened; a vocabulary of size 0 has every id.

        Raises InvalidArgumentError, naming the field.
        """
        if opening.sequence_id in self.sequences:
            raise InvalidArgumentError("open.sequence_id", "is open already")
        if not 1 <= opening.max_draft_tokens <= self.limits.max_draft_tokens:
            raise InvalidArgumentError("open.max_draft_tokens", f"must be from 1 to {self.limits.max_draft_tokens}")
        try:
            token_ids = unpack_tokens(opening.token_ids)
        except ValueError as error:
            raise InvalidArgumentError("open.token_ids", str(error)) from error
        if not token_ids:
            raise InvalidArgumentError("open.token_ids", "is empty")
        if vocabulary_size and (largest := max(token_ids)) >= vocabulary_size:
            raise InvalidArgumentError(
                "open.token_ids", f"{largest} is not below the vocabulary size {vocabulary_size}"
            )
        if not 1 <= opening.num_prompt_tokens <= len(token_ids):
            raise InvalidArgumentError("open.num_prompt_tokens", f"must be from 1 to {len(token_ids)}")
        if opening.verification not in _VERIFICATIONS:
            raise InvalidArgumentError("open.verification", "must say how draft tokens will be verified")
        return DraftSequence(
            sequence_id=opening.sequence_id,
            token_ids=token_ids,
            num_prompt_tokens=opening.num_prompt_tokens,
            # Biases are for the target's ids, of which the drafter may lack some: without a size they are not compared.
            sampling=SamplingParameters.from_message(opening.sampling, prefix="open.sampling"),
            verification=opening.verification,
            max_draft_tokens=opening.max_draft_tokens,
            limits=self.limits,
            session_id=self.session_id,
            traceparent=opening.traceparent,
        )
