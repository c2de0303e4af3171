"""Draft tokens that have arrived for one sequence, and the epochs that keep them in step with the drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.wire import unpack_candidates, unpack_tokens
from kernels.limits import MAX_DRAFT_TOKENS, WEIGHT_TOTAL
from outrider.v1 import drafter_pb2

# Draft tokens that one sequence may have waiting: several proposals, as the protocol allows, but no flood of them.
MAX_BUFFERED_TOKENS = 4 * MAX_DRAFT_TOKENS


class ProposalError(ValueError):
    """A proposal that breaks the protocol; the sequence goes on without its drafter."""


@dataclass(frozen=True)
class DraftTokens:
    """Draft tokens and their q, [num_tokens] and twice [num_tokens, m]; a row of zero weights is one-hot."""

    token_ids: list[int]
    candidate_ids: npt.NDArray[np.int32]
    candidate_weights: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.token_ids)

    def part(self, start: int, end: int | None = None) -> DraftTokens:
        """The draft tokens from `start` up to `end`."""
        return DraftTokens(self.token_ids[start:end], self.candidate_ids[start:end], self.candidate_weights[start:end])


NO_DRAFT_TOKENS = DraftTokens([], np.empty((0, 0), np.int32), np.empty((0, 0), np.int32))


class ProposalBuffer:
    """Proposals for the positions right behind the committed tokens.

    The epoch rule is the drafter's own: the first committed token that differs from the proposal at its position ends
    the epoch. Proposals arrive in the order in which they were made, so every proposal of an epoch is compared before
    the first one of the next arrives.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.num_stale = 0  # draft tokens that arrived too late to be verified
        self._drafts = NO_DRAFT_TOKENS

    def __len__(self) -> int:
        return len(self._drafts)

    def offer(self, epoch: int, position: int, drafts: DraftTokens, committed: list[int]) -> None:
        """Take in a proposal that has just arrived. Raises ProposalError when it breaks the protocol."""
        if epoch > self.epoch:
            raise ProposalError(f"epoch: {epoch} has not begun, {self.epoch} has not ended")
        if epoch < self.epoch:
            self.num_stale += len(drafts)
            return
        next_position = len(committed) + len(self._drafts)
        if position > next_position or (len(self._drafts) and position != next_position):
            raise ProposalError(f"position: {position} leaves a gap or repeats, {next_position} comes next")
        if len(self._drafts) + len(drafts) > MAX_BUFFERED_TOKENS:
            raise ProposalError(f"token_ids: more than {MAX_BUFFERED_TOKENS} draft tokens wait for this sequence")
        # Tokens committed while the proposal was on its way: compare them now, as the drafter does with the verdict.
        overtaken = committed[position : position + len(drafts)]
        if overtaken != drafts.token_ids[: len(overtaken)]:
            self.epoch += 1
            self.num_stale += len(drafts)
            return
        self.num_stale += len(overtaken)
        fresh = drafts.part(len(overtaken))
        self._drafts = concatenate([self._drafts, fresh]) if len(self._drafts) else fresh

    def peek(self, num_tokens: int) -> DraftTokens:
        """The next draft tokens, `num_tokens` at most; they stay until `commit`."""
        return self._drafts.part(0, num_tokens)

    def commit(self, token_ids: Sequence[int]) -> None:
        """Compare newly committed tokens with the proposals at their positions, and move on."""
        for index, token_id in enumerate(token_ids):
            if index >= len(self._drafts):
                break
            if self._drafts.token_ids[index] != token_id:
                self.epoch += 1
                self._drafts = NO_DRAFT_TOKENS
                return
        self._drafts = self._drafts.part(len(token_ids))

    def clear(self) -> None:
        """Forget everything: the drafter is gone."""
        self._drafts = NO_DRAFT_TOKENS


