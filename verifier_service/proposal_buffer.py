"""Draft tokens that have arrived for one sequence, and the epochs that keep them in step with the drafter."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.wire import candidates_per_token, unpack_candidates, unpack_tokens
from kernels.limits import MAX_DRAFT_TOKENS, WEIGHT_TOTAL
from outrider.v1 import drafter_pb2

# Draft tokens that one sequence may have waiting: several proposals, as the protocol allows, but no flood of them.
MAX_BUFFERED_TOKENS = 4 * MAX_DRAFT_TOKENS


class ProposalError(ValueError):
    """A proposal that breaks the protocol; the sequence goes on without its drafter."""


# Not frozen: that triples the time of making one, and a step makes several for each sequence.
@dataclass(slots=True, eq=False)
class DraftTokens:
    """Draft tokens and their q, [num_tokens] and twice [num_tokens, m]; a row of zero weights is one-hot."""

    token_ids: list[int]
    candidate_ids: npt.NDArray[np.int32]
    candidate_weights: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_bytes(self) -> int:
        """What they took on the wire: ids of 4 bytes, weights of 2."""
        return 4 * len(self.token_ids) + 6 * self.candidate_ids.size

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
        return len(self._drafts.token_ids)

    def offer(self, epoch: int, position: int, drafts: DraftTokens, committed: list[int]) -> None:
        """Take in a proposal that has just arrived. Raises ProposalError when it breaks the protocol."""
        if epoch > self.epoch:
            raise ProposalError(f"epoch: {epoch} has not begun, {self.epoch} has not ended")
        if epoch < self.epoch:
            self.num_stale += len(drafts)
            return
        num_waiting = len(self)
        next_position = len(committed) + num_waiting
        if position > next_position or (num_waiting and position != next_position):
            raise ProposalError(f"position: {position} leaves a gap or repeats, {next_position} comes next")
        if num_waiting + len(drafts) > MAX_BUFFERED_TOKENS:
            raise ProposalError(f"token_ids: more than {MAX_BUFFERED_TOKENS} draft tokens wait for this sequence")
        if position < len(committed):
            # Committed while the proposal was on its way: compared now, as the drafter does with the verdict.
            overtaken = committed[position : position + len(drafts)]
            if overtaken != drafts.token_ids[: len(overtaken)]:
                self.epoch += 1
                self.num_stale += len(drafts)
                return
            self.num_stale += len(overtaken)
            drafts = drafts.part(len(overtaken))
        self._drafts = concatenate([self._drafts, drafts]) if num_waiting else drafts

    def peek(self, num_tokens: int) -> DraftTokens:
        """The next draft tokens, `num_tokens` at most; they stay until `commit`."""
        return self._drafts if num_tokens >= len(self) else self._drafts.part(0, num_tokens)

    def commit(self, token_ids: list[int]) -> None:
        """Compare newly committed tokens with the proposals at their positions, and move on."""
        proposed = self._drafts.token_ids
        num_compared = min(len(token_ids), len(proposed))
        if proposed[:num_compared] != token_ids[:num_compared]:
            self.epoch += 1
            self._drafts = NO_DRAFT_TOKENS
        else:
            self._drafts = self._drafts.part(num_compared) if num_compared < len(proposed) else NO_DRAFT_TOKENS

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
    try:
        # All at once: one by one, the checks of a large batch would take as long as its forward pass.
        return [*_parse(proposals, vocabulary_size)]
    except ProposalError as error:
        if len(proposals) == 1:
            return [error]
    return [parsed for proposal in proposals for parsed in parse_proposals([proposal], vocabulary_size)]


def _parse(proposals: Sequence[drafter_pb2.Proposal], vocabulary_size: int) -> list[DraftTokens]:
    token_ids: list[list[int]] = []
    packed: list[tuple[bytes, bytes]] = []
    alike: dict[int, list[int]] = defaultdict(list)  # by the number of candidates: which proposals
    for index, proposal in enumerate(proposals):
        ids, weights = proposal.candidate_ids, proposal.candidate_weights
        token_ids.append(_unpack_tokens(proposal.token_ids))
        packed.append((ids, weights))
        try:
            alike[candidates_per_token(ids, weights, len(token_ids[-1]))].append(index)
        except ValueError as error:
            raise ProposalError(f"candidate_ids: {error}") from error
    parsed = [NO_DRAFT_TOKENS] * len(proposals)
    for indexes in alike.values():
        tokens = np.array([token_id for index in indexes for token_id in token_ids[index]])
        ids, weights = (b"".join([packed[index][part] for index in indexes]) for part in (0, 1))
        candidate_ids, candidate_weights = unpack_candidates(ids, weights, len(tokens))
        _check(tokens, candidate_ids, candidate_weights, vocabulary_size)
        start = 0
        for index in indexes:
            end = start + len(token_ids[index])
            parsed[index] = DraftTokens(token_ids[index], candidate_ids[start:end], candidate_weights[start:end])
            start = end
    return parsed


def _unpack_tokens(data: bytes) -> list[int]:
    try:
        token_ids = unpack_tokens(data)
    except ValueError as error:
        raise ProposalError(f"token_ids: {error}") from error
    if not 1 <= len(token_ids) <= MAX_DRAFT_TOKENS:
        raise ProposalError(f"token_ids: {len(token_ids)} draft tokens, must be 1 to {MAX_DRAFT_TOKENS}")
    return token_ids


def _check(
    token_ids: npt.NDArray[np.int64],  # [num_tokens]
    candidate_ids: npt.NDArray[np.int32],  # [num_tokens, m]
    candidate_weights: npt.NDArray[np.int32],  # [num_tokens, m]
    vocabulary_size: int,
) -> None:
    if token_ids.max() >= vocabulary_size:
        raise ProposalError(f"token_ids: {token_ids.max()} is not below the vocabulary size {vocabulary_size}")
    if not candidate_ids.size:
        return
    totals = np.add.reduce(candidate_weights, axis=1, dtype=np.int32)  # MAX_CANDIDATES weights of 16 bits fit
    if ((totals != WEIGHT_TOTAL) & (totals != 0)).any():
        raise ProposalError(f"candidate_weights: a row must sum to {WEIGHT_TOTAL} or be all zero")
    has_weight = candidate_weights > 0
    if ((candidate_ids.view(np.uint32) >= vocabulary_size) & has_weight).any():
        raise ProposalError(f"candidate_ids: an id is not below the vocabulary size {vocabulary_size}")
    # Padding gets ids of its own, below zero and all different, so that only real candidates can collide.
    padding = np.arange(-1, -1 - candidate_ids.shape[1], -1, dtype=np.int32)
    own = candidate_ids.copy()
    np.copyto(own, padding, where=~has_weight)  # less than half the time of np.where
    if ((own == token_ids.astype(np.int32)[:, None]).any(axis=1) < (totals != 0)).any():
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
