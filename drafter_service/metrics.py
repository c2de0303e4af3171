"""What a drafter measures. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from outrider.service.instruments import POWERS_OF_TWO, SECONDS
from outrider.service.metrics import ServiceMetrics
from outrider.v1 import drafter_pb2

REFUSALS = tuple(
    name.removeprefix("NO_PROPOSAL_REASON_").lower()
    for name, number in drafter_pb2.NoProposalReason.items()
    if number != drafter_pb2.NO_PROPOSAL_REASON_UNSPECIFIED
)


class DrafterMetrics(ServiceMetrics):
    """The drafter's instruments."""

    service = "drafter"
    peers = ("verifier",)

    def __init__(self) -> None:
        super().__init__()
        make = self.instruments
        self.verifiers = make.gauge(
            "outrider.drafter.verifiers", "{verifier}", "Verifiers that have a stream open to this drafter"
        )
        self.sequences_open = make.gauge(
            "outrider.drafter.sequences.open", "{sequence}", "Sequences that verifiers have open here"
        )
        self.sequences_limit = make.gauge(
            "outrider.drafter.sequences.limit", "{sequence}", "Most sequences that may be open at once"
        )
        self.draft_tokens = make.counter("outrider.drafter.draft.tokens", "{token}", "Draft tokens proposed")
        self.proposals = make.counter("outrider.drafter.proposals", "{proposal}", "Proposals made")
        self.refusals = make.counter(
            "outrider.drafter.refusals",
            "{proposal}",
            "Answers without a proposal, by reason",
            {"reason": REFUSALS},
        )
        self.rejections = make.counter(
            "outrider.drafter.rejections", "{proposal}", "Proposals that the target did not accept to their end"
        )
        self.step_duration = make.histogram(
            "outrider.drafter.step.duration",
            "s",
            "Time that one round of drafting took, for all sequences in it",
            buckets=SECONDS,
        )
        self.batch_sequences = make.histogram(
            "outrider.drafter.batch.sequences",
            "{sequence}",
            "Sequences that one round drafted for",
            buckets=POWERS_OF_TWO[:11],
        )
        self.kv_blocks = make.gauge(
            "outrider.drafter.kv.blocks", "{block}", "Blocks of the KV cache by state", {"state": ("used", "free")}
        )
        self.gpu_memory = make.gauge(
            "outrider.drafter.gpu.memory", "By", "Memory of the GPU, whoever holds it", {"state": ("used", "free")}
        )

    def drafted(self, drafts: Sequence[int], *, num_sequences: int, seconds: float) -> None:
        """A round for so many sequences brought drafts of these lengths."""
        self.step_duration.record(max(seconds, 0.0))
        self.batch_sequences.record(num_sequences)
        self.proposals.add(len(drafts))
        self.draft_tokens.add(sum(drafts))

    def refused(self, refusals: Iterable[drafter_pb2.NoProposal]) -> None:
        """Answers without a proposal."""
        for refusal in refusals:
            name = drafter_pb2.NoProposalReason.Name(refusal.reason)
            self.refusals.add(1, name.removeprefix("NO_PROPOSAL_REASON_").lower())
