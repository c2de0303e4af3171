"""The verifier's side of the speculation protocol: what it makes of proposals that are early, late, stale or wrong."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from engine.draft_tokens import NO_DRAFT_TOKENS, DraftRows, DraftTokens, concatenate, copy_rows
from kernels.limits import MAX_DRAFT_TOKENS
from outrider.protocol.wire import MAX_CANDIDATES, pack_tokens
from outrider.v1 import drafter_pb2
from verifier_service.proposal_buffer import MAX_BUFFERED_TOKENS, ProposalBuffer, ProposalError, parse_proposals

VOCABULARY = 100
COMMITTED = [1, 2, 3]


def proposal(
    tokens: Sequence[int],
    *,
    position: int = 3,
    epoch: int = 0,
    ids: Sequence[Sequence[int]] | None = None,
    weights: Sequence[Sequence[int]] | None = None,
) -> drafter_pb2.Proposal:
    """A proposal, one-hot unless candidates are given."""
    return drafter_pb2.Proposal(
        sequence_id=1,
        epoch=epoch,
        position=position,
        token_ids=pack_tokens(tokens),
        candidate_ids=b"" if ids is None else np.asarray(ids, dtype="<u4").tobytes(),
        candidate_weights=b"" if weights is None else np.asarray(weights, dtype="<u2").tobytes(),
    )


def offer(buffer: ProposalBuffer, one: drafter_pb2.Proposal, committed: list[int]) -> int:
    """Parse a proposal and let it arrive; how many of its tokens are too late."""
    (drafts,) = parse_proposals([one], VOCABULARY)
    assert isinstance(drafts, DraftTokens)
    return buffer.offer(one.epoch, one.position, drafts, committed)


def offered(*proposals: drafter_pb2.Proposal, committed: list[int] = COMMITTED) -> ProposalBuffer:
    """A buffer that has taken in the proposals."""
    buffer = ProposalBuffer()
    for one in proposals:
        offer(buffer, one, committed)
    return buffer


def test_proposals_queue_up_behind_the_committed_tokens() -> None:
    buffer = offered(proposal([4, 5]), proposal([6], position=5))
    assert len(buffer) == 3
    assert buffer.peek(2).token_ids == [4, 5]
    assert buffer.peek(9).token_ids == [4, 5, 6]


def test_a_verdict_that_agrees_moves_on_within_the_epoch() -> None:
    buffer = offered(proposal([4, 5, 6]))
    buffer.commit([4, 5])
    assert (buffer.epoch, buffer.peek(9).token_ids) == (0, [6])
    buffer.commit([6, 7])  # the bonus token goes beyond what was proposed
    assert (buffer.epoch, len(buffer)) == (0, 0)


@pytest.mark.parametrize("verdict", [[9], [4, 9], [4, 5, 9], [9, 5, 6]])
def test_a_verdict_that_differs_ends_the_epoch(verdict: list[int]) -> None:
    """Catches a buffer that keeps draft tokens whose prefix was not committed."""
    buffer = offered(proposal([4, 5, 6]))
    buffer.commit(verdict)
    assert (buffer.epoch, len(buffer)) == (1, 0)


def test_one_verdict_ends_one_epoch() -> None:
    """Catches counting every differing token: the drafter counts the first one only."""
    buffer = offered(proposal([4, 5, 6]))
    buffer.commit([9, 9, 9])
    assert buffer.epoch == 1


def test_stale_epochs_are_dropped() -> None:
    buffer = offered(proposal([4, 5]))
    buffer.commit([9])
    assert offer(buffer, proposal([6], position=5), [1, 2, 3, 9]) == 1
    assert (buffer.epoch, len(buffer)) == (1, 0)
    offer(buffer, proposal([7], position=4, epoch=1), [1, 2, 3, 9])
    assert buffer.peek(9).token_ids == [7]


def test_an_epoch_that_has_not_begun_is_refused() -> None:
    with pytest.raises(ProposalError, match="epoch"):
        offered(proposal([4], epoch=1))


def test_what_was_committed_meanwhile_is_compared_on_arrival() -> None:
    """Catches a late proposal that is verified one position off, or not at all although it was right."""
    buffer = ProposalBuffer()
    assert offer(buffer, proposal([4, 5, 6]), [1, 2, 3, 4]) == 1
    assert (buffer.epoch, buffer.peek(9).token_ids) == (0, [5, 6])
    buffer = ProposalBuffer()
    assert offer(buffer, proposal([4, 5, 6]), [1, 2, 3, 4, 9]) == 3
    assert (buffer.epoch, len(buffer)) == (1, 0)
    buffer = ProposalBuffer()
    assert offer(buffer, proposal([4, 5]), [1, 2, 3, 4, 5, 6, 7]) == 2
    assert (buffer.epoch, len(buffer)) == (0, 0)


def test_candidates_stay_with_their_tokens() -> None:
    """Catches token ids and q that are cut at different places."""
    whole = proposal([4, 5], ids=[[4, 8], [5, 9]], weights=[[65000, 536], [60000, 5536]])
    buffer = offered(whole, committed=[1, 2, 3, 4])
    draft = buffer.peek(1)
    assert draft.candidate_ids.tolist() == [[5, 9]]
    assert draft.candidate_weights.tolist() == [[60000, 5536]]


@pytest.mark.parametrize("position", [0, 2, 4, 7, 2**63])
def test_a_position_that_is_not_the_next_one(position: int) -> None:
    buffer = offered(proposal([4]))
    if position == 4:
        offer(buffer, proposal([5], position=position), COMMITTED)
        return
    with pytest.raises(ProposalError, match="position"):
        offer(buffer, proposal([5], position=position), COMMITTED)


def test_a_gap_behind_the_committed_tokens_is_refused() -> None:
    with pytest.raises(ProposalError, match="position"):
        offered(proposal([4], position=4))


def test_a_flood_of_proposals_is_refused() -> None:
    """Catches a drafter that fills the verifier's memory."""
    buffer = offered(*(proposal([1, 1], position=3 + 2 * number) for number in range(MAX_BUFFERED_TOKENS // 2)))
    assert len(buffer) == MAX_BUFFERED_TOKENS
    with pytest.raises(ProposalError, match="wait"):
        offer(buffer, proposal([1], position=3 + MAX_BUFFERED_TOKENS), COMMITTED)


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
    first, found, last = parse_proposals([fine, bad(), proposal([9])], VOCABULARY)
    assert isinstance(found, ProposalError)
    assert field in str(found)
    # It costs nobody else anything.
    assert isinstance(first, DraftTokens)
    assert isinstance(last, DraftTokens)


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
        found = [isinstance(draft, DraftTokens) for draft in parse_proposals(frame, VOCABULARY)]
        assert found == expected
        verdicts += found
    assert 200 < sum(verdicts) < len(verdicts) - 200


def test_what_is_unusual_but_right_is_taken() -> None:
    """A certain row beside a sparse one, padding that repeats an id or names none, the least possible weight."""
    unusual = proposal([4, 6], ids=[[4, 5, 5, 999], [6, 6, 6, 6]], weights=[[1, 65535, 0, 0], [0, 0, 0, 0]])
    (draft,) = parse_proposals([unusual], VOCABULARY)
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
    parsed = [draft for frame in frames for draft in parse_proposals(frame, VOCABULARY)]
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
