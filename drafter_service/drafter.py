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


@dataclass(slots=True, eq=False)  # not frozen: one for each sequence of a round
class Draft:
    """Draft tokens for the positions right behind a sequence's committed ones.

    `candidate_ids` and `candidate_weights`, both [num_tokens, m], are the distribution that each token was really
    sampled from, in units of 1/65,536; None where each token was certain (q is one-hot). In 16 bits, a weight of 65,536
    is 0, as on the wire.
    """

    sequence: DraftSequence
    token_ids: Sequence[int]
    candidate_ids: npt.NDArray[np.int32] | None = None
    candidate_weights: npt.NDArray[np.int32] | npt.NDArray[np.uint16] | None = None


@dataclass(frozen=True)
class NoDraft:
    """No draft for a sequence; every reason but NO_MATCH is final for it."""

    sequence: DraftSequence
    reason: drafter_pb2.NoProposalReason
    detail: str = ""


class Drafter(Protocol):
    """Makes drafts. Every method is called on the thread that owns the model, if there is one."""

    kind: str
    # 0 where the drafter has no vocabulary or no limit of its own.
    vocabulary_size: int
    max_length: int
    tokenizer: TokenizerDigest
    name: str
    revision: str

    @property
    def limits(self) -> DraftLimits:
        """How large its drafts are at most, once loaded. A verifier may take less: each sequence says how much."""

    @property
    def device(self) -> torch.device | None:
        """Where the model is, once loaded; None without a model."""

    @property
    def num_kv_blocks(self) -> int:
        """KV-cache blocks in all, 0 without a model."""

    @property
    def num_free_kv_blocks(self) -> int:
        """KV-cache blocks that hold nothing."""

    def load(self) -> None:
        """Load and warm up; called once, before anything else."""

    def draft(self, wanting: Sequence[DraftSequence]) -> Sequence[Draft | NoDraft]:
        """Do one step for the sequences that want a draft.

        A sequence may be missing from the answer: its prompt is still being computed, and it is passed again.
        """

    def release(self, sequence: DraftSequence) -> None:
        """Free what the drafter holds for a sequence that is gone."""
