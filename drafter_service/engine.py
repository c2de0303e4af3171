"""The drafter's engine: takes in frames of all verifiers, drafts for what wants a draft, answers with frames."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from drafter_service.drafter import Draft, Drafter, NoDraft
from drafter_service.metrics import DrafterMetrics
from drafter_service.proposing import ANSWERED
from drafter_service.sequence import DraftSequence
from outrider.protocol.errors import InvalidArgumentError
from outrider.protocol.handshake import DraftLimits
from outrider.protocol.sampling_parameters import SamplingParameters
from outrider.protocol.verification import Verification
from outrider.protocol.wire import pack_candidates, pack_tokens, unpack_tokens
from outrider.service.step_spans import SpanRecord, StepSpans
from outrider.service.telemetry import is_sampled
from outrider.v1 import drafter_pb2

logger = logging.getLogger(__name__)

# A device that fails this often in a row is taken for dead: the process ends, to be started anew.
MAX_FAILURES_IN_A_ROW = 3


@dataclass(frozen=True)
class SessionOpened:
    """A verifier's stream was accepted; its proposals are held to `limits`."""

    session_id: int
    limits: DraftLimits


@dataclass(frozen=True)
class FrameArrived:
    """A verifier's frame."""

    session_id: int
    frame: drafter_pb2.DraftRequest


@dataclass(frozen=True)
class SessionClosed:
    """A verifier's stream ended."""

    session_id: int


@dataclass(frozen=True)
class SessionOutput:
    """One frame for one verifier."""

    session_id: int
    frame: drafter_pb2.DraftResponse


@dataclass(frozen=True)
class DraftRecords:
    """Spans for the traces of sequences, each with its parent's traceparent."""

    records: Sequence[tuple[str, SpanRecord]]


EngineEvent = SessionOpened | FrameArrived | SessionClosed
EngineOutput = SessionOutput | DraftRecords


@dataclass
class _Session:
    limits: DraftLimits
    sequences: dict[int, DraftSequence] = field(default_factory=dict)
    refusals: list[drafter_pb2.NoProposal] = field(default_factory=list)


