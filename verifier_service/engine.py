"""The verifier's engine: schedule, forward, verify, commit. Runs on the thread that owns the target model."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import grpc

from engine.draft_tokens import DraftTokens
from engine.late_compilation import warn_of_late_compilation
from outrider.protocol.errors import code_number
from outrider.service.logs import about
from outrider.v1 import common_pb2, drafter_pb2, generation_pb2, verifier_pb2
from verifier_service.drafting import DraftingLinks
from verifier_service.events import (
    Event,
    LinkDown,
    LinkRetired,
    LinkUp,
    OpeningRefused,
    ProposalsArrived,
    SequenceOpened,
    SequencesClosed,
    SessionClosed,
    StepOutput,
)
from verifier_service.gathering import Gathering
from verifier_service.pipeline import Finished, Pipeline
from verifier_service.reporting import Committed, Ran, Reporter
from verifier_service.scheduler import Scheduled, Scheduler
from verifier_service.sequence import TargetSequence
from verifier_service.sequence_trace import Step
from verifier_service.speculation import WAITING, LinkKey, ProposalError
from verifier_service.step_metrics import StepMetrics
from verifier_service.target import Target
from verifier_service.verify import Verified, verify, warm_up

logger = logging.getLogger(__name__)

# A device that fails this often in a row is taken for dead: the process ends, to be started anew.
MAX_FAILURES_IN_A_ROW = 3


class VerifierEngine:
    """Every method runs on the engine's thread, but for `load_report`."""

    def __init__(
        self,
        target: Target,
        *,
        max_running: int,
        max_waiting: int,
        split_from: int,
        draft_timeout: float,
        is_polling: bool = False,
        metrics: StepMetrics | None = None,
    ) -> None:
        self._target = target
        self._max_running = max_running
        self._split_from = split_from
        self._max_waiting = max_waiting
        self._gathering = Gathering()
        self._links = DraftingLinks(draft_timeout, self._gathering)
        # None where nobody reads them.
        self._metrics = metrics
        self._sequences: dict[tuple[int, int], TargetSequence] = {}
        self._by_link_id: dict[int, TargetSequence] = {}
        self._output = StepOutput()
        self._num_failures = 0
        self._is_stepping = False
        self._pipeline = Pipeline(target)
        self._reporter = Reporter(metrics)
        # Whether the thread may look for news while a step is in flight; else it sleeps until the step has come back.
        self._is_polling = is_polling
        self._has_news = False

    def load(self) -> None:
        """Load the target model and warm it up."""
        self._target.load()
        warm_up(self._target)
        if self._target.graphs is not None and self._target.device.type == "cuda":
            warn_of_late_compilation()
        self._scheduler = Scheduler(
            self._target.blocks,
            max_running=self._max_running,
            max_num_batched_tokens=self._target.max_num_batched_tokens,
            split_from=self._split_from,
            gathering=self._gathering if self._target.graphs is not None else None,
        )
        if self._metrics is not None:
            self._metrics.follow(self._scheduler, self._links, self._max_running)

    def handle(self, event: Event) -> None:
        """Take in what has happened outside."""
        self._has_news = True
        if not isinstance(event, ProposalsArrived):
            # What was committed before is told before what follows from the event.
            self._reporter.report(self._output)
        match event:
            case SequenceOpened(sequence):
                self._open(sequence)
            case OpeningRefused(session_id, sequence_id, error):
                self._end_with(error, session_id, sequence_id)
            case SequencesClosed(session_id, sequence_ids):
                for sequence_id in sequence_ids:
                    if found := self._sequences.get((session_id, sequence_id)):
                        self._reporter.end_trace(found, self._output, is_closed=True)
                        self._close(found)
            case SessionClosed(session_id):
                for sequence in [s for s in self._sequences.values() if s.session_id == session_id]:
                    self._close(sequence)
            case LinkUp(key, max_length):
                self._links.add(key, max_length)
            case LinkDown(key):
                self._links.remove(key)
                for sequence in [s for s in self._sequences.values() if s.speculation.drafter == key]:
                    self._fall_back(sequence, common_pb2.FALLBACK_REASON_DRAFTER_LOST)
            case LinkRetired(key, is_retired):
                self._links.retire(key, is_retired=is_retired)
            case ProposalsArrived(key, frame, drafts):
                if self._links.has_heard(key):
                    self._take_proposals(key, frame.proposals, drafts, frame.step_seconds)
                    for refusal in frame.no_proposals:
                        self._take_refusal(key, refusal, frame.step_seconds)

    def step(self, emit: Callable[[StepOutput], None]) -> float | None:
        """One step over everything that is ready; how long to sleep when nothing is."""
        self._is_stepping = True
        try:
            return self._step(emit)
        finally:
            self._is_stepping = False

    def _step(self, emit: Callable[[StepOutput], None]) -> float | None:
        if self._pipeline and not self._has_news and not self._pipeline.is_oldest_done and self._is_worth_polling:
            time.sleep(0)  # lets the event loop have the interpreter
            return 0.0
        self._has_news = False
        self._give_up_waiting()
        self._output.idle_links += self._links.take_idle(self._sequences.values())
        has_begun = False
        while not self._is_full and self._begin_step(emit):
            has_begun = True
            if not self._pipeline:
                break  # it ran to its end
        # While the device works on the new step, the gateways are told of the one before.
        self._reporter.report(self._output)
        self._flush(emit)
        if self._pipeline and (self._pipeline.is_oldest_done or not self._is_worth_polling):
            self._finish(self._pipeline.collect(), emit)
        return 0.0 if self._pipeline or self._reporter or has_begun else self._time_until_something()

    @property
    def _is_full(self) -> bool:
        """Whether a step has to come back before the next can begin."""
        return self._pipeline.is_full or (bool(self._pipeline) and self._scheduler.is_short)

    @property
    def _is_worth_polling(self) -> bool:
        """Whether something may come up, before a step is back, that could begin at once."""
        has_others = len(self._scheduler.running) > self._pipeline.num_sequences or bool(self._scheduler.waiting)
        return self._is_polling and has_others and not self._is_full

    def _begin_step(self, emit: Callable[[StepOutput], None]) -> bool:
        """Begin the next step, or run it where nothing can be in flight; False when there is nothing to do."""
        began_ns = time.time_ns()
        batch, admitted = self._scheduler.schedule()
        for sequence in admitted:
            self._admit(sequence)
        # Openings leave before the forward pass, so that drafter and target compute a prompt at the same time.
        self._flush(emit)
        if not batch:
            return False
        start_ns = time.time_ns()
        try:
            if self._pipeline.launch(batch, schedule_seconds=(start_ns - began_ns) * 1e-9):
                self._gathering.began(part.sequence for part in batch if part.is_sampled)
                return True
            if self._pipeline:
                # What comes back changes what the batch was made from: it is chosen anew.
                while self._pipeline:
                    self._finish(self._pipeline.collect(), emit)
                return True
            self._gathering.began(part.sequence for part in batch if part.is_sampled)
            results, found_error = verify(self._target, batch), None
        except Exception as error:
            results, found_error = [], error
        step = Step(batch, start_ns, time.time_ns(), schedule_seconds=(start_ns - began_ns) * 1e-9)
        self._finish(Finished(step, results, found_error), emit)
        return True

    def _time_until_something(self) -> float | None:
        """Seconds until a wait for proposals is over; None when nothing waits."""
        times = [self._links.time_until_late(self._scheduler.running), self._gathering.time_left()]
        return min((seconds for seconds in times if seconds is not None), default=None)

    @property
    def is_busy(self) -> bool:
        """Whether any sequence runs, waits or has something left to be told; safe to ask from any thread."""
        # In this order: a sequence is taken out before its end is reported, which the same step does.
        return bool(self._sequences) or bool(self._reporter) or bool(self._output) or self._is_stepping

    def load_report(self) -> verifier_pb2.VerifierLoad:
        """How busy the engine is; safe to call from any thread."""
        return verifier_pb2.VerifierLoad(
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            num_kv_blocks=self._target.blocks.num_blocks,
            num_free_kv_blocks=self._target.blocks.num_free,
            max_running=self._max_running,
        )

    def _open(self, sequence: TargetSequence) -> None:
        key = (sequence.session_id, sequence.sequence_id)
        if key in self._sequences:
            self._fail(self._sequences[key], grpc.StatusCode.INVALID_ARGUMENT, "sequence_id: is open already")
            return
        # Places that are free are taken at the next step: only what comes on top of them will have to wait.
        num_free_places = self._max_running - len(self._scheduler.running)
        is_full = len(self._scheduler.waiting) >= self._max_waiting + num_free_places
        self._sequences[key] = sequence
        self._scheduler.add(sequence)
        if is_full:
            self._fail(
                sequence,
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{self._max_waiting} sequences wait already",
                retry_delay_seconds=1.0,
            )

    def _admit(self, sequence: TargetSequence) -> None:
        sequence.scheduled_ns = time.time_ns()
        if sequence.trace is not None:
            sequence.trace.queued(sequence.arrived_ns, sequence.scheduled_ns, len(self._scheduler.running))
            self._reporter.take_records(sequence, self._output)
        drafter = sequence.speculation.drafter
        if drafter is None:
            return
        if not self._links.is_up(drafter):
            self._fall_back(sequence, common_pb2.FALLBACK_REASON_DRAFTER_LOST)
        elif self._links.is_outgrown_by(sequence):
            self._fall_back(sequence, common_pb2.FALLBACK_REASON_DRAFTER_MAX_LENGTH)
        else:
            self._by_link_id[sequence.link_sequence_id] = sequence
            self._output.link(drafter).opens.append(self._links.opening(sequence))

    def _take_proposals(
        self,
        key: LinkKey,
        proposals: Sequence[drafter_pb2.Proposal],
        parsed: Sequence[DraftTokens | ProposalError],
        draft_seconds: float,
    ) -> None:
        now = time.monotonic()
        num_stale, awaited_since = 0, now
        for proposal, drafts in zip(proposals, parsed, strict=True):
            sequence = self._drafted_by(key, proposal.sequence_id)
            if sequence is None:
                continue
            try:
                if isinstance(drafts, ProposalError):
                    raise drafts
                speculation = sequence.speculation
                if speculation.state is WAITING and speculation.since < awaited_since:
                    awaited_since = speculation.since
                num_stale += self._links.take(sequence, proposal, drafts, now)
                if sequence.trace is not None:
                    sequence.trace.drafted(draft_seconds)
            except ProposalError as error:
                with about(sequence.subject):
                    logger.warning("going on without the drafter: %s", error)
                self._fall_back(sequence, common_pb2.FALLBACK_REASON_DRAFTER_LOST)
        if self._metrics is not None:
            self._metrics.proposed(key.address, num_stale, now - awaited_since)

    def _take_refusal(self, key: LinkKey, refusal: drafter_pb2.NoProposal, draft_seconds: float) -> None:
        sequence = self._drafted_by(key, refusal.sequence_id)
        if sequence is None:
            return
        reason = self._links.take_refusal(sequence, refusal)
        if sequence.trace is not None:
            sequence.trace.drafted(draft_seconds)
        if reason is not None:
            with about(sequence.subject):
                logger.info("going on without the drafter: %s", refusal.detail)
            self._fall_back(sequence, reason)

    def _drafted_by(self, key: LinkKey, link_sequence_id: int) -> TargetSequence | None:
        """The sequence, unless it has ended, has left its drafter, or is another drafter's."""
        sequence = self._by_link_id.get(link_sequence_id)
        return sequence if sequence is not None and sequence.speculation.drafter == key else None

    def _give_up_waiting(self) -> None:
        silent = self._links.silent(self._scheduler.running)
        for key in silent:
            # What the drafter had is lost with the connection, for every sequence that it served.
            self._output.silent_links.append(key)
            self.handle(LinkDown(key))
        for sequence in self._links.go_on_plainly(self._scheduler.running):
            self._fall_back(sequence, common_pb2.FALLBACK_REASON_DRAFTER_OVERLOADED)

    def _finish(self, finished: Finished, emit: Callable[[StepOutput], None]) -> None:
        """Commit what a step found, or end its sequences when it failed. Raises when the device seems dead."""
        step = finished.step
        self._has_news = True
        if finished.error is not None:
            self._num_failures += 1
            if self._num_failures >= MAX_FAILURES_IN_A_ROW:
                raise finished.error
            logger.error("a step of %d sequences failed", len(step.batch), exc_info=finished.error)
            self._reporter.report(self._output)
            for part in step.batch:
                message = f"the target model failed: {type(finished.error).__name__}"
                self._fail(part.sequence, grpc.StatusCode.INTERNAL, message)
            return
        self._num_failures = 0
        now = time.monotonic()
        all_committed = []
        for part, verified in zip(step.batch, finished.results, strict=True):
            sequence = part.sequence
            if sequence.is_over:
                continue  # closed while the step was in flight
            if verified is not None:
                all_committed.append(self._commit(step, part, verified, now))
                continue
            sequence.num_computed += part.num_new
            if sequence.trace is not None:
                sequence.trace.computed_chunk(step, part)
        # Verdicts leave first: while the drafters work on them, the gateways' frames are made.
        self._flush(emit)
        self._reporter.add(Ran(step, all_committed, told_ns=time.time_ns()))

    def _commit(self, step: Step, part: Scheduled, verified: Verified, now: float) -> Committed:
        sequence = part.sequence
        position = len(sequence.token_ids)
        token_ids, finish_reason = verified.token_ids, generation_pb2.FINISH_REASON_UNSPECIFIED
        length = position + len(token_ids)
        if length >= sequence.length_limit or not sequence.last_token_ids.isdisjoint(token_ids):
            token_ids, finish_reason = sequence.cut(token_ids)
        sequence.num_computed += part.num_new + verified.num_accepted
        sequence.token_ids += token_ids
        if sequence.history is not None:
            sequence.history.append(token_ids)
        sequence.num_committed_here += len(token_ids)
        if finish_reason:
            self._remove(sequence)
        else:
            if sequence.speculation.drafter is not None:
                self._tell_drafter(sequence, token_ids, now)
            self._target.blocks.shrink(sequence.block_ids, length)
        # Taken now: the next proposal may come before this step is reported.
        draft_wait, proposal_bytes = sequence.speculation.take_measured()
        return Committed(step, part, verified, position, token_ids, finish_reason, draft_wait, proposal_bytes)

    def _tell_drafter(self, sequence: TargetSequence, token_ids: list[int], now: float) -> None:
        speculation = sequence.speculation
        assert speculation.drafter is not None
        speculation.commit(token_ids, now, has_room=len(sequence.token_ids) + 1 < sequence.length_limit)
        if not speculation.drafts.token_ids and self._links.is_outgrown_by(sequence):
            self._fall_back(sequence, common_pb2.FALLBACK_REASON_DRAFTER_MAX_LENGTH)
            return
        self._links.tell(self._output.link(speculation.drafter), sequence, token_ids)

    def _fall_back(self, sequence: TargetSequence, reason: common_pb2.FallbackReason) -> None:
        """The one way from a drafter to none; the gateway is told, and the drafter, which may still draft for it."""
        self._leave_drafter(sequence)
        sequence.fall_back(reason)

    def _leave_drafter(self, sequence: TargetSequence) -> None:
        is_known = self._by_link_id.pop(sequence.link_sequence_id, None) is not None
        drafter = sequence.speculation.drafter
        if is_known and drafter is not None and self._links.is_up(drafter):
            self._output.link(drafter).closes.add(sequence_id=sequence.link_sequence_id)

    def _fail(
        self, sequence: TargetSequence, code: grpc.StatusCode, message: str, *, retry_delay_seconds: float = 0.0
    ) -> None:
        error = verifier_pb2.SequenceError(
            code=code_number(code), message=message, retry_delay_seconds=retry_delay_seconds
        )
        self._end_with(error, sequence.session_id, sequence.sequence_id)

    def _end_with(self, error: verifier_pb2.SequenceError, session_id: int, sequence_id: int) -> None:
        self._output.session(session_id).updates.add(sequence_id=sequence_id, ended=verifier_pb2.Ended(error=error))
        if self._metrics is not None:
            self._metrics.ended("error")
        if found := self._sequences.get((session_id, sequence_id)):
            self._reporter.end_trace(found, self._output)
            self._remove(found)

    def _close(self, sequence: TargetSequence) -> None:
        if self._metrics is not None:
            self._metrics.ended("closed")
        self._remove(sequence)

    def _remove(self, sequence: TargetSequence) -> None:
        sequence.is_over = True
        del self._sequences[sequence.session_id, sequence.sequence_id]
        self._leave_drafter(sequence)
        self._scheduler.remove(sequence)

    def _flush(self, emit: Callable[[StepOutput], None]) -> None:
        if self._output:
            for frame in self._output.session_frames.values():
                frame.load.CopyFrom(self.load_report())
            emit(self._output)
            self._output = StepOutput()
