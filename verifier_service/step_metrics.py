"""Counts what the engine's thread does, once a step: a step of 64 sequences has less than half a millisecond for all of
the host's work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from outrider.protocol.words import word
from outrider.service.instruments import Labels
from outrider.v1 import common_pb2, generation_pb2
from verifier_service.drafting import DraftingLinks
from verifier_service.metrics import STAGES, VerifierMetrics
from verifier_service.scheduler import Scheduler
from verifier_service.step import Committed, Step


class StepMetrics:
    """Writes the instruments that belong to the engine's thread; every method runs there."""

    def __init__(self, metrics: VerifierMetrics) -> None:
        self._metrics = metrics
        self._stages = {stage: metrics.step_duration.series(stage) for stage in STAGES}
        self._lengths = metrics.acceptance_length.series()
        self._waits = metrics.draft_wait.series()
        self._chain_lengths = metrics.chain_length.series()
        self._batch_sequences = metrics.batch_sequences.series()
        self._batch_tokens = metrics.batch_tokens.series()
        num_positions = len(metrics.drafted_per_position.instrument.known_labels)
        # Steps of sequences by how many draft tokens they verified, and by how many of these were accepted.
        self._by_drafted = [0] * (num_positions + 1)
        self._by_accepted = [0] * (num_positions + 1)
        metrics.drafted_per_position.follow(lambda: _reaching(self._by_drafted))
        metrics.accepted_per_position.follow(lambda: _reaching(self._by_accepted))

    def follow(self, scheduler: Scheduler, links: DraftingLinks, max_running: int) -> None:
        """Read the state of the engine from now on, whenever somebody asks."""
        metrics, blocks = self._metrics, scheduler.blocks
        metrics.sequences_running.follow(lambda: {(): len(scheduler.running)})
        metrics.sequences_waiting.follow(lambda: {(): len(scheduler.queue)})
        metrics.sequences_limit.follow(lambda: {(): max_running})
        metrics.late_drafts.follow(lambda: {(): links.num_late})
        trees = links.trees
        metrics.expansions.follow(lambda: {("received",): trees.num_expansions, ("walked",): trees.num_walked})
        metrics.outcomes.follow(lambda: {(outcome.value,): number for outcome, number in trees.outcomes.items()})
        metrics.preemptions.follow(lambda: {(): scheduler.num_preemptions})

        def kv_blocks() -> Mapping[Labels, float]:
            num_free = blocks.num_free
            return {("used",): blocks.num_blocks - num_free, ("free",): num_free}

        metrics.kv_blocks.follow(kv_blocks)

    def stepped(self, step: Step, all_committed: Sequence[Committed], *, told_ns: int, report_seconds: float) -> None:
        """A step is over: the drafters had their verdicts at `told_ns`, and the gateways were told within so long."""
        self._stages["schedule"].add(step.schedule_seconds)
        self._stages["verify"].add(_seconds(step.start_ns, step.end_ns))
        self._stages["commit"].add(_seconds(step.end_ns, told_ns))
        self._stages["report"].add(report_seconds)
        self._metrics.passes.add(1, step.kind.value)
        self._batch_sequences.add(len(step.batch))
        self._batch_tokens.add(sum([part.num_new + part.num_drafts for part in step.batch]))
        if step.num_prefill_tokens:
            self._metrics.prefill_tokens.add(step.num_prefill_tokens)
        # Most sequences fare alike: what they have in common is counted together.
        alike: dict[tuple[str, str, int, int, int], int] = {}
        waits = []
        chain_lengths = []
        for committed in all_committed:
            part, num_tokens, num_accepted = committed.part, len(committed.token_ids), committed.sampled.num_accepted
            if num_accepted > num_tokens:
                num_accepted = num_tokens
            sequence = part.sequence
            key = (sequence.speculation.address, sequence.verification, part.num_drafts, num_accepted, num_tokens)
            alike[key] = alike.get(key, 0) + 1
            if part.sequence.speculation.drafter is not None:
                chain_lengths.append(part.chain_length)
            if committed.draft_wait:
                waits.append(committed.draft_wait)
            if committed.finish_reason:
                self.ended(word(generation_pb2.FinishReason, committed.finish_reason).lower())
        self._waits.add_all(waits)
        self._chain_lengths.add_all(chain_lengths)
        for (drafter, verification, num_drafts, num_accepted, num_tokens), times in alike.items():
            self._count(drafter, verification, num_drafts, num_accepted, num_tokens, times)

    def prefilled(self, verification: str, queue_seconds: float, prefill_seconds: float) -> None:
        """A sequence, whose draft tokens are verified so, has its first token."""
        self._metrics.sequences_started.add(1, verification)
        self._metrics.queue_duration.record(queue_seconds)
        self._metrics.prefill_duration.record(prefill_seconds)

    def drafted(self, drafter: str, round_trip: float) -> None:
        """A drafter's frame has come, the answer awaited longest after `round_trip` seconds; 0: none was awaited."""
        if round_trip:
            self._metrics.round_trip.record(round_trip, drafter)

    def fell_back(self, fallbacks: Iterable[common_pb2.Fallback]) -> None:
        """Sequences went on without a drafter."""
        for fallback in fallbacks:
            self._metrics.fallbacks.add(1, word(common_pb2.FallbackReason, fallback.reason).lower())

    def ended(self, reason: str, num_sequences: int = 1) -> None:
        """Sequences ended, for a reason as the instrument calls it."""
        self._metrics.sequences_ended.add(num_sequences, reason)

    def _count(
        self, drafter: str, verification: str, num_drafts: int, num_accepted: int, num_tokens: int, times: int
    ) -> None:
        tokens = self._metrics.tokens
        if num_drafts:
            self._by_drafted[num_drafts] += times
            self._by_accepted[num_accepted] += times
            self._lengths.add(num_tokens, times)
            self._metrics.draft_tokens.add(num_drafts * times, drafter, verification)
            self._metrics.accepted_tokens.add(num_accepted * times, drafter, verification)
            tokens.add(num_accepted * times, "accepted")
        # Without the target's own token where the sequence ended at an accepted one.
        if num_tokens > num_accepted:
            own = "plain" if not num_drafts else "bonus" if num_accepted == num_drafts else "recovered"
            tokens.add(times, own)


def _seconds(start_ns: int, end_ns: int) -> float:
    # Of a clock that may be set back.
    return max(end_ns - start_ns, 0) * 1e-9


def _reaching(by_count: Sequence[int]) -> dict[Labels, float]:
    """How often each position was reached, from how often each count was."""
    reached = list(accumulate(reversed(by_count)))[::-1]
    return {(str(position),): num for position, num in enumerate(reached[1:])}
