"""Reading a drafter's proposals off the wire, and refusing those that would make verification wrong."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from engine.draft_tokens import NO_DRAFT_TOKENS, DraftRows, DraftTokens
from kernels.limits import WEIGHT_TOTAL
from outrider.protocol.handshake import DraftLimits
from outrider.protocol.wire import SIGNED_TOKEN, candidates_per_token, unpack_candidates, unpack_tokens
from outrider.v1 import drafter_pb2
from verifier_service.speculation import ProposalError


def parse_proposals(
    proposals: Sequence[drafter_pb2.Proposal], vocabulary_size: int, limits: DraftLimits
) -> list[DraftTokens | ProposalError]:
    """The draft tokens of a frame's proposals, or what is wrong with each.

    Wrong, with the field's name, is what would make verification wrong: ids outside the vocabulary, a q that does not
    sum to 1, names a candidate twice or gives the draft token no weight. So is what is larger than the `limits` that
    were agreed upon: CUDA graphs have no room for it, and everybody in its step would do without one.
    """
    try:
        # All at once: one by one, the checks of a large batch would take as long as its forward pass.
        return [*_parse(proposals, vocabulary_size, limits)]
    except ProposalError as error:
        if len(proposals) == 1:
            return [error]
    return [parsed for proposal in proposals for parsed in parse_proposals([proposal], vocabulary_size, limits)]


def _parse(proposals: Sequence[drafter_pb2.Proposal], vocabulary_size: int, limits: DraftLimits) -> list[DraftTokens]:
    packed = [(proposal.token_ids, proposal.candidate_ids, proposal.candidate_weights) for proposal in proposals]
    most_tokens, most_candidates = limits.max_draft_tokens, limits.max_candidates
    widths = [
        _num_candidates(len(tokens), len(ids), len(weights), most_tokens, most_candidates)
        for tokens, ids, weights in packed
    ]
    parsed = [NO_DRAFT_TOKENS] * len(packed)
    for width in set(widths):
        indexes = [index for index, other in enumerate(widths) if other == width]
        all_tokens, all_ids, all_weights = map(b"".join, zip(*[packed[index] for index in indexes], strict=True))
        token_ids = unpack_tokens(all_tokens)
        if (largest := max(token_ids)) >= vocabulary_size:
            raise ProposalError(f"token_ids: {largest} is not below the vocabulary size {vocabulary_size}")
        candidates = unpack_candidates(all_ids, all_weights, len(token_ids))
        rows = DraftRows(np.frombuffer(all_tokens, SIGNED_TOKEN), *candidates)
        _check(rows, vocabulary_size)
        start = 0
        for index in indexes:
            end = start + len(packed[index][0]) // SIGNED_TOKEN.itemsize
            parsed[index] = DraftTokens(token_ids[start:end], rows, start)
            start = end
    return parsed


@lru_cache(maxsize=1024)  # the same few sizes come again and again
def _num_candidates(
    num_token_bytes: int, num_id_bytes: int, num_weight_bytes: int, max_draft_tokens: int, max_candidates: int
) -> int:
    """How many candidates each draft token has in a proposal whose fields are of these sizes."""
    num_tokens, remainder = divmod(num_token_bytes, SIGNED_TOKEN.itemsize)
    if remainder:
        raise ProposalError(f"token_ids: {num_token_bytes} bytes are no whole number of 4-byte token ids")
    if not 1 <= num_tokens <= max_draft_tokens:
        raise ProposalError(f"token_ids: {num_tokens} draft tokens, must be 1 to {max_draft_tokens}")
    try:
        num_candidates = candidates_per_token(num_id_bytes, num_weight_bytes, num_tokens)
    except ValueError as error:
        raise ProposalError(f"candidate_ids: {error}") from error
    if num_candidates > max_candidates:
        raise ProposalError(f"candidate_ids: {num_candidates} a draft token, at most {max_candidates} were agreed upon")
    return num_candidates


def _check(rows: DraftRows, vocabulary_size: int) -> None:
    """Raise ProposalError for a q that would make verification wrong.

    Where the usual case has a test of its own that takes less time, the exact one follows only if that fails.
    """
    ids, weights = rows.candidate_ids, rows.candidate_weights
    if not ids.size:
        return
    totals = np.add.reduce(weights, axis=1, dtype=np.int32)  # MAX_CANDIDATES weights of 16 bits fit
    num_sampled = np.count_nonzero(totals == WEIGHT_TOTAL)
    if num_sampled < len(totals) and num_sampled < np.count_nonzero(totals):
        raise ProposalError(f"candidate_weights: a row must sum to {WEIGHT_TOTAL} or be all zero")
    has_weight = weights > 0
    # Unsigned, as ids from 2**31 on are below zero in the rows.
    in_order = np.sort(ids.view(np.uint32), axis=1)
    if in_order[:, -1].max() >= vocabulary_size and ((ids.view(np.uint32) >= vocabulary_size) & has_weight).any():
        raise ProposalError(f"candidate_ids: an id is not below the vocabulary size {vocabulary_size}")
    # Row behind row, with the neighbours of two rows compared as well.
    in_order = in_order.ravel()
    if np.count_nonzero(in_order[1:] == in_order[:-1]) and _has_repeated(ids, has_weight):
        raise ProposalError("candidate_ids: a candidate stands twice in a row")
    # None stands twice, so that a row that was sampled has its draft token once or not at all.
    if np.count_nonzero((ids == rows.token_ids[:, None]) & has_weight) < num_sampled:
        raise ProposalError("candidate_weights: a draft token has no weight in its own distribution")


def _has_repeated(candidate_ids: npt.NDArray[np.int32], has_weight: npt.NDArray[np.bool_]) -> bool:
    """Whether some row, both [num_rows, m], has a candidate twice among those with weight."""
    # Padding gets ids of its own, below zero and all different, so that only real candidates can collide.
    padding = np.arange(-1, -1 - candidate_ids.shape[1], -1, dtype=np.int32)
    in_order = np.sort(np.where(has_weight, candidate_ids, padding), axis=1)
    return bool((in_order[:, 1:] == in_order[:, :-1]).any())
