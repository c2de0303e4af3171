"""The drafter's engine: takes in frames of all verifiers, lets the drafter work, answers with frames."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from drafter_service.drafter import Drafter, Drafts, NoDraft
from drafter_service.frames import split_by_session
from drafter_service.metrics import DrafterMetrics
from drafter_service.sequence import DraftSequence
from drafter_service.session import FrameArrived, Session, SessionClosed, SessionOpened
from outrider.protocol.errors import InvalidArgumentError
from outrider.protocol.verdicts import Verdict
from outrider.service.step_spans import SpanRecord, StepSpans, Value
from outrider.service.telemetry import is_sampled
from outrider.v1 import drafter_pb2

logger = logging.getLogger(__name__)

# A device that fails this often in a row is taken for dead: the process ends, to be started anew.
MAX_FAILURES_IN_A_ROW = 3


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


class DrafterEngine:
    """Runs on the thread that owns the drafter.

    It loops while the drafter has work: one that runs ahead rests when nothing more is worth expanding, one that takes
    turns when all verdicts are answered. What has arrived is taken in between two passes.
    """

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
        self._sessions: dict[int, Session] = {}
        self._num_failures = 0
        self._refuses_openings = False
        self._num_traced = 0  # sequences

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
            self._sessions[event.session_id] = Session(event.session_id, event.limits)
            return
        if isinstance(event, SessionClosed):
            session = self._sessions.pop(event.session_id, None)
            for sequence in session.sequences.values() if session else ():
                self._end_trace(sequence)
                self._drafter.release(sequence)
            return
        session = self._sessions[event.session_id]
        for close in event.closes:
            self._forget(session, close.sequence_id)
        for opening in event.opens:
            self._open(session, opening)
        for verdict in event.verdicts:
            self._commit(session, verdict)

    def step(self, emit: Callable[[EngineOutput], None]) -> float | None:
        """Let the drafter work once, if it has anything to do, and tell each verifier what was made for it."""
        start_ns = time.time_ns()
        has_worked = self._drafter.has_work
        drafts = self._draft() if has_worked else Drafts()
        end_ns = time.time_ns()
        for refusal in drafts.refusals:
            self._refuse(refusal)
        frames = {
            session.session_id: drafter_pb2.DraftResponse(refusals=session.refusals)
            for session in self._sessions.values()
            if session.refusals
        }
        for expanded in drafts.expanded:
            for session_id, expansions in split_by_session(expanded):
                frames.setdefault(session_id, drafter_pb2.DraftResponse()).expansions.append(expansions)
        # An empty frame tells a verifier that its prompt is being worked on, and that the drafter is alive.
        for sequence in drafts.computing:
            frames.setdefault(sequence.session_id, drafter_pb2.DraftResponse())
        for session_id, frame in frames.items():
            if session := self._sessions.get(session_id):
                session.refusals = []
                frame.step_seconds = (end_ns - start_ns) * 1e-9
                emit(SessionOutput(session_id, frame))
                if self._metrics is not None:
                    self._metrics.refused(frame.refusals)
        if self._metrics is not None and has_worked:
            self._metrics.drafted(drafts, seconds=(end_ns - start_ns) * 1e-9)
        if self._num_traced:
            self._trace(drafts, start_ns, end_ns)
        if self._records:
            # Behind the frames, which somebody may wait for.
            emit(DraftRecords(self._records))
            self._records = []
        return 0.0 if self._drafter.has_work else None

    def _draft(self) -> Drafts:
        try:
            drafts = self._drafter.draft()
        except Exception as error:
            self._num_failures += 1
            if self._num_failures >= MAX_FAILURES_IN_A_ROW:
                raise
            logger.exception("drafting failed for %d sequences", self.num_sequences)
            detail = f"the drafter failed: {type(error).__name__}"
            return Drafts(
                refusals=[
                    NoDraft(sequence, drafter_pb2.REFUSAL_REASON_INTERNAL, detail)
                    for session in self._sessions.values()
                    for sequence in session.sequences.values()
                ]
            )
        self._num_failures = 0
        return drafts

    def _refuse(self, refusal: NoDraft) -> None:
        sequence = refusal.sequence
        session = self._sessions.get(sequence.session_id)
        if session is None or session.sequences.get(sequence.sequence_id) is not sequence:
            return
        if refusal.reason != drafter_pb2.REFUSAL_REASON_NO_MATCH:
            self._forget(session, sequence.sequence_id)
        session.refuse(sequence.sequence_id, refusal.reason, num_committed=sequence.length, detail=refusal.detail)

    def _open(self, session: Session, opening: drafter_pb2.OpenSequence) -> None:
        is_full = self.num_sequences >= self._max_sequences
        if (is_full or self._refuses_openings) and opening.sequence_id not in session.sequences:
            detail = (
                f"the drafter holds {self._max_sequences} sequences, its limit"
                if is_full
                else "the drafter is draining"
            )
            session.refuse(opening.sequence_id, drafter_pb2.REFUSAL_REASON_OVERLOADED, detail=detail)
            return
        try:
            sequence = session.parse(opening, self._drafter.vocabulary_size)
        except InvalidArgumentError as error:
            self._drop(session, opening.sequence_id, error)
            return
        if self._is_tracing and is_sampled(opening.traceparent):
            name = self._drafter.name
            self._num_traced += 1
            sequence.spans = StepSpans(f"draft {name}", f"drafts {name}", self._step_spans)
        session.sequences[opening.sequence_id] = sequence
        self._drafter.open(sequence)

    def _commit(self, session: Session, verdict: Verdict) -> None:
        sequence = session.sequences.get(verdict.sequence_id)
        if sequence is None:
            session.refuse(verdict.sequence_id, drafter_pb2.REFUSAL_REASON_UNKNOWN_SEQUENCE)
            return
        try:
            verdict.check(sequence.length, self._drafter.vocabulary_size)
        except InvalidArgumentError as error:
            self._drop(session, verdict.sequence_id, error)
            return
        sequence.token_ids += verdict.token_ids
        self._drafter.commit(sequence, verdict.token_ids)

    def _drop(self, session: Session, sequence_id: int, error: InvalidArgumentError) -> None:
        self._forget(session, sequence_id)
        session.refuse(sequence_id, drafter_pb2.REFUSAL_REASON_BAD_MESSAGE, detail=error.message)

    def _forget(self, session: Session, sequence_id: int) -> None:
        sequence = session.sequences.pop(sequence_id, None)
        if sequence is not None:
            self._end_trace(sequence)
            self._drafter.release(sequence)

    def _trace(self, drafts: Drafts, start_ns: int, end_ns: int) -> None:
        batch_size = sum(len(expanded.sequences) for expanded in drafts.expanded)
        # Of all sequences in the pass: a prompt among them shows as a large number of tokens to compute.
        num_missing = sum(sequence.num_missing for sequence in drafts.computing)
        alone: dict[str, Value] = {
            "outrider.drafter.kind": self._drafter.kind,
            "outrider.batch_size": batch_size,
            "outrider.num_missing_tokens": num_missing,
        }
        for sequence, num_expansions, num_committed in _each(drafts):
            if sequence.spans is None:
                continue
            record = sequence.spans.add(
                start_ns,
                end_ns,
                position=num_committed,
                sums={"outrider.num_expansions": num_expansions},
                alone=alone,
            )
            if record is not None:
                self._records.append((sequence.traceparent, record))

    def _end_trace(self, sequence: DraftSequence) -> None:
        if sequence.spans is None:
            return
        self._num_traced -= 1
        if record := sequence.spans.flush():
            self._records.append((sequence.traceparent, record))


def _each(drafts: Drafts) -> Iterable[tuple[DraftSequence, int, int]]:
    """Each sequence with expansions, how many, and how many committed tokens they stand behind."""
    for expanded in drafts.expanded:
        yield from zip(
            expanded.sequences, expanded.num_expansions.tolist(), expanded.num_committed.tolist(), strict=True
        )
