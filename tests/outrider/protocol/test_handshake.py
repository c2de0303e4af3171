"""How verifier and drafter settle the size of proposals."""

from __future__ import annotations

import pytest

from outrider.protocol.errors import FailedPreconditionError, InvalidArgumentError
from outrider.protocol.handshake import DraftLimits
from outrider.v1 import drafter_pb2

OWN = DraftLimits(max_draft_tokens=4, max_candidates=64)


@pytest.mark.parametrize(
    ("offer", "agreed"),
    [
        ((4, 64), (4, 64)),
        ((2, 64), (2, 64)),
        ((4, 9), (4, 9)),
        ((32, 1024), (4, 64)),
        ((1, 1), (1, 1)),
        ((9, 8), (4, 8)),
    ],
)
def test_the_lower_of_both_sides_holds(offer: tuple[int, int], agreed: tuple[int, int]) -> None:
    offered = DraftLimits(*offer)
    found = OWN.with_offer(offered.to_message())
    assert found == DraftLimits(*agreed)
    assert offered.with_answer(found.to_message()) == found


def test_no_candidates_are_an_answer() -> None:
    """As prompt lookup sends none."""
    found = DraftLimits(32, max_candidates=0).with_offer(OWN.to_message())
    assert found == DraftLimits(4, 0)
    assert OWN.with_answer(found.to_message()) == found


@pytest.mark.parametrize("field", ["max_draft_tokens", "max_candidates"])
def test_an_offer_of_nothing_is_refused(field: str) -> None:
    """Such as that of a verifier that sends no limits."""
    offer = OWN.to_message()
    offer.ClearField(field)
    with pytest.raises(InvalidArgumentError) as caught:
        OWN.with_offer(offer)
    assert caught.value.field == f"limits.{field}"


@pytest.mark.parametrize(
    ("answer", "field"),
    [((5, 64), "max_draft_tokens"), ((0, 64), "max_draft_tokens"), ((4, 65), "max_candidates")],
)
def test_an_answer_beyond_the_offer_is_refused(answer: tuple[int, int], field: str) -> None:
    """Catches a drafter that does as if it had not been asked, and one that answers with no limits at all."""
    with pytest.raises(FailedPreconditionError, match=field):
        OWN.with_answer(drafter_pb2.DraftLimits(max_draft_tokens=answer[0], max_candidates=answer[1]))
