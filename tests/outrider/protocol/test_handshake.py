"""How verifier and drafter settle how much is drafted, and in which way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from outrider.protocol.errors import FailedPreconditionError, InvalidArgumentError
from outrider.protocol.handshake import DraftLimits

OWN = DraftLimits(max_draft_tokens=4, max_candidates=64, num_children=4, max_expansions=512)


@pytest.mark.parametrize(
    ("offer", "agreed"),
    [
        ({}, {}),
        ({"max_draft_tokens": 2}, {"max_draft_tokens": 2}),
        ({"max_draft_tokens": 9}, {}),
        ({"max_candidates": 9}, {"max_candidates": 9}),
        ({"max_candidates": 1024}, {}),
        ({"num_children": 1}, {"num_children": 1}),
        ({"num_children": 8}, {}),
        ({"max_expansions": 64}, {"max_expansions": 64}),
        ({"max_expansions": 4096}, {}),
        ({"takes_turns": True}, {"takes_turns": True}),
        ({"max_draft_tokens": 9, "max_candidates": 8}, {"max_candidates": 8}),
    ],
)
def test_the_lower_of_both_sides_holds(offer: dict[str, Any], agreed: dict[str, Any]) -> None:
    offered = replace(OWN, **offer)
    found = OWN.with_offer(offered.to_message())
    assert found == replace(OWN, **agreed)
    assert offered.with_answer(found.to_message()) == found


def test_no_candidates_are_an_answer() -> None:
    """As prompt lookup sends none."""
    found = replace(OWN, max_candidates=0).with_offer(OWN.to_message())
    assert found == replace(OWN, max_candidates=0)
    assert OWN.with_answer(found.to_message()) == found


def test_turns_are_taken_where_either_side_wants_them() -> None:
    """Catches a drafter that never rests beside a verifier that waits for it."""
    found = replace(OWN, takes_turns=True).with_offer(OWN.to_message())
    assert found.takes_turns
    assert OWN.with_answer(found.to_message()) == found
    with pytest.raises(FailedPreconditionError, match="takes_turns"):
        replace(OWN, takes_turns=True).with_answer(OWN.to_message())


@pytest.mark.parametrize("field", ["max_draft_tokens", "max_candidates", "num_children", "max_expansions"])
def test_an_offer_of_nothing_is_refused(field: str) -> None:
    """Such as that of a verifier that sends no limits."""
    offer = OWN.to_message()
    offer.ClearField(field)
    with pytest.raises(InvalidArgumentError) as caught:
        OWN.with_offer(offer)
    assert caught.value.field == f"limits.{field}"


@pytest.mark.parametrize(
    ("answer", "field"),
    [
        ({"max_draft_tokens": 5}, "max_draft_tokens"),
        ({"max_draft_tokens": 0}, "max_draft_tokens"),
        ({"max_candidates": 65}, "max_candidates"),
        ({"num_children": 5}, "num_children"),
        ({"num_children": 0}, "num_children"),
        ({"max_expansions": 513}, "max_expansions"),
        ({"max_expansions": 63}, "max_expansions"),
    ],
)
def test_an_answer_beyond_the_offer_is_refused(answer: dict[str, int], field: str) -> None:
    """Catches a drafter that does as if it had not been asked, and one that answers with no limits at all."""
    message = OWN.to_message()
    for name, value in answer.items():
        setattr(message, name, value)
    with pytest.raises(FailedPreconditionError, match=field):
        OWN.with_answer(message)
