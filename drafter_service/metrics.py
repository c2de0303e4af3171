"""What a drafter measures. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from drafter_service.drafter import Drafts
from outrider.protocol.expansions import ROOT
from outrider.service.instruments import POWERS_OF_TWO, SECONDS
from outrider.service.metrics import ServiceMetrics
from outrider.v1 import drafter_pb2

REFUSALS = tuple(
    name.removeprefix("REFUSAL_REASON_").lower()
    for name, number in drafter_pb2.RefusalReason.items()
    if number != drafter_pb2.REFUSAL_REASON_UNSPECIFIED
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
        self.expansions = make.counter(
            "outrider.drafter.expansions", "{expansion}", "Tokens whose continuation was computed, of all draft trees"
        )
        self.roots = make.counter(
            "outrider.drafter.roots",
            "{expansion}",
            "Expansions of a last committed token: the tree began anew, as the target's token was no child or in turns",
        )
        self.children = make.counter(
            "outrider.drafter.children", "{token}", "Tokens that may come next, first children and other outcomes"
        )
        self.refusals = make.counter(
            "outrider.drafter.refusals",
            "{refusal}",
            "Answers that there is nothing to draft, by reason",
            {"reason": REFUSALS},
        )
        self.step_duration = make.histogram(
            "outrider.drafter.step.duration",
            "s",
            "Time that one pass of drafting took, for all sequences in it",
            buckets=SECONDS,
        )
        self.batch_sequences = make.histogram(
            "outrider.drafter.batch.sequences",
            "{sequence}",
            "Sequences that one pass expanded or computed a prompt of",
            buckets=POWERS_OF_TWO[:11],
        )
        self.kv_blocks = make.gauge(
            "outrider.drafter.kv.blocks", "{block}", "Blocks of the KV cache by state", {"state": ("used", "free")}
        )
        self.gpu_memory = make.gauge(
            "outrider.drafter.gpu.memory", "By", "Memory of the GPU, whoever holds it", {"state": ("used", "free")}
        )

    def drafted(self, drafts: Drafts, *, seconds: float) -> None:
        """A pass brought these drafts."""
        self.step_duration.record(max(seconds, 0.0))
        num_sequences = len(drafts.computing)
        for expanded in drafts.expanded:
            num_sequences += len(expanded.sequences)
            self.expansions.add(len(expanded.parents))
            self.roots.add(int(np.count_nonzero(expanded.parents == ROOT)))
            self.children.add(expanded.child_ids.size)
        self.batch_sequences.record(num_sequences)

    def refused(self, refusals: Iterable[drafter_pb2.Refusal]) -> None:
        """There is nothing for these sequences."""
        for refusal in refusals:
            name = drafter_pb2.RefusalReason.Name(refusal.reason)
            self.refusals.add(1, name.removeprefix("REFUSAL_REASON_").lower())