class DrafterEngine:
    """Runs on the thread that owns the drafter."""

    def __init__(
        self,
        drafter: Drafter,
        *,
        max_sequences: int,
        is_tracing: bool = False,
        step_spans: int = 32,
        metrics: DrafterMetrics | None = None,
    ) -> None:
        self._drafter = drafter
        self._max_sequences = max_sequences
        self._is_tracing = is_tracing
        self._step_spans = step_spans
        # None where nobody reads them.
        self._metrics = metrics
        self._records: list[tuple[str, SpanRecord]] = []
        self._sessions: dict[int, _Session] = {}
        self._num_failures = 0
        self._refuses_openings = False

    @property
    def num_sequences(self) -> int:
        """Sequences open, of all sessions."""
        # Read from the event loop as well: a list is made first, as the engine's thread may add a session meanwhile.
        return sum(len(session.sequences) for session in list(self._sessions.values()))

    def load(self) -> None:
        """Load the drafter."""
        self._drafter.load()

    def refuse_openings(self) -> None:
        """Take no new sequences from now on; safe to call from any thread."""
        self._refuses_openings = True

    def handle(self, event: EngineEvent) -> None:
        """Take in a frame, or the beginning or end of a stream."""
        if isinstance(event, SessionOpened):
            self._sessions[event.session_id] = _Session(event.limits)
            return
        if isinstance(event, SessionClosed):
            session = self._sessions.pop(event.session_id, None)
            for sequence in session.sequences.values() if session else ():
                self._end_trace(sequence)
                self._drafter.release(sequence)
            return
        session = self._sessions[event.session_id]
        for close in event.frame.closes:
            self._forget(session, close.sequence_id)
        for opening in event.frame.opens:
            self._open(session, opening)
        for verdict in event.frame.verdicts:
            self._commit(session, verdict)

    def step(self, emit: Callable[[EngineOutput], None]) -> float | None:
        """Draft once for everything that wants a draft; sleep when nothing does."""
        start_ns = time.time_ns()
        wanting_by_session = {
            session_id: [
                sequence for sequence in session.sequences.values() if sequence.proposing.state is not ANSWERED
            ]
            for session_id, session in self._sessions.items()
        }
        wanting = list(itertools.chain.from_iterable(wanting_by_session.values()))
        is_traced = self._is_tracing and any(sequence.spans is not None for sequence in wanting)
        num_missing = sum(sequence.num_missing for sequence in wanting) if is_traced else 0
        answers = self._draft(wanting) if wanting else ()
        end_ns = time.time_ns()
        by_sequence = {id(answer.sequence): answer for answer in answers}
        for session_id, session in self._sessions.items():
            frame = drafter_pb2.DraftResponse(no_proposals=session.refusals, step_seconds=(end_ns - start_ns) * 1e-9)
            session.refusals = []
            is_working = False
            for sequence in wanting_by_session[session_id]:
                answer = by_sequence.get(id(sequence))
                if isinstance(answer, Draft):
                    self._propose(frame, answer)
                    if sequence.spans is not None:
                        self._trace(answer, sequence.spans, start_ns, end_ns, len(wanting), num_missing)
                elif answer is not None:
                    self._refuse(session, frame, answer)
                else:
                    is_working = True
            # An empty frame tells a verifier that its prompt is being worked on, and that the drafter is alive.
            if frame.proposals or frame.no_proposals or is_working:
                emit(SessionOutput(session_id, frame))
            if self._metrics is not None:
                self._metrics.refused(frame.no_proposals)
            for sequence in wanting_by_session[session_id]:
                for verdict in sequence.proposing.release():
                    # A bad one drops the sequence, and what follows with it.
                    if sequence.sequence_id in session.sequences:
                        self._take_in(session, sequence, *verdict)
        if self._records:
            # Behind the proposals, which somebody waits for.
            emit(DraftRecords(self._records))
            self._records = []
        if self._metrics is not None and wanting:
            drafts = [len(answer.token_ids) for answer in answers if isinstance(answer, Draft)]
            self._metrics.drafted(drafts, num_sequences=len(wanting), seconds=(end_ns - start_ns) * 1e-9)
        is_busy = any(sequence.proposing.state is not ANSWERED for sequence in wanting)
        return 0.0 if is_busy or any(session.refusals for session in self._sessions.values()) else None

    def _draft(self, wanting: Sequence[DraftSequence]) -> Sequence[Draft | NoDraft]:
        try:
            answers = self._drafter.draft(wanting)
        except Exception as error:
            self._num_failures += 1
            if self._num_failures >= MAX_FAILURES_IN_A_ROW:
                raise
            logger.exception("drafting failed for %d sequences", len(wanting))
            reason = drafter_pb2.NO_PROPOSAL_REASON_INTERNAL
            return [NoDraft(sequence, reason, f"the drafter failed: {type(error).__name__}") for sequence in wanting]
        self._num_failures = 0
        return answers

    def _propose(self, frame: drafter_pb2.DraftResponse, draft: Draft) -> None:
        sequence = draft.sequence
        # By attributes: as arguments of `add` they would take a third longer.
        proposal = frame.proposals.add()
        proposal.sequence_id = sequence.sequence_id
        proposal.epoch = sequence.proposing.epoch
        proposal.position = len(sequence.token_ids)
        proposal.token_ids = pack_tokens(draft.token_ids)
        if draft.candidate_ids is not None and draft.candidate_weights is not None:
            proposal.candidate_ids, proposal.candidate_weights = pack_candidates(
                draft.candidate_ids, draft.candidate_weights
            )
        sequence.proposing.propose(draft.token_ids)

    def _trace(
        self, draft: Draft, spans: StepSpans, start_ns: int, end_ns: int, batch_size: int, num_missing: int
    ) -> None:
        record = spans.add(
            start_ns,
            end_ns,
            position=draft.sequence.length,
            sums={"outrider.num_draft_tokens": len(draft.token_ids)},
            # Of all sequences in the step: a prompt among them shows as a large number of tokens to compute.
            alone={
                "outrider.drafter.kind": self._drafter.kind,
                "outrider.batch_size": batch_size,
                "outrider.num_missing_tokens": num_missing,
            },
        )
        if record is not None:
            self._records.append((draft.sequence.traceparent, record))

    def _end_trace(self, sequence: DraftSequence) -> None:
        if sequence.spans is not None and (record := sequence.spans.flush()):
            self._records.append((sequence.traceparent, record))

    def _refuse(self, session: _Session, frame: drafter_pb2.DraftResponse, answer: NoDraft) -> None:
        sequence = answer.sequence
        if answer.reason == drafter_pb2.NO_PROPOSAL_REASON_NO_MATCH:
            sequence.proposing.find_nothing()
        else:
            self._forget(session, sequence.sequence_id)
        frame.no_proposals.add(
            sequence_id=sequence.sequence_id, reason=answer.reason, position=sequence.length, detail=answer.detail
        )

    def _open(self, session: _Session, opening: drafter_pb2.OpenSequence) -> None:
        if opening.sequence_id in session.sequences:
            self._drop(session, opening.sequence_id, InvalidArgumentError("open.sequence_id", "is open already"))
            return
        is_full = self.num_sequences >= self._max_sequences
        if is_full or self._refuses_openings:
            session.refusals.append(
                drafter_pb2.NoProposal(
                    sequence_id=opening.sequence_id,
                    reason=drafter_pb2.NO_PROPOSAL_REASON_OVERLOADED,
                    detail=f"the drafter holds {self._max_sequences} sequences, its limit"
                    if is_full
                    else "the drafter is draining",
                )
            )
            return
        try:
            session.sequences[opening.sequence_id] = self._parse(opening, session.limits)
        except InvalidArgumentError as error:
            self._drop(session, opening.sequence_id, error)

    def _parse(self, opening: drafter_pb2.OpenSequence, limits: DraftLimits) -> DraftSequence:
        if not 1 <= opening.max_draft_tokens <= limits.max_draft_tokens:
            raise InvalidArgumentError("open.max_draft_tokens", f"must be from 1 to {limits.max_draft_tokens}")
        token_ids = self._tokens("open.token_ids", opening.token_ids)
        if not 1 <= opening.num_prompt_tokens <= len(token_ids):
            raise InvalidArgumentError("open.num_prompt_tokens", f"must be from 1 to {len(token_ids)}")
        verification = Verification.from_message(opening.verification)
        if verification is None:
            raise InvalidArgumentError("open.verification", f"{opening.verification} is no rule that is known here")
        # Biases are for the target's ids, of which the drafter may lack some: without a size they are not compared.
        sampling = SamplingParameters.from_message(opening.sampling, prefix="open.sampling")
        return DraftSequence(
            sequence_id=opening.sequence_id,
            token_ids=token_ids,
            num_prompt_tokens=opening.num_prompt_tokens,
            sampling=sampling,
            max_draft_tokens=opening.max_draft_tokens,
            wants_candidates=not sampling.is_greedy and verification is Verification.REJECTION,
            is_coupled=verification is Verification.COUPLED,
            max_candidates=limits.max_candidates,
            traceparent=opening.traceparent,
            spans=StepSpans(f"draft {self._drafter.name}", f"drafts {self._drafter.name}", self._step_spans)
            if self._is_tracing and is_sampled(opening.traceparent)
            else None,
        )

    def _commit(self, session: _Session, verdict: drafter_pb2.Verdict) -> None:
        sequence = session.sequences.get(verdict.sequence_id)
        if sequence is None:
            session.refusals.append(
                drafter_pb2.NoProposal(
                    sequence_id=verdict.sequence_id, reason=drafter_pb2.NO_PROPOSAL_REASON_UNKNOWN_SEQUENCE
                )
            )
            return
        try:
            token_ids = self._tokens("verdict.token_ids", verdict.token_ids)
        except InvalidArgumentError as error:
            self._drop(session, verdict.sequence_id, error)
            return
        if not sequence.proposing.hold(token_ids, verdict.num_committed, verdict.epoch):
            self._take_in(session, sequence, token_ids, verdict.num_committed, verdict.epoch)

    def _take_in(
        self, session: _Session, sequence: DraftSequence, token_ids: list[int], num_committed: int, verdict_epoch: int
    ) -> None:
        proposing = sequence.proposing
        epoch = proposing.epoch
        try:
            sequence.commit(token_ids, num_committed, verdict_epoch)
        except InvalidArgumentError as error:
            self._drop(session, sequence.sequence_id, error)
        if self._metrics is not None and proposing.epoch != epoch:
            self._metrics.rejections.add(proposing.epoch - epoch)

    def _tokens(self, field_name: str, data: bytes) -> list[int]:
        try:
            token_ids = unpack_tokens(data)
        except ValueError as error:
            raise InvalidArgumentError(field_name, str(error)) from error
        limit = self._drafter.vocabulary_size
        if not token_ids:
            raise InvalidArgumentError(field_name, "is empty")
        if limit and max(token_ids) >= limit:
            raise InvalidArgumentError(field_name, f"{max(token_ids)} is not below the vocabulary size {limit}")
        return token_ids

    def _drop(self, session: _Session, sequence_id: int, error: InvalidArgumentError) -> None:
        self._forget(session, sequence_id)
        session.refusals.append(
            drafter_pb2.NoProposal(
                sequence_id=sequence_id, reason=drafter_pb2.NO_PROPOSAL_REASON_BAD_MESSAGE, detail=error.message
            )
        )

    def _forget(self, session: _Session, sequence_id: int) -> None:
        sequence = session.sequences.pop(sequence_id, None)
        if sequence is not None:
            self._end_trace(sequence)
            self._drafter.release(sequence)
