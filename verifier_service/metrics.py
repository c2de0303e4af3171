"""What a verifier measures. Imports no torch."""

from __future__ import annotations

from engine.step import PassKind
from kernels.limits import MAX_DRAFT_TOKENS
from outrider.service.instruments import POWERS_OF_TWO, SECONDS
from outrider.service.metrics import ServiceMetrics
from outrider.v1 import common_pb2

ORIGINS = ("accepted", "recovered", "bonus", "plain")
# Why a sequence ended here; `closed` is the gateway's doing: a stop string, or a client that left.
ENDS = ("eos", "stop_token", "length", "closed", "error")
STAGES = ("schedule", "verify", "commit", "report")
POSITIONS = tuple(str(position) for position in range(MAX_DRAFT_TOKENS))
FALLBACKS = tuple(
    name.removeprefix("FALLBACK_REASON_").lower()
    for name, number in common_pb2.FallbackReason.items()
    if number != common_pb2.FALLBACK_REASON_UNSPECIFIED
)
DRAFTER_STATES = ("ready", "connecting", "incompatible", "draining")
LENGTHS = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 12.0, 16.0, 24.0, 33.0)


class VerifierMetrics(ServiceMetrics):
    """The verifier's instruments."""

    service = "verifier"
    peers = ("gateway", "drafter")

    def __init__(self) -> None:
        super().__init__()
        make = self.instruments
        self.sequences_running = make.gauge(
            "outrider.verifier.sequences.running", "{sequence}", "Sequences that take part in steps"
        )
        self.sequences_waiting = make.gauge(
            "outrider.verifier.sequences.waiting", "{sequence}", "Sequences that wait for a place or for KV blocks"
        )
        self.sequences_limit = make.gauge(
            "outrider.verifier.sequences.limit", "{sequence}", "Most sequences that may run at once"
        )
        self.sequences_ended = make.counter(
            "outrider.verifier.sequences.ended", "{sequence}", "Sequences that ended, by reason", {"reason": ENDS}
        )
        self.queue_duration = make.histogram(
            "outrider.verifier.queue.duration",
            "s",
            "From the arrival of a sequence until its first step is scheduled",
            buckets=SECONDS,
        )
        self.prefill_duration = make.histogram(
            "outrider.verifier.prefill.duration",
            "s",
            "From the scheduling of a sequence's first step until its first token",
            buckets=SECONDS,
        )
        self.prefill_tokens = make.counter(
            "outrider.verifier.prefill.tokens",
            "{token}",
            "Tokens of prompts, and of preempted sequences, that were computed",
        )
        self.passes = make.counter(
            "outrider.verifier.passes",
            "{pass}",
            "Passes of the target model: graph, prompt (chunks of prompts, and what decodes along with them), or eager "
            "(something that decodes and that no CUDA graph holds)",
            {"kind": tuple(kind.value for kind in PassKind)},
        )
        self.tokens = make.counter(
            "outrider.verifier.tokens", "{token}", "Tokens committed, by origin", {"origin": ORIGINS}
        )
        self.draft_tokens = make.counter(
            "outrider.verifier.draft.tokens", "{token}", "Draft tokens that a step verified", {"drafter": ()}
        )
        self.accepted_tokens = make.counter(
            "outrider.verifier.draft.accepted",
            "{token}",
            "Draft tokens that were accepted and committed",
            {"drafter": ()},
        )
        self.drafted_per_position = make.counter(
            "outrider.verifier.draft.tokens_per_position",
            "{token}",
            "Draft tokens verified at each place of a proposal, 0 first",
            {"position": POSITIONS},
        )
        self.accepted_per_position = make.counter(
            "outrider.verifier.draft.accepted_per_position",
            "{token}",
            "Draft tokens accepted at each place of a proposal, 0 first",
            {"position": POSITIONS},
        )
        self.acceptance_length = make.histogram(
            "outrider.verifier.acceptance.length",
            "{token}",
            "Tokens that a step committed to a sequence whose draft tokens it verified",
            buckets=LENGTHS,
        )
        self.draft_wait = make.histogram(
            "outrider.verifier.draft.wait",
            "s",
            "How long a sequence waited for its proposal, having all else for its next step",
            buckets=SECONDS,
        )
        self.round_trip = make.histogram(
            "outrider.verifier.drafter.round_trip",
            "s",
            "From a verdict to the proposal that answers it, drafting included; the longest of each frame",
            {"drafter": ()},
            buckets=SECONDS,
        )
        self.stale_tokens = make.counter(
            "outrider.verifier.draft.stale",
            "{token}",
            "Draft tokens that arrived when their place was taken or their epoch over",
        )
        self.late_proposals = make.counter(
            "outrider.verifier.draft.late", "{proposal}", "Proposals that a sequence gave up waiting for"
        )
        self.fallbacks = make.counter(
            "outrider.verifier.fallbacks",
            "{sequence}",
            "Sequences that went on without a drafter, by reason",
            {"reason": FALLBACKS},
        )
        self.drafters = make.gauge(
            "outrider.verifier.drafters", "{drafter}", "Links to drafters by state", {"state": DRAFTER_STATES}
        )
        self.step_duration = make.histogram(
            "outrider.verifier.step.duration",
            "s",
            "Time that a step spent in each stage; verify is the forward pass and the sampling",
            {"stage": STAGES},
            buckets=SECONDS,
        )
        self.batch_sequences = make.histogram(
            "outrider.verifier.batch.sequences", "{sequence}", "Sequences in a step", buckets=POWERS_OF_TWO[:11]
        )
        self.batch_tokens = make.histogram(
            "outrider.verifier.batch.tokens", "{token}", "Tokens that a step computed", buckets=POWERS_OF_TWO
        )
        self.kv_blocks = make.gauge(
            "outrider.verifier.kv.blocks", "{block}", "Blocks of the KV cache by state", {"state": ("used", "free")}
        )
        self.preemptions = make.counter(
            "outrider.verifier.preemptions", "{sequence}", "Sequences that lost their KV blocks to older ones"
        )
        self.gpu_memory = make.gauge(
            "outrider.verifier.gpu.memory", "By", "Memory of the GPU, whoever holds it", {"state": ("used", "free")}
        )

    def forget_drafter(self, address: str) -> None:
        """Drop the series of a drafter that nobody names any more: others come in its place, for as long as we run."""
        for instrument in (self.draft_tokens, self.accepted_tokens, self.round_trip):
            instrument.forget(address)
