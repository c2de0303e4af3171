"""The verifier's engine: schedule, submit, collect, commit. Runs on the thread that owns the target model."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import grpc

from outrider.protocol.errors import code_number
from outrider.v1 import verifier_pb2
from verifier_service.committing import commit
from verifier_service.drafting import DraftingLinks
from verifier_service.drafting_protocol import DraftingProtocol
from verifier_service.events import (
    Event,
    ExpansionsArrived,
    LinkDown,
    LinkRetired,
    LinkUp,
    OpeningRefused,
    Outbox,
    SequenceOpened,
    SequencesClosed,
    SessionClosed,
    StepOutput,
)
from verifier_service.gathering import Gathering
from verifier_service.reporting import Ran, Reporter
from verifier_service.row_budget import RowBudget
from verifier_service.scheduler import Scheduler
from verifier_service.sequence import TargetSequence
from verifier_service.sequence_table import SequenceTable
from verifier_service.step import Committed, Scheduled
from verifier_service.step_metrics import StepMetrics
from verifier_service.steps_in_flight import Collected, StepsInFlight
from verifier_service.target import Target

logger = logging.getLogger(__name__)

# A device that fails this often in a row is taken for dead: the process ends, to be started anew.
MAX_FAILURES_IN_A_ROW = 3

Emit = Callable[[StepOutput], None]


class VerifierEngine:
    """Every method runs on the engine's thread, but for `load_report` and `is_busy`."""

    def __init__(
        self,
        target: Target,
        *,
        max_running: int,
        max_waiting: int,
        split_from: int,
        draft_timeout: float | None,
        is_polling: bool = False,
        metrics: StepMetrics | None = None,
    ) -> None:
        self._target = target
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._split_from = split_from
        self._gathering = Gathering()
        self._links = DraftingLinks(draft_timeout, self._gathering)
        self._sequences = SequenceTable()
        self._outbox = Outbox()
        # None where nobody reads them.
        self._metrics = metrics
        self._drafting = DraftingProtocol(self._links, self._sequences, self._outbox, metrics)
        self._reporter = Reporter(metrics)
        self._num_failures = 0
        self._is_stepping = False
        # Whether the thread may look for news while a step is in flight; else it sleeps until the step has come back.
        self._is_polling = is_polling
        self._has_news = False

    def load(self) -> None:
        """Load the target model and warm it up."""
        self._target.load()
        executor = self._target.executor
        self._steps = StepsInFlight(executor)
        # Where the thread itself computes, there is nothing to tell later beside.
        self._has_overlap = executor.max_in_flight > 1
        self._scheduler = Scheduler(
            self._target.blocks,
            executor,
            max_running=self._max_running,
            max_num_batched_tokens=self._target.max_num_batched_tokens,
            split_from=self._split_from,
            gathering=self._gathering if self._has_overlap else None,
            row_budget=RowBudget(self._target.costs) if self._target.costs is not None else None,
        )
        if self._metrics is not None:
            self._metrics.follow(self._scheduler, self._links, self._max_running)

    def handle(self, event: Event) -> None:
        """Take in what has happened outside."""
        self._has_news = True
        if not isinstance(event, ExpansionsArrived):
            # What was committed before is told before what follows from the event.
            self._reporter.report(self._outbox.output)
        match event:
            case SequenceOpened(sequence):
                self._open(sequence)
            case OpeningRefused(session_id, sequence_id, error):
                self._end_with(error, session_id, sequence_id)
            case SequencesClosed(session_id, sequence_ids):
                for sequence_id in sequence_ids:
                    if found := self._sequences.find(session_id, sequence_id):
                        self._reporter.end_trace(found, self._outbox.output, is_closed=True)
                        self._close(found)
            case SessionClosed(session_id):
                for sequence in self._sequences.of_session(session_id):
                    self._close(sequence)
            case LinkUp(key, max_length):
                self._links.add(key, max_length)
            case LinkDown(key):
                self._drafting.lose(key)
            case LinkRetired(key, is_retired):
                self._links.retire(key, is_retired=is_retired)
            case ExpansionsArrived():
                self._drafting.take(event)

    def step(self, emit: Emit) -> float | None:
        """One step over everything that is ready; how long to sleep when nothing is."""
        self._is_stepping = True
        try:
            return self._step(emit)
        finally:
            self._is_stepping = False

    def _step(self, emit: Emit) -> float | None:
        if self._steps and not self._has_news and not self._steps.is_next_done and self._is_worth_polling:
            time.sleep(0)  # lets the event loop have the interpreter
            return 0.0
        self._has_news = False
        self._drafting.look_at_the_clock(self._scheduler.running)
        if not self._has_overlap:
            self._tell(emit)
        has_begun = False
        while not self._is_full and self._begin_step(emit):
            has_begun = True
        # While the device works on the new step, the gateways are told of the one before.
        self._tell(emit)
        # What has come back is to be told, and makes room for others: also where it failed.
        has_ended = bool(self._steps) and (self._steps.is_next_done or not self._is_worth_polling)
        if has_ended:
            self._finish(self._steps.collect(), emit)
        return 0.0 if self._steps or has_begun or has_ended else self._time_until_something()

    def _begin_step(self, emit: Emit) -> bool:
        """Begin the next step; False when there is nothing to do."""
        began_ns = time.time_ns()
        batch, admitted = self._scheduler.schedule()
        for sequence in admitted:
            self._admit(sequence)
        # Openings leave before the forward pass, so that drafter and target compute a prompt at the same time.
        self._flush(emit)
        if batch:
            self._gathering.began(part.sequence for part in batch if part.is_sampled)
            self._steps.submit(batch, schedule_seconds=(time.time_ns() - began_ns) * 1e-9)
        return bool(batch)

    def _finish(self, collected: Collected, emit: Emit) -> None:
        """Commit what a pass found, or end its sequences when it failed. Raises when the device seems dead."""
        step = collected.step
        self._has_news = True
        if collected.error is not None:
            self._fail_all(step.batch, collected.error)
            return
        self._num_failures = 0
        self._links.stepped((step.end_ns - step.start_ns) * 1e-9)
        now = time.monotonic()
        all_committed: list[Committed] = []
        for part, sampled in zip(step.batch, collected.sampled, strict=True):
            sequence = part.sequence
            if sequence.is_over:
                continue  # closed while the step was in flight
            if sampled is not None:
                all_committed.append(committed := commit(part, sampled))
                if committed.finish_reason:
                    self._remove(sequence)
                else:
                    self._drafting.tell(sequence, committed.token_ids, now)
            elif sequence.trace is not None:
                sequence.trace.computed_chunk(step, part)
        # Verdicts leave first: while the drafters work on them, the gateways' frames are made.
        self._flush(emit)
        self._reporter.add(Ran(step, all_committed, told_ns=time.time_ns()))

    @property
    def _is_full(self) -> bool:
        """Whether a step has to come back before the next can begin."""
        return self._steps.is_full or (bool(self._steps) and self._scheduler.is_short)

    @property
    def _is_worth_polling(self) -> bool:
        """Whether something may come up, before a step is back, that could begin at once, or is better taken in now."""
        scheduler = self._scheduler
        has_others = len(scheduler.running) > self._steps.num_sequences or bool(scheduler.queue) or scheduler.has_ahead
        return self._is_polling and has_others and not self._is_full

    def _time_until_something(self) -> float | None:
        """Seconds until a wait for drafts is over; None when nothing waits."""
        times = [self._links.time_until_late(self._scheduler.running), self._gathering.time_left()]
        return min((seconds for seconds in times if seconds is not None), default=None)

    @property
    def is_busy(self) -> bool:
        """Whether any sequence runs, is queued or has something left to be told; safe to ask from any thread."""
        # In this order: a sequence is taken out before its end is reported, which the same step does.
        return bool(len(self._sequences)) or bool(self._reporter) or bool(self._outbox.output) or self._is_stepping

    def load_report(self) -> verifier_pb2.VerifierLoad:
        """How busy the engine is; safe to call from any thread."""
        return verifier_pb2.VerifierLoad(
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.queue),
            num_kv_blocks=self._target.blocks.num_blocks,
            num_free_kv_blocks=self._target.blocks.num_free,
            max_running=self._max_running,
        )

    def _open(self, sequence: TargetSequence) -> None:
        if (known := self._sequences.find(sequence.session_id, sequence.sequence_id)) is not None:
            self._fail(known, grpc.StatusCode.INVALID_ARGUMENT, "sequence_id: is open already")
            return
        # Places that are free are taken at the next step: only what comes on top of them will have to wait.
        num_free_places = self._max_running - len(self._scheduler.running)
        is_full = len(self._scheduler.queue) >= self._max_waiting + num_free_places
        self._sequences.add(sequence)
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
            self._reporter.take_records(sequence, self._outbox.output)
        self._drafting.open(sequence)

    def _fail_all(self, batch: Sequence[Scheduled], error: Exception) -> None:
        self._num_failures += 1
        if self._num_failures >= MAX_FAILURES_IN_A_ROW:
            raise error
        logger.error("a step of %d sequences failed", len(batch), exc_info=error)
        self._reporter.report(self._outbox.output)
        for part in batch:
            if not part.sequence.is_over:
                message = f"the target model failed: {type(error).__name__}"
                self._fail(part.sequence, grpc.StatusCode.INTERNAL, message)

    def _fail(
        self, sequence: TargetSequence, code: grpc.StatusCode, message: str, *, retry_delay_seconds: float = 0.0
    ) -> None:
        error = verifier_pb2.SequenceError(
            code=code_number(code), message=message, retry_delay_seconds=retry_delay_seconds
        )
        self._end_with(error, sequence.session_id, sequence.sequence_id)

    def _end_with(self, error: verifier_pb2.SequenceError, session_id: int, sequence_id: int) -> None:
        frame = self._outbox.output.session(session_id)
        frame.updates.add(sequence_id=sequence_id, ended=verifier_pb2.Ended(error=error))
        if self._metrics is not None:
            self._metrics.ended("error")
        if found := self._sequences.find(session_id, sequence_id):
            self._reporter.end_trace(found, self._outbox.output)
            self._remove(found)

    def _close(self, sequence: TargetSequence) -> None:
        if self._metrics is not None:
            self._metrics.ended("closed")
        self._remove(sequence)

    def _remove(self, sequence: TargetSequence) -> None:
        sequence.is_over = True
        self._sequences.remove(sequence)
        self._drafting.leave(sequence)
        self._scheduler.remove(sequence)

    def _tell(self, emit: Emit) -> None:
        self._reporter.report(self._outbox.output)
        self._flush(emit)

    def _flush(self, emit: Emit) -> None:
        if self._outbox.output:
            for frame in self._outbox.output.session_frames.values():
                frame.load.CopyFrom(self.load_report())
            emit(self._outbox.take())
