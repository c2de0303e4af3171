"""Proposals as they come off the wire: which are refused, and how draft tokens stay with their q."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from verifier_service.proposals import parse_proposals

from engine.draft_tokens import NO_DRAFT_TOKENS, DraftRows, DraftTokens, concatenate, copy_rows
from kernels.limits import MAX_DRAFT_TOKENS
from outrider.protocol.handshake import DraftLimits
from outrider.protocol.wire import MAX_CANDIDATES, pack_tokens
from outrider.v1 import drafter_pb2
from verifier_service.speculation import ProposalError

VOCABULARY = 100
LIMITS = DraftLimits(MAX_DRAFT_TOKENS, MAX_CANDIDATES)


def proposal(
    tokens: Sequence[int],
    *,
    ids: Sequence[Sequence[int]] | None = None,
    weights: Sequence[Sequence[int]] | None = None,
) -> drafter_pb2.Proposal:
    """A proposal, one-hot unless candidates are given."""
    return drafter_pb2.Proposal(
        sequence_id=1,
        position=3,
        token_ids=pack_tokens(tokens),
        candidate_ids=b"" if ids is None else np.asarray(ids, dtype="<u4").tobytes(),
        candidate_weights=b"" if weights is None else np.asarray(weights, dtype="<u2").tobytes(),
    )


Q = [[65000, 536]]


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (lambda: drafter_pb2.Proposal(position=3, token_ids=b"\1\0\0"), "token_ids"),
        (lambda: proposal([]), "token_ids"),
        (lambda: proposal([1] * (MAX_DRAFT_TOKENS + 1)), "token_ids"),
        (lambda: proposal([VOCABULARY]), "token_ids"),
        (lambda: proposal([2**32 - 1]), "token_ids"),
        (lambda: proposal([4], ids=[[4, 5]]), "candidate_ids"),
        (lambda: proposal([4], weights=Q), "candidate_ids"),
        (lambda: proposal([4], ids=[[4, 5, 6]], weights=Q), "candidate_ids"),
        (lambda: proposal([4, 5], ids=[[4, 5, 6]], weights=[[65000, 536, 0]]), "candidate_ids"),
        (lambda: proposal([4], ids=[[4, 5]], weights=[[65000, 535]]), "candidate_weights"),
        (lambda: proposal([4], ids=[[4, 5]], weights=[[65000, 537]]), "candidate_weights"),
        (lambda: proposal([4], ids=[[4, 4]], weights=Q), "candidate_ids"),
        (lambda: proposal([4], ids=[[4, VOCABULARY]], weights=Q), "candidate_ids"),
        (lambda: proposal([4], ids=[[4, 2**32 - 1]], weights=Q), "candidate_ids"),
        (lambda: proposal([6], ids=[[4, 5]], weights=Q), "candidate_weights"),
        (lambda: proposal([6], ids=[[4, 5, 6]], weights=[[65000, 536, 0]]), "candidate_weights"),
        (lambda: proposal([4, 6], ids=[[4, 5], [4, 5]], weights=[Q[0], Q[0]]), "candidate_weights"),
        (
            lambda: proposal([4], ids=[range(MAX_CANDIDATES + 1)], weights=[[64] * 1024 + [0]]),
            "candidate",
        ),
    ],
)
def test_what_would_make_verification_wrong_is_refused(bad: Callable[[], drafter_pb2.Proposal], field: str) -> None:
    """Catches a q that is no distribution: the target's output would be biased without anybody noticing."""
    fine = proposal([7], ids=[[7, 8]], weights=Q)
    first, found, last = parse_proposals([fine, bad(), proposal([9])], VOCABULARY, LIMITS)
    assert isinstance(found, ProposalError)
    assert field in str(found)
    # It costs nobody else anything.
    assert isinstance(first, DraftTokens)
    assert isinstance(last, DraftTokens)


@pytest.mark.parametrize(
    ("limits", "field", "bound"),
    [
        (DraftLimits(1, 2), "token_ids", "1 to 1"),
        (DraftLimits(2, 1), "candidate_ids", "at most 1"),
        (DraftLimits(2, 0), "candidate_ids", "at most 0"),
    ],
)
def test_what_is_larger_than_agreed_is_refused(limits: DraftLimits, field: str, bound: str) -> None:
    """Catches a proposal that CUDA graphs have no room for, and that everybody in its step would pay for."""
    large = proposal([4, 4], ids=[[4, 5]] * 2, weights=[Q[0]] * 2)
    (fits,) = parse_proposals([large], VOCABULARY, DraftLimits(2, 2))
    assert isinstance(fits, DraftTokens)
    small, found = parse_proposals([proposal([9]), large], VOCABULARY, limits)
    assert isinstance(small, DraftTokens)
    assert isinstance(found, ProposalError)
    assert str(found).startswith(f"{field}: ")
    assert bound in str(found)


