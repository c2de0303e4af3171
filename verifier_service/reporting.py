"""Tells gateways, metrics and traces what steps have committed, while the device works on the next one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from engine.step import PositionLogprobs
from kernels.limits import MAX_DRAFT_TOKENS
from outrider.protocol.wire import pack_tokens
from outrider.v1 import common_pb2
from verifier_service.events import SequenceRecords, StepOutput
from verifier_service.sequence import TargetSequence
from verifier_service.step import Committed, Step
from verifier_service.step_metrics import StepMetrics

_ACCEPTED = bytes([common_pb2.TOKEN_ORIGIN_ACCEPTED] * MAX_DRAFT_TOKENS)
_LAST = {origin: bytes([origin]) for origin in common_pb2.TokenOrigin.values()}


@dataclass(frozen=True)
class Ran:
    """What a step did."""

    step: Step
    all_committed: Sequence[Committed]
    told_ns: int  # when the drafters' verdicts were sent, nanoseconds since the epoch


class Reporter:
    """Keeps what has been committed and not been told yet. Every method runs on the engine's thread."""

    def __init__(self, metrics: StepMetrics | None) -> None:
        # None where nobody reads them.
        self._metrics = metrics
        self._unreported: list[Ran] = []

    def __bool__(self) -> bool:
        """Whether something is still to be told; safe to ask from any thread."""
        return bool(self._unreported)

    def add(self, ran: Ran) -> None:
        """What `report` is to tell."""
        self._unreported.append(ran)

    def report(self, output: StepOutput) -> None:
        """Put into the gateways' frames, the metrics and the traces what has been committed since the last time."""
        unreported, self._unreported = self._unreported, []
        for ran in unreported:
            began_ns = time.time_ns()
            for committed in ran.all_committed:
                self._report_one(ran.step, committed, output)
            if self._metrics is not None:
                report_seconds = (time.time_ns() - began_ns) * 1e-9
                self._metrics.stepped(ran.step, ran.all_committed, told_ns=ran.told_ns, report_seconds=report_seconds)

    def _report_one(self, step: Step, committed: Committed, output: StepOutput) -> None:
        part, sampled, token_ids = committed.part, committed.sampled, committed.token_ids
        sequence = part.sequence
        update = output.session(sequence.session_id).updates.add(
            sequence_id=sequence.sequence_id,
            token_ids=pack_tokens(token_ids),
            origins=_origins(part.num_drafts, sampled.num_accepted)[: len(token_ids)],
            logprobs=_logprobs(token_ids, sampled.logprobs) if sampled.logprobs else (),
            num_draft_tokens=part.num_drafts,
            num_accepted_tokens=committed.num_accepted,
            # Fallbacks that this step brought about are reported with it.
            fallbacks=sequence.fallbacks,
        )
        if sequence.fallbacks:
            if self._metrics is not None:
                self._metrics.fell_back(sequence.fallbacks)
            sequence.fallbacks.clear()
        if committed.finish_reason:
            update.ended.finish_reason = committed.finish_reason
        is_first = not sequence.prefilled_ns
        if is_first:
            sequence.prefilled_ns = step.end_ns
            update.verification = sequence.verification.to_message()
            update.prefill.queue_seconds = (sequence.scheduled_ns - sequence.arrived_ns) * 1e-9
            update.prefill.prefill_seconds = (sequence.prefilled_ns - sequence.scheduled_ns) * 1e-9
            if self._metrics is not None:
                self._metrics.prefilled(
                    sequence.verification, update.prefill.queue_seconds, update.prefill.prefill_seconds
                )
        if sequence.trace is not None:
            self._trace_step(step, committed, output, is_first=is_first)

    def end_trace(self, sequence: TargetSequence, output: StepOutput, *, is_closed: bool = False) -> None:
        """Hand out the last of what was noted for the sequence's trace."""
        if sequence.trace is not None:
            sequence.trace.end()
            self.take_records(sequence, output, is_closed=is_closed)

    def take_records(self, sequence: TargetSequence, output: StepOutput, *, is_closed: bool = False) -> None:
        """Hand out what was noted for the sequence's trace; it must have one."""
        assert sequence.trace is not None
        records = sequence.trace.drain()
        if records or is_closed:
            output.records.append(
                SequenceRecords(sequence.session_id, sequence.sequence_id, records, is_closed=is_closed)
            )

    def _trace_step(self, step: Step, committed: Committed, output: StepOutput, *, is_first: bool) -> None:
        part, sequence = committed.part, committed.part.sequence
        assert sequence.trace is not None
        if is_first:
            sequence.trace.prefilled(step, part, sequence.scheduled_ns, sequence.num_prompt_tokens)
        else:
            sequence.trace.verified(
                step,
                part,
                position=committed.position,
                num_accepted=committed.num_accepted,
                draft_wait_seconds=committed.draft_wait,
                draft_bytes=committed.draft_bytes,
            )
        if committed.finish_reason:
            self.end_trace(sequence, output)
        else:
            self.take_records(sequence, output)


def _logprobs(token_ids: Sequence[int], logprobs: Sequence[PositionLogprobs]) -> list[common_pb2.PositionLogprobs]:
    return [
        common_pb2.PositionLogprobs(
            chosen=common_pb2.TokenLogprob(token_id=token_id, logprob=found.logprob),
            top=[
                common_pb2.TokenLogprob(token_id=top_id, logprob=top_logprob)
                for top_id, top_logprob in zip(found.top_token_ids, found.top_logprobs, strict=True)
            ],
        )
        for token_id, found in zip(token_ids, logprobs, strict=False)  # behind a sequence's end there are more
    ]


def _origins(num_drafts: int, num_accepted: int) -> bytes:
    """A TokenOrigin for each token that a step commits: the accepted draft tokens and the target's own."""
    if num_drafts == 0:
        last = common_pb2.TOKEN_ORIGIN_PLAIN
    elif num_accepted == num_drafts:
        last = common_pb2.TOKEN_ORIGIN_BONUS
    else:
        last = common_pb2.TOKEN_ORIGIN_RECOVERED
    return _ACCEPTED[:num_accepted] + _LAST[last]
