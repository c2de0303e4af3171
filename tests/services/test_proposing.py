"""One sequence's proposals at the drafter: every state by every event, and what a verdict leaves of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from drafter_service.proposing import Proposing, State
from drafter_service.sequence import DraftSequence
from outrider.protocol.errors import InvalidArgumentError
from outrider.protocol.sampling_parameters import SamplingParameters

OPENED, WANTING, ANSWERED = State


def brought_to(state: State) -> Proposing:
    """What is known of two committed tokens, with draft tokens 0, 1, 2 out where that is ANSWERED."""
    proposing = Proposing()
    if state is WANTING:
        proposing.find_nothing()
        proposing.take([9], 2, 0, length=1)
    if state is ANSWERED:
        proposing.propose([0, 1, 2])
    assert proposing.state is state
    return proposing


def verdict(*token_ids: int) -> Callable[[Proposing], object]:
    return lambda proposing: proposing.take(list(token_ids), 2 + len(token_ids), 0, length=2)


# What happens, and what follows on OPENED, WANTING and ANSWERED.
TRANSITIONS: dict[str, tuple[Callable[[Proposing], object], list[State]]] = {
    "a proposal": (lambda p: p.propose([4, 5]), [ANSWERED, ANSWERED, ANSWERED]),
    "nothing found": (lambda p: p.find_nothing(), [ANSWERED, ANSWERED, ANSWERED]),
    "a verdict to hold": (lambda p: p.hold([0], 3, 0), [OPENED, WANTING, ANSWERED]),
    "a part accepted": (verdict(0), [WANTING, WANTING, ANSWERED]),
    "all accepted": (verdict(0, 1, 2), [WANTING, WANTING, WANTING]),
    "a bonus token": (verdict(0, 1, 2, 3), [WANTING, WANTING, WANTING]),
    "a rejection": (verdict(0, 2), [WANTING, WANTING, WANTING]),
}


@pytest.mark.parametrize(
    ("before", "event", "after"),
    [(before, event, after[i]) for event, (_, after) in TRANSITIONS.items() for i, before in enumerate(State)],
    ids=lambda value: value.name if isinstance(value, State) else value,
)
def test_transitions(before: State, event: str, after: State) -> None:
    proposing = brought_to(before)
    TRANSITIONS[event][0](proposing)
    assert proposing.state is after
    if after is WANTING:
        assert not proposing.proposed


@pytest.mark.parametrize(
    ("token_ids", "num_accepted", "epoch", "proposed"),
    [
        ([0], None, 0, [1, 2]),
        ([0, 1, 2], None, 0, []),
        ([0, 1, 2, 2], None, 0, []),
        ([2], 0, 1, []),
        ([0, 2], 1, 1, []),
        ([0, 1, 0], 2, 1, []),
        ([0, 2, 2, 2], 1, 1, []),  # one verdict ends one epoch
    ],
)
def test_a_verdict_is_compared_with_what_was_proposed(
    token_ids: list[int], num_accepted: int | None, epoch: int, proposed: list[int]
) -> None:
    proposing = brought_to(ANSWERED)
    assert proposing.take(token_ids, 2 + len(token_ids), epoch, length=2) == num_accepted
    assert (proposing.epoch, proposing.proposed) == (epoch, proposed)


@pytest.mark.parametrize("state", State, ids=lambda state: state.name)
@pytest.mark.parametrize(
    ("token_ids", "num_committed", "epoch", "field"),
    [
        ([], 2, 0, "token_ids"),
        ([0], 4, 0, "num_committed"),
        ([0], 2, 0, "num_committed"),
        ([0], 3, 1, "epoch"),
    ],
)
def test_a_verdict_that_contradicts_what_went_before(
    state: State, token_ids: list[int], num_committed: int, epoch: int, field: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=f"verdict.{field}"):
        brought_to(state).take(token_ids, num_committed, epoch, length=2)


def test_verdicts_that_come_before_the_first_answer_are_taken_in_behind_it_and_in_order() -> None:
    """Catches drafts that depend on whether the target's first token was faster, and verdicts in disorder."""
    proposing = Proposing()
    assert proposing.hold([0], 3, 0)
    assert proposing.hold([1], 4, 0)
    assert not proposing.release()
    proposing.propose([0, 1, 2])
    assert proposing.hold([2], 5, 0), "it would overtake those that are held"
    assert list(proposing.release()) == [([0], 3, 0), ([1], 4, 0), ([2], 5, 0)]
    assert not proposing.release()
    assert not proposing.hold([3], 6, 0)


def draft_sequence(token_ids: list[int]) -> DraftSequence:
    return DraftSequence(
        sequence_id=1,
        token_ids=list(token_ids),
        num_prompt_tokens=len(token_ids),
        sampling=SamplingParameters(),
        max_draft_tokens=4,
        wants_candidates=False,
    )


@pytest.mark.parametrize(
    ("num_computed", "verdict", "num_kept"),
    [
        (4, [0], 4),
        (4, [0, 1, 2, 2], 4),
        (4, [0, 2], 3),
        (4, [2], 2),
        # The last draft token was never computed, nor is a prompt in pieces.
        (5, [0, 1, 1], 4),
        (1, [2], 1),
    ],
)
def test_a_verdict_truncates_to_the_committed_prefix(num_computed: int, verdict: list[int], num_kept: int) -> None:
    """Catches a drafter that goes on with keys and values of tokens that were rejected."""
    sequence = draft_sequence([1, 2])
    sequence.proposing.propose([0, 1, 2])
    sequence.num_computed = num_computed
    sequence.commit(verdict, 2 + len(verdict), 0)
    assert sequence.token_ids == [1, 2, *verdict]
    assert sequence.num_computed == num_kept