def is_fine(token: int, ids: Sequence[int], weights: Sequence[int]) -> bool:
    """Whether a row is what the protocol wants, written down as it says it."""
    q = [(candidate, weight) for candidate, weight in zip(ids, weights, strict=True) if weight]
    names = [candidate for candidate, _ in q]
    if not q:
        return True
    return sum(weights) == 65536 and len(set(names)) == len(names) and max(names) < VOCABULARY and token in names


def test_all_proposals_at_once_are_judged_as_each_alone() -> None:
    """Catches a check that is cheap because it looks at the usual case alone."""
    chance = random.Random(0)
    verdicts = []
    for _ in range(400):
        width = chance.choice([1, 2, 2, 3, 5])
        frame, expected = [], []
        for _ in range(chance.choice([1, 1, 2, 6])):
            rows = []
            for _ in range(chance.choice([1, 1, 2, 4])):
                ids = chance.choices([1, 2, 3, 4, 5, 6, 7, VOCABULARY, 2**32 - 1], k=width)
                ids = ids if chance.random() < 0.3 else chance.sample(range(VOCABULARY), width)
                # Weights that sum up, but for one row in ten, and some of which are 0.
                cuts = sorted(chance.choices([0, 1, 9000, 65535], k=width - 1))
                total = 65535 if width == 1 or chance.random() < 0.1 else 65536
                weights = [right - left for left, right in zip([0, *cuts], [*cuts, total], strict=True)]
                if width == 1 or chance.random() < 0.2:
                    weights = [0] * width
                weights = [min(weight, 65535) for weight in weights]
                token = chance.choice(ids) if chance.random() < 0.9 else 7
                rows.append((min(token, VOCABULARY - 1), ids, weights))
            tokens, all_ids, all_weights = zip(*rows, strict=True)
            frame.append(proposal(tokens, ids=all_ids, weights=all_weights))
            expected.append(all(is_fine(*row) for row in rows))
        found = [isinstance(draft, DraftTokens) for draft in parse_proposals(frame, VOCABULARY, LIMITS)]
        assert found == expected
        verdicts += found
    assert 200 < sum(verdicts) < len(verdicts) - 200


def test_what_is_unusual_but_right_is_taken() -> None:
    """A certain row beside a sparse one, padding that repeats an id or names none, the least possible weight."""
    unusual = proposal([4, 6], ids=[[4, 5, 5, 999], [6, 6, 6, 6]], weights=[[1, 65535, 0, 0], [0, 0, 0, 0]])
    (draft,) = parse_proposals([unusual], VOCABULARY, LIMITS)
    assert isinstance(draft, DraftTokens)
    assert draft.token_ids == [4, 6]
    assert draft.candidate_weights.tolist() == [[1, 65535, 0, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize(
    "order",
    [
        [0, 1, 2],  # as they came
        [2, 0, 1],
        [0, 2],
        [1, 3, 0],  # of two frames, one wider than the other
        [4],
        [4, 1],
        [],
    ],
)
def test_draft_tokens_are_put_together_in_any_order(order: list[int]) -> None:
    """Catches candidates that move to a neighbour when the rows of a frame are copied at once."""
    tokens = [[4, 5], [6], [7, 8, 9], [10, 11], [12]]
    frames = [
        [proposal(ids, ids=[[i, 50 + i] for i in ids], weights=[[65536 - i, i] for i in ids]) for ids in tokens[:3]],
        [proposal(tokens[3], ids=[[i] for i in tokens[3]], weights=[[0] for _ in tokens[3]]), proposal(tokens[4])],
    ]
    parsed = [draft for frame in frames for draft in parse_proposals(frame, VOCABULARY, LIMITS)]
    drafts = []
    for index in order:
        draft = parsed[index]
        assert isinstance(draft, DraftTokens)
        drafts += [NO_DRAFT_TOKENS, draft]
    expected = [token_id for draft in drafts for token_id in draft.token_ids]
    together = concatenate(drafts)
    assert together.token_ids.tolist() == expected
    assert together.num_candidates == max((draft.rows.num_candidates for draft in drafts), default=0)
    for token_id, ids, weights in zip(
        expected, together.candidate_ids.tolist(), together.candidate_weights.tolist(), strict=True
    ):
        q = dict(zip(ids, weights, strict=True)) if any(weights) else {}
        assert q == ({token_id: 65536 - token_id, 50 + token_id: token_id} if token_id < 10 else {})
    # Into rows that are wider, more, and hold what another step left.
    target = DraftRows.empty(20, 5)
    target.candidate_weights.fill(7)
    copy_rows(drafts, target)
    assert target.token_ids[: len(expected)].tolist() == expected
    width = together.num_candidates
    np.testing.assert_array_equal(target.candidate_weights[: len(expected), :width], together.candidate_weights)
    assert not target.candidate_weights[: len(expected), width:].any()
