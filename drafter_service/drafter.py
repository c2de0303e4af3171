"""The interface of everything that can draft, and what it hands back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from drafter_service.sequence import DraftSequence
from outrider.protocol.fingerprint import TokenizerDigest
from outrider.protocol.handshake import DraftLimits
from outrider.v1 import drafter_pb2

if TYPE_CHECKING:
    import torch


@dataclass(slots=True, eq=False)
class Expanded:
    """What a pass made: arrays over its sequences, S, and over their new expansions, N, with F children each.

    What they mean, and the rules for them, is in `drafter.proto`. The expansions of a sequence stand together, in the
    order of the sequences, and have consecutive ids. Where a sequence's stream takes fewer children or candidates than
    there are, the others are cut: nothing may have been expanded of such a child, and such a candidate has no weight.
    """

    sequences: Sequence[DraftSequence]  # S, those with at least one expansion in the pass
    num_committed: npt.NDArray[np.int64]  # [S], committed tokens that the pass knew of
    num_expansions: npt.NDArray[np.int64]  # [S]
    first_ids: npt.NDArray[np.int64]  # [S]
    parents: npt.NDArray[np.int32]  # [N], ids, -1 for a root
    ranks: npt.NDArray[np.uint8]  # [N]
    child_ids: npt.NDArray[np.int32]  # [N, F], the first child first
    probabilities: npt.NDArray[np.uint16]  # [N, F], in units of 1/65,536
    # Both [N, m], in units of 1/65,536: q, which the first children were really sampled from, for sequences that want
    # it. None where each was certain (q is one-hot). In 16 bits, a weight of 65,536 is 0, as on the wire.
    candidate_ids: npt.NDArray[np.int32] | None = None
    candidate_weights: npt.NDArray[np.uint16] | None = None


@dataclass(frozen=True)
class NoDraft:
    """Nothing for a sequence; every reason but NO_MATCH is final for it, and releases it."""

    sequence: DraftSequence
    reason: drafter_pb2.RefusalReason
    detail: str = ""


@dataclass(slots=True)
class Drafts:
    """What came back from the drafter."""

    # At most one without candidates and one with them; a sequence is in one of them at most.
    expanded: Sequence[Expanded] = ()
    refusals: Sequence[NoDraft] = ()
    # Sequences whose prompts, or much else that is missing, are being computed: their verifiers are told that the
    # drafter is alive.
    computing: Sequence[DraftSequence] = ()


class Drafter(Protocol):
    """Grows the trees of all sequences. Every method is called on the thread that owns the model, if there is one."""

    kind: str
    # 0 where the drafter has no vocabulary or no limit of its own.
    vocabulary_size: int
    max_length: int
    tokenizer: TokenizerDigest
    name: str
    revision: str

    @property
    def limits(self) -> DraftLimits:
        """How much it drafts at most and how, once loaded. A verifier may take less: each sequence says what."""

    @property
    def device(self) -> torch.device | None:
        """Where the model is, once loaded; None without a model."""

    @property
    def num_kv_blocks(self) -> int:
        """KV-cache blocks in all, 0 without a model."""

    @property
    def num_free_kv_blocks(self) -> int:
        """KV-cache blocks that hold nothing."""

    @property
    def has_work(self) -> bool:
        """Whether `draft` has something to do, or to hand back; else it rests until the next event."""

    def load(self) -> None:
        """Load and warm up; called once, before anything else."""

    def open(self, sequence: DraftSequence) -> None:
        """A sequence is to be drafted for: its committed tokens are computed by later calls of `draft`, in chunks."""

    def commit(self, sequence: DraftSequence, token_ids: Sequence[int]) -> None:
        """A verdict has come: `sequence.token_ids` ends with these tokens already."""

    def release(self, sequence: DraftSequence) -> None:
        """Free what the drafter holds for a sequence that is gone. What a pass under way makes for it is dropped."""

    def draft(self) -> Drafts:
        """Do one pass, or one replay of a few, over whoever has work, and hand back what was made.

        Where the device works by itself this may be what the pass before has made, while the next one runs: sequences
        that were released meanwhile are not in it.

        What it raises concerns everybody who has work: the engine drops their sequences.
        """
