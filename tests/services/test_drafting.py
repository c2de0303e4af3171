"""Links to drafters, and how long their sequences wait: what follows for which sequence, and for whole links."""

from __future__ import annotations

import pytest

from outrider.v1 import common_pb2, drafter_pb2
from tests.services.sequences import LINK, commit, propose, target_sequence
from tests.services.trees import chain, expansions
from verifier_service.drafting import DraftingLinks
from verifier_service.gathering import Gathering
from verifier_service.sequence import TargetSequence
from verifier_service.speculation import AHEAD, LATE, MAX_TIMEOUTS_BEHIND, PLAIN, WAITING, LinkKey

OTHER = LinkKey("drafter:2", 1)
TIMEOUT = 0.5


class Clock:
    now = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("verifier_service.drafting.time.monotonic", lambda: clock.now)
    return clock


@pytest.fixture
def links(clock: Clock) -> DraftingLinks:
    links = DraftingLinks(TIMEOUT, Gathering())
    links.add(LINK, 0)
    links.add(OTHER, 20)
    return links


def decoding(drafter: LinkKey | None, length: int = 4, *, takes_turns: bool = True) -> TargetSequence:
    """A sequence whose first token was committed at time 0."""
    sequence = target_sequence(length, drafter=drafter, takes_turns=takes_turns, num_computed=length)
    commit(sequence, [0], 0)
    return sequence


NO_MATCH = drafter_pb2.REFUSAL_REASON_NO_MATCH
LOST = common_pb2.FALLBACK_REASON_DRAFTER_LOST


@pytest.mark.parametrize(
    ("reason", "fallback"),
    [
        (drafter_pb2.REFUSAL_REASON_MAX_LENGTH, common_pb2.FALLBACK_REASON_DRAFTER_MAX_LENGTH),
        (drafter_pb2.REFUSAL_REASON_OVERLOADED, common_pb2.FALLBACK_REASON_DRAFTER_OVERLOADED),
        (drafter_pb2.REFUSAL_REASON_UNSPECIFIED, LOST),
        (drafter_pb2.REFUSAL_REASON_UNKNOWN_SEQUENCE, LOST),
        (drafter_pb2.REFUSAL_REASON_BAD_MESSAGE, LOST),
        (drafter_pb2.REFUSAL_REASON_INTERNAL, LOST),
        (77, LOST),
        (NO_MATCH, None),
    ],
)
def test_refusals(links: DraftingLinks, reason: int, fallback: int | None) -> None:
    """Catches a refusal that is taken for another, and a reason of a later version that stops the engine."""
    sequence = decoding(LINK)
    refusal = drafter_pb2.Refusal(sequence_id=1, num_committed=sequence.length)
    refusal.reason = reason  # type: ignore[assignment]
    assert links.take_refusal(sequence, refusal) == fallback
    assert sequence.speculation.state is (PLAIN if reason == NO_MATCH else WAITING)


def test_a_link_that_owes_and_is_silent(clock: Clock, links: DraftingLinks) -> None:
    """Catches a link that is given up although frames come, or although nobody waits for it."""
    waiting, elsewhere, alone = decoding(LINK), decoding(OTHER), decoding(None)
    running = [waiting, elsewhere, alone]
    propose(elsewhere, [1])
    clock.now = 0.75 * TIMEOUT
    assert links.silent(running) == set()
    clock.now = TIMEOUT
    assert links.silent(running) == {LINK}
    assert links.has_heard(LINK)
    assert links.silent(running) == set()
    # It lives and does not answer: the sequence is late, and the link is silent again after another timeout.
    assert links.go_on_plainly(running) == []
    assert waiting.speculation.state is LATE
    clock.now = 2 * TIMEOUT
    assert links.silent(running) == {LINK}
    links.remove(LINK)
    assert links.silent(running) == set()
    assert not links.has_heard(LINK)


def test_a_drafter_that_runs_ahead_owes_roots_alone(clock: Clock, links: DraftingLinks) -> None:
    """Catches a link that is given up because nothing was worth a row, and one that is silent for ever."""
    running = [sequence := decoding(LINK, takes_turns=False)]
    clock.now = 0.75 * TIMEOUT
    assert links.silent(running) == set()
    clock.now = TIMEOUT
    assert links.silent(running) == {LINK}
    propose(sequence, [1])
    clock.now = 100 * TIMEOUT
    assert links.silent(running) == set()
    assert links.go_on_plainly(running) == []
    assert links.time_until_late(running) is None
    assert links.num_late == 0
    commit(sequence, [1, 2], 1)  # of the second nothing was known
    clock.now = 200 * TIMEOUT
    assert links.silent(running) == set()
    assert sequence.speculation.state is AHEAD


def test_what_became_of_trees_is_counted(clock: Clock, links: DraftingLinks) -> None:
    """Catches expansions that count as walked twice, and first tokens that count as outcomes."""
    sequence = target_sequence(4, num_computed=4)
    for tokens, drafts in (([0], []), ([5, 6, 9], [5, 6, 7]), ([1], [1]), ([3], [4])):
        if drafts:
            answer = expansions(
                *chain(drafts, first_id := links.trees.num_expansions), num_committed=sequence.length, first_id=first_id
            )
            links.take(sequence, answer, clock.now)
        sequence.token_ids += tokens
        links.commit(sequence, clock.now)
    assert (links.trees.num_expansions, links.trees.num_walked) == (5, 5)
    assert {outcome.value: number for outcome, number in links.trees.outcomes.items()} == {
        "first_child": 1,
        "other_child": 0,
        "miss": 2,
        "unseen": 0,
    }


def test_who_has_waited_long_enough(clock: Clock, links: DraftingLinks) -> None:
    """Catches a count of late answers that grows with each step, and a sequence that hopes for ever."""
    waiting, alone = decoding(LINK), decoding(None)
    running = [waiting, alone, target_sequence(4)]
    assert links.time_until_late(running) == TIMEOUT
    clock.now = TIMEOUT
    assert links.time_until_late(running) == 0.001, "a clock's tick above zero"
    for _ in range(3):
        assert links.go_on_plainly(running) == []
        assert links.num_late == 1
    assert links.time_until_late(running) is None
    clock.now += MAX_TIMEOUTS_BEHIND * TIMEOUT
    assert links.go_on_plainly(running) == [waiting]


def test_who_outgrows_a_drafter(links: DraftingLinks) -> None:
    """Catches a chain of four tokens that ends behind the context of 20."""
    assert not links.is_outgrown_by(decoding(OTHER, 15))
    assert links.is_outgrown_by(decoding(OTHER, 16))
    # The first token of all meets no draft.
    assert not links.is_outgrown_by(target_sequence(15, drafter=OTHER))
    assert links.is_outgrown_by(target_sequence(16, drafter=OTHER))
    assert not links.is_outgrown_by(decoding(LINK, 50))


def test_retired_links_are_idle_once_nobody_uses_them(links: DraftingLinks) -> None:
    sequences = [decoding(LINK), decoding(None)]
    for key in (LINK, OTHER):
        links.retire(key, is_retired=True)
    assert links.take_idle(sequences) == [OTHER]
    assert links.take_idle(sequences) == []
    sequences[0].speculation.leave()
    assert links.take_idle(sequences) == [LINK]
