"""Drafters without a model: each verdict is answered with a new root and a chain behind it, every token certain."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from drafter_service.drafter import Drafts, Expanded, NoDraft
from drafter_service.sequence import DraftSequence
from kernels.limits import MAX_DRAFT_TOKENS
from outrider.protocol.expansions import ROOT
from outrider.protocol.fingerprint import TokenizerDigest
from outrider.protocol.handshake import DraftLimits
from outrider.protocol.wire import MAX_EXPANSIONS
from outrider.v1 import drafter_pb2

# As probable as 16 bits can say.
_CERTAIN = (1 << 16) - 1


class ChainDrafter:
    """Finds the tokens that may follow a sequence as one chain; a subclass says how."""

    kind: str
    name: str
    revision = ""
    vocabulary_size = 0
    max_length = 0
    limits = DraftLimits(MAX_DRAFT_TOKENS, max_candidates=0, num_children=1, max_expansions=MAX_EXPANSIONS)
    tokenizer = TokenizerDigest()
    device = None
    num_kv_blocks = 0
    num_free_kv_blocks = 0

    def __init__(self) -> None:
        # The id of each sequence's next expansion.
        self._next_ids: dict[DraftSequence, int] = {}
        # In the order in which they came to want an answer.
        self._wanting: dict[DraftSequence, None] = {}

    @property
    def has_work(self) -> bool:
        """Whether a sequence wants an answer."""
        return bool(self._wanting)

    def load(self) -> None:
        """Nothing to load."""

    def open(self, sequence: DraftSequence) -> None:
        """Running ahead, what follows the prompt is looked for at once; taking turns, not before the first verdict."""
        self._next_ids[sequence] = 0
        if not sequence.limits.takes_turns:
            self._wanting[sequence] = None

    def commit(self, sequence: DraftSequence, token_ids: Sequence[int]) -> None:
        """The sequence wants an answer, one for all verdicts that have come."""
        self._wanting[sequence] = None

    def release(self, sequence: DraftSequence) -> None:
        """Forget the sequence."""
        self._next_ids.pop(sequence, None)
        self._wanting.pop(sequence, None)

    def draft(self) -> Drafts:
        """An answer for each sequence that wants one: a chain, or NO_MATCH."""
        wanting, self._wanting = list(self._wanting), {}
        found: dict[DraftSequence, Sequence[int]] = {}
        refusals: list[NoDraft] = []
        for sequence in wanting:
            answer = self.find(sequence)
            if isinstance(answer, NoDraft):
                refusals.append(answer)
            elif answer:
                found[sequence] = answer
            else:
                refusals.append(NoDraft(sequence, drafter_pb2.REFUSAL_REASON_NO_MATCH))
        return Drafts([self._expanded(found)] if found else (), refusals)

    def find(self, sequence: DraftSequence) -> Sequence[int] | NoDraft:
        """The tokens that may follow, at most `sequence.max_draft_tokens`; none where nothing was found."""
        raise NotImplementedError

    def _expanded(self, found: dict[DraftSequence, Sequence[int]]) -> Expanded:
        first_ids = [self._next_ids[sequence] for sequence in found]
        for sequence, token_ids in found.items():
            self._next_ids[sequence] += len(token_ids)
        return chains(
            list(found),
            np.array(first_ids, np.int64),
            np.array([len(token_ids) for token_ids in found.values()], np.int64),
            np.fromiter(chain.from_iterable(found.values()), np.int32),
        )


def chains(
    sequences: Sequence[DraftSequence],
    first_ids: npt.NDArray[np.int64],  # [S]
    num_expansions: npt.NDArray[np.int64],  # [S], at least 1 each
    token_ids: npt.NDArray[np.int32],  # [N], the chains one behind the other
    *,
    probability: int = _CERTAIN,
) -> Expanded:
    """A root for each sequence and a chain of first children behind it, which have no siblings."""
    starts = np.cumsum(num_expansions) - num_expansions
    num_nodes = len(token_ids)
    # Each is the child of the one before it.
    parents = (np.repeat(first_ids - starts, num_expansions) + np.arange(-1, num_nodes - 1)).astype(np.int32)
    parents[starts] = ROOT
    return Expanded(
        sequences=sequences,
        num_committed=np.array([sequence.length for sequence in sequences], np.int64),
        num_expansions=num_expansions,
        first_ids=first_ids,
        parents=parents,
        ranks=np.zeros(num_nodes, np.uint8),
        child_ids=token_ids[:, None],
        probabilities=np.full((num_nodes, 1), probability, np.uint16),
    )