def parse_proposals(
    proposals: Sequence[drafter_pb2.Proposal], vocabulary_size: int
) -> list[DraftTokens | ProposalError]:
    """The draft tokens of a frame's proposals, or what is wrong with each.

    Wrong, with the field's name, is what would make verification wrong: ids outside the vocabulary, a q that does not
    sum to 1, names a candidate twice or gives the draft token no weight.
    """
    parsed = [_parse(proposal) for proposal in proposals]
    good = [drafts for drafts in parsed if isinstance(drafts, DraftTokens)]
    try:
        # All at once: one by one, the checks of a large batch would take as long as its forward pass.
        _check(good, vocabulary_size)
    except ProposalError:
        return [drafts if isinstance(drafts, ProposalError) else _checked(drafts, vocabulary_size) for drafts in parsed]
    return parsed


def _parse(proposal: drafter_pb2.Proposal) -> DraftTokens | ProposalError:
    try:
        token_ids = unpack_tokens(proposal.token_ids)
    except ValueError as error:
        return ProposalError(f"token_ids: {error}")
    if not 1 <= len(token_ids) <= MAX_DRAFT_TOKENS:
        return ProposalError(f"token_ids: {len(token_ids)} draft tokens, must be 1 to {MAX_DRAFT_TOKENS}")
    try:
        ids, weights = unpack_candidates(proposal.candidate_ids, proposal.candidate_weights, len(token_ids))
    except ValueError as error:
        return ProposalError(f"candidate_ids: {error}")
    return DraftTokens(token_ids, ids, weights)


def _checked(drafts: DraftTokens, vocabulary_size: int) -> DraftTokens | ProposalError:
    try:
        _check([drafts], vocabulary_size)
    except ProposalError as error:
        return error
    return drafts


def _check(proposals: Sequence[DraftTokens], vocabulary_size: int) -> None:
    drafts = concatenate(proposals)
    token_ids = np.asarray(drafts.token_ids, dtype=np.int64)
    if (token_ids >= vocabulary_size).any():
        raise ProposalError(f"token_ids: {token_ids.max()} is not below the vocabulary size {vocabulary_size}")
    ids, weights = drafts.candidate_ids, drafts.candidate_weights
    if not ids.size:
        return
    totals = weights.sum(axis=1)
    if ((totals != WEIGHT_TOTAL) & (totals != 0)).any():
        raise ProposalError(f"candidate_weights: a row must sum to {WEIGHT_TOTAL} or be all zero")
    has_weight = weights > 0
    # Padding gets ids of its own, below zero and all different, so that only real candidates can collide.
    padding = np.arange(-1, -1 - ids.shape[1], -1, dtype=np.int32)
    if ((ids < 0) & has_weight).any() or (ids.max(where=has_weight, initial=0) >= vocabulary_size):
        raise ProposalError(f"candidate_ids: an id is not below the vocabulary size {vocabulary_size}")
    own = np.where(has_weight, ids, padding)
    if ((own == token_ids[:, None]).sum(axis=1) < (totals != 0)).any():
        raise ProposalError("candidate_weights: a draft token has no weight in its own distribution")
    own.sort(axis=1)
    if (own[:, 1:] == own[:, :-1]).any():
        raise ProposalError("candidate_ids: a candidate stands twice in a row")


def concatenate(drafts: Sequence[DraftTokens]) -> DraftTokens:
    """All draft tokens in one, candidates padded to the widest row with weight 0."""
    width = max((draft.candidate_ids.shape[1] for draft in drafts), default=0)

    def padded(array: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        return np.pad(array, ((0, 0), (0, width - array.shape[1]))) if array.shape[1] < width else array

    return DraftTokens(
        [token_id for draft in drafts for token_id in draft.token_ids],
        np.concatenate([padded(draft.candidate_ids) for draft in drafts] or [np.empty((0, 0), np.int32)]),
        np.concatenate([padded(draft.candidate_weights) for draft in drafts] or [np.empty((0, 0), np.int32)]),
    )
