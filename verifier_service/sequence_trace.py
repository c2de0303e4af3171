"""What the engine's thread notes for the trace of one sequence: every moment of its time here has a place.

    queue → prefill → (wait for the draft → wait for a turn → verify_step)… , with `preempted` and `recompute` between

Only sequences of sampled traces have one of these; all others pay for the question alone.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from outrider.service.step_spans import EventRecord, SpanRecord, StepSpans

if TYPE_CHECKING:
    from verifier_service.step import Scheduled, Step


class SequenceTrace:
    """Gathers records until the engine takes them with `drain`."""

    def __init__(self, step_spans: int) -> None:
        self._steps = StepSpans("verify_step", "verify_steps", step_spans)
        self._records: list[SpanRecord | EventRecord] = []
        # When the sequence had all that it needs for its next step.
        self._ready_ns = 0
        self._draft_seconds = 0.0
        self._num_chunks = 0
        self._computing_ns = 0
        self._num_other_prefill_tokens = 0
        self._preempted_ns = 0
        self._resumed_ns = 0

    def drain(self) -> list[SpanRecord | EventRecord]:
        """What has been noted since the last call."""
        records, self._records = self._records, []
        return records

    def end(self) -> None:
        """The sequence is over: note what is still folded."""
        if record := self._steps.flush():
            self._records.append(record)

    def queued(self, arrived_ns: int, scheduled_ns: int, num_running: int) -> None:
        """It got its place, among `num_running` sequences."""
        self._records.append(SpanRecord("queue", arrived_ns, scheduled_ns, {"outrider.num_running": num_running}))

    def drafted(self, draft_seconds: float) -> None:
        """The drafter has answered, after working on it for so long."""
        self._draft_seconds += draft_seconds
        self._ready_ns = time.time_ns()

    def draft_is_late(self, waited_seconds: float, position: int) -> None:
        """The wait for drafts was given up; steps go on without."""
        self._ready_ns = time.time_ns()
        attributes = {"outrider.position": position, "outrider.draft_wait_seconds": waited_seconds}
        self._records.append(EventRecord("outrider.draft_late", self._ready_ns, attributes))

    def preempted(self, num_computed: int, position: int) -> None:
        """Its KV blocks were given to an older sequence: what was computed is lost."""
        self._preempted_ns = time.time_ns()
        attributes = {"outrider.position": position, "outrider.num_lost_tokens": num_computed}
        self._records.append(EventRecord("outrider.preempted", self._preempted_ns, attributes))

    def resumed(self) -> None:
        """It has KV blocks again."""
        self._resumed_ns = time.time_ns()
        self._records.append(SpanRecord("preempted", self._preempted_ns, self._resumed_ns))

    def computed_chunk(self, step: Step, part: Scheduled) -> None:
        """A step computed a part of the prompt that does not reach its end."""
        self._num_chunks += 1
        self._computing_ns += step.end_ns - step.start_ns
        self._num_other_prefill_tokens += step.num_prefill_tokens - part.num_new

    def prefilled(self, step: Step, part: Scheduled, scheduled_ns: int, num_prompt_tokens: int) -> None:
        """The step reached the end of the prompt and sampled the first token."""
        self.computed_chunk(step, part)
        attributes = {
            "outrider.num_prompt_tokens": num_prompt_tokens,
            "outrider.num_chunks": self._num_chunks,
            # The rest of the span's time went to steps of others.
            "outrider.busy_seconds": self._computing_ns * 1e-9,
            "outrider.num_other_prefill_tokens": self._num_other_prefill_tokens,
            "outrider.batch_size": len(step.batch),
        }
        self._records.append(SpanRecord("prefill", scheduled_ns, step.end_ns, attributes))
        self._resumed_ns = 0
        self._next_step(step)

    def verified(
        self,
        step: Step,
        part: Scheduled,
        *,
        position: int,
        num_accepted: int,
        draft_wait_seconds: float,
        draft_bytes: int,
    ) -> None:
        """The step committed tokens, `num_accepted` of them drafted."""
        if self._resumed_ns:
            attributes = {"outrider.num_chunks": self._num_chunks, "outrider.position": position}
            self._records.append(SpanRecord("recompute", self._resumed_ns, step.start_ns, attributes))
            self._ready_ns, self._resumed_ns = step.start_ns, 0
        num_prefill = _prefill_tokens(step) - (part.num_new if part.num_new > 1 else 0)
        sums: dict[str, int | float] = {
            "outrider.num_draft_tokens": part.num_drafts,
            "outrider.num_accepted_tokens": num_accepted,
            "outrider.draft_wait_seconds": draft_wait_seconds,
            "outrider.turn_wait_seconds": max(step.start_ns - self._ready_ns, 0) * 1e-9,
            "outrider.draft_bytes": draft_bytes,
            "outrider.num_other_prefill_tokens": num_prefill,
        }
        if draft_wait_seconds:
            # A drafter that began before the verdict was out has nothing of its work in the wait. By durations and not
            # by the times of spans: the clocks of two machines differ by more than a hop takes.
            drafting = min(self._draft_seconds, draft_wait_seconds)
            sums["outrider.draft_seconds"] = drafting
            sums["outrider.wire_seconds"] = draft_wait_seconds - drafting
        alone: dict[str, int | float] = {
            "outrider.batch_size": len(step.batch),
            "outrider.chain_length": part.chain_length,
        }
        if num_accepted < part.num_drafts:
            alone["outrider.rejected_position"] = position + num_accepted
        record = self._steps.add(step.start_ns, step.end_ns, position=position, sums=sums, alone=alone)
        if record is not None:
            self._records.append(record)
        self._next_step(step)

    def _next_step(self, step: Step) -> None:
        self._ready_ns = step.end_ns
        self._draft_seconds = 0.0
        self._num_chunks = self._computing_ns = self._num_other_prefill_tokens = 0


def _prefill_tokens(step: Step) -> int:
    """Tokens of prompts that a sequence's step waited for: in its own pass and in the one ahead of it."""
    return step.num_prefill_tokens + step.num_prefill_tokens_ahead
