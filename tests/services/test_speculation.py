"""One sequence's speculation at the verifier: every state by every event, and what is remembered on the way."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from engine.draft_tokens import DraftRows, DraftTokens
from verifier_service.speculation import (
    MAX_BUFFERED_TOKENS,
    MAX_LATE_IN_A_ROW,
    MAX_TIMEOUTS_BEHIND,
    LinkKey,
    ProposalError,
    Speculation,
    State,
)

LINK = LinkKey("drafter:1", 1)
TIMEOUT = 0.5
JOINING, WAITING, READY, PLAIN, LATE, ALONE = State


def drafts(*token_ids: int) -> DraftTokens:
    """One-hot draft tokens."""
    none = np.empty((len(token_ids), 0), np.int32)
    return DraftTokens(list(token_ids), DraftRows(np.array(token_ids, np.int32), none, none))


class Subject:
    """A speculation with the tokens that it belongs to, and a clock that others turn."""

    def __init__(self, speculation: Speculation | None = None, committed: list[int] | None = None) -> None:
        self.speculation = speculation or Speculation(LINK)
        self.committed = committed or [1, 2, 3]
        self.now = 100.0

    def commit(self, *token_ids: int, has_room: bool = True) -> Subject:
        self.committed += token_ids
        self.speculation.commit(list(token_ids), self.now, has_room=has_room)
        return self

    def propose(self, *token_ids: int, position: int | None = None, epoch: int | None = None) -> int:
        """Let a proposal arrive, the one that is due unless told otherwise; how many of its tokens are too late."""
        epoch = self.speculation.epoch if epoch is None else epoch
        position = len(self.committed) + len(self.speculation.drafts) if position is None else position
        return self.speculation.arrive(epoch, position, drafts(*token_ids), self.committed, self.now, num_bytes=10)

    def find_nothing(self, position: int | None = None) -> None:
        position = len(self.committed) if position is None else position
        self.speculation.find_nothing(position, self.committed, self.now)

    def wait(self, seconds: float) -> bool:
        """Let time pass; whether that made the sequence late."""
        self.now += seconds
        return self.speculation.give_up_waiting(self.now, TIMEOUT)

    @property
    def held(self) -> tuple[State, int, list[int]]:
        """State, epoch and draft tokens."""
        return self.speculation.state, self.speculation.epoch, self.speculation.drafts.token_ids

    @property
    def is_hopeless(self) -> bool:
        return self.speculation.is_hopeless(self.now, TIMEOUT)


def brought_to(state: State) -> Subject:
    """A sequence in this state, with drafts 6 and 7 where it is READY."""
    subject = Subject()
    if state is not JOINING:
        subject.commit(5)
    match state:
        case State.READY:
            subject.propose(6, 7)
        case State.PLAIN:
            subject.find_nothing()
        case State.LATE:
            assert subject.wait(TIMEOUT)
        case State.ALONE:
            subject.speculation.leave()
    assert subject.speculation.state is state
    return subject


# What happens, and what follows on JOINING, WAITING, READY, PLAIN, LATE and ALONE.
TRANSITIONS: dict[str, tuple[Callable[[Subject], object], list[State]]] = {
    "a token": (lambda s: s.commit(9), [WAITING, WAITING, WAITING, WAITING, LATE, ALONE]),
    "a draft token": (lambda s: s.commit(6), [WAITING, WAITING, READY, WAITING, LATE, ALONE]),
    "all draft tokens": (lambda s: s.commit(6, 7), [WAITING, WAITING, WAITING, WAITING, LATE, ALONE]),
    "and a bonus token": (lambda s: s.commit(6, 7, 8), [WAITING, WAITING, WAITING, WAITING, LATE, ALONE]),
    "the last token but one": (lambda s: s.commit(9, has_room=False), [PLAIN, PLAIN, PLAIN, PLAIN, LATE, ALONE]),
    "a proposal": (lambda s: s.propose(8), [JOINING, READY, READY, READY, READY, ALONE]),
    "an old proposal": (lambda s: s.propose(8, epoch=-1), [JOINING, WAITING, READY, PLAIN, WAITING, ALONE]),
    "nothing found": (lambda s: s.find_nothing(), [JOINING, PLAIN, READY, PLAIN, PLAIN, ALONE]),
    "nothing found before": (lambda s: s.find_nothing(2), [JOINING, WAITING, READY, PLAIN, WAITING, ALONE]),
    "a moment": (lambda s: s.wait(0.9 * TIMEOUT), [JOINING, WAITING, READY, PLAIN, LATE, ALONE]),
    "the timeout": (lambda s: s.wait(TIMEOUT), [JOINING, LATE, READY, PLAIN, LATE, ALONE]),
    "leaving": (lambda s: s.speculation.leave(), [ALONE] * 6),
}


@pytest.mark.parametrize(
    ("before", "event", "after"),
    [(before, event, after[i]) for event, (_, after) in TRANSITIONS.items() for i, before in enumerate(State)],
    ids=lambda value: value.name if isinstance(value, State) else value,
)
def test_transitions(before: State, event: str, after: State) -> None:
    subject = brought_to(before)
    TRANSITIONS[event][0](subject)
    assert subject.speculation.state is after
    check(subject)


def check(subject: Subject) -> None:
    """What holds at any time."""
    speculation = subject.speculation
    state, has_drafts = speculation.state, bool(speculation.drafts.token_ids)
    assert (state is ALONE) == (speculation.drafter is None)
    assert has_drafts == (state is READY) or state is JOINING
    assert len(speculation.drafts) <= MAX_BUFFERED_TOKENS
    assert speculation.peek(2).token_ids == speculation.drafts.token_ids[:2]
    deadline = speculation.deadline(TIMEOUT)
    assert (deadline is not None) == (state is WAITING)
    if deadline is not None:
        assert speculation.is_overdue(deadline + 1e-6, TIMEOUT)
        assert not speculation.is_overdue(deadline - 1e-6, TIMEOUT)


@pytest.mark.parametrize(
    ("verdict", "held"),
    [
        ([6], (READY, 0, [7, 8])),
        ([6, 7], (READY, 0, [8])),
        ([6, 7, 8], (WAITING, 0, [])),
        ([6, 7, 8, 9], (WAITING, 0, [])),
        # One verdict ends one epoch: of the tokens that differ, only the first counts.
        ([9], (WAITING, 1, [])),
        ([9, 9, 9], (WAITING, 1, [])),
        ([6, 7, 9], (WAITING, 1, [])),
        ([9, 7, 8], (WAITING, 1, [])),
        ([6, 9, 8, 9], (WAITING, 1, [])),
    ],
)
def test_a_verdict_is_compared_with_the_drafts(verdict: list[int], held: tuple[State, int, list[int]]) -> None:
    """Catches draft tokens that are kept although what they stood behind was not committed."""
    subject = Subject().commit(5)
    subject.propose(6, 7, 8)
    assert subject.commit(*verdict).held == held


@pytest.mark.parametrize(
    ("verdict", "num_late", "held"),
    [
        ([6], 1, (READY, 0, [7, 8])),
        ([6, 7, 8], 3, (WAITING, 0, [])),
        ([6, 7, 8, 9, 9], 3, (WAITING, 0, [])),
        ([9], 3, (WAITING, 1, [])),
        ([6, 9], 3, (WAITING, 1, [])),
        ([6, 7, 8, 9], 3, (WAITING, 0, [])),
    ],
)
@pytest.mark.parametrize("before", [JOINING, LATE], ids=["joining", "late"])
def test_a_proposal_is_compared_with_what_was_committed_meanwhile(
    before: State, verdict: list[int], num_late: int, held: tuple[State, int, list[int]]
) -> None:
    """Catches a late proposal that is verified one position off, not at all, or whose epoch does not end."""
    subject = brought_to(before)
    position = len(subject.committed)
    subject.commit(*verdict)
    assert subject.propose(6, 7, 8, position=position) == num_late
    assert subject.held == held
    # In the next epoch, or the same, the answer to the verdict is as good as any.
    if held[0] is WAITING:
        assert subject.propose(4) == 0
        assert subject.held == (READY, held[1], [4])


def test_the_first_token_meets_no_draft() -> None:
    """Catches a first token that depends on whether the drafter or the target was faster."""
    subject = Subject()
    subject.propose(6, 7)
    assert subject.speculation.state is JOINING
    assert subject.commit(6).held == (READY, 0, [7])
    subject = Subject()
    subject.propose(6, 7)
    assert subject.commit(9).held == (WAITING, 1, [])


def test_proposals_queue_up() -> None:
    subject = Subject().commit(5)
    subject.propose(6, 7)
    subject.propose(8)
    assert subject.held == (READY, 0, [6, 7, 8])
    assert subject.speculation.peek(2).token_ids == [6, 7]
    assert subject.speculation.peek(9).token_ids == [6, 7, 8]
    assert subject.commit(6, 7).held == (READY, 0, [8])


def test_candidates_stay_with_their_tokens() -> None:
    """Catches token ids and q that are cut at different places."""
    rows = DraftRows(np.array([6, 7]), np.array([[6, 8], [7, 9]]), np.array([[65000, 536], [60000, 5536]]))
    speculation = Speculation(LINK)
    speculation.arrive(0, 3, DraftTokens([6, 7], rows), [1, 2, 3, 6], 0.0)
    draft = speculation.peek(1)
    assert draft.candidate_ids.tolist() == [[7, 9]]
    assert draft.candidate_weights.tolist() == [[60000, 5536]]


@pytest.mark.parametrize("state", list(State)[:-1], ids=lambda state: state.name)
@pytest.mark.parametrize(
    ("fields", "problem"),
    [({"epoch": 1}, "epoch"), ({"epoch": 2**32 - 1}, "epoch"), ({"position": 99}, "position")],
    ids=["epoch from the future", "last epoch of all", "gap"],
)
def test_what_breaks_the_protocol(state: State, fields: dict[str, int], problem: str) -> None:
    subject = brought_to(state)
    before = subject.held
    with pytest.raises(ProposalError, match=problem):
        subject.propose(8, **fields)
    assert subject.held == before


@pytest.mark.parametrize("position", [0, 3, 5, 7, 2**63])
def test_drafts_at_hand_are_neither_repeated_nor_skipped(position: int) -> None:
    subject = brought_to(READY)  # 4 committed tokens, 2 draft tokens
    with pytest.raises(ProposalError, match="position"):
        subject.propose(8, position=position)


def test_a_flood_of_proposals_is_refused() -> None:
    """Catches a drafter that fills the verifier's memory."""
    subject = Subject().commit(5)
    for _ in range(MAX_BUFFERED_TOKENS // 2):
        subject.propose(1, 1)
    with pytest.raises(ProposalError, match="wait"):
        subject.propose(1)
    assert len(subject.speculation.drafts) == MAX_BUFFERED_TOKENS


def test_who_keeps_a_sequence_waiting_too_often_is_hopeless() -> None:
    """Catches a wait of the whole timeout at every token."""
    subject = Subject().commit(5)
    subject.propose(6)
    for number in range(MAX_LATE_IN_A_ROW):
        assert not subject.is_hopeless
        subject.commit(9)
        assert subject.wait(TIMEOUT)
        if number < MAX_LATE_IN_A_ROW - 1:
            subject.commit(9)
            subject.propose(6, epoch=0)  # of the epoch before: the drafter lives, and is of no use
            assert subject.speculation.state is WAITING
    assert subject.is_hopeless


@pytest.mark.parametrize("answer", [lambda s: s.propose(6), lambda s: s.find_nothing()], ids=["proposal", "nothing"])
def test_an_answer_in_time_makes_up_for_late_ones(answer: Callable[[Subject], object]) -> None:
    subject = Subject().commit(5)
    for _ in range(5 * MAX_LATE_IN_A_ROW):
        subject.propose(6)
        subject.commit(9)
        assert subject.wait(TIMEOUT)
        assert not subject.is_hopeless
        answer(subject)
        subject.commit(9)


def test_a_long_prompt_at_the_drafter_is_no_reason_to_leave_it_afterwards() -> None:
    """Catches a drafter that is given up for what it did before its first proposal."""
    subject = Subject().commit(5)
    for _ in range(MAX_LATE_IN_A_ROW + 1):
        assert subject.wait(TIMEOUT)
        subject.find_nothing(2)  # a sign of life, and no proposal
    assert subject.wait(TIMEOUT)
    assert not subject.is_hopeless


def test_who_never_answers_is_hopeless_in_the_end() -> None:
    """Catches a sequence that hopes for ever: LATE must end."""
    subject = brought_to(LATE)
    subject.now += 0.99 * MAX_TIMEOUTS_BEHIND * TIMEOUT
    subject.commit(9)
    assert not subject.is_hopeless
    subject.now += 0.02 * MAX_TIMEOUTS_BEHIND * TIMEOUT
    assert subject.is_hopeless
    subject.find_nothing()
    assert not subject.is_hopeless


def test_joined_in_mid_sequence() -> None:
    """Catches steps that wait while a drafter computes the whole text, and answers to it that are taken for lost."""
    subject = Subject(Speculation.joined(LINK, 100.0), committed=[1, 2, 3, 4, 5, 6])
    assert subject.speculation.state is LATE
    assert not subject.wait(TIMEOUT)
    subject.commit(7)
    assert subject.propose(7, 8, position=6) == 1
    assert subject.held == (READY, 0, [8])
    # One that differs is an answer as well: to the verdict, the next one comes soon.
    subject = Subject(Speculation.joined(LINK, 100.0), committed=[1, 2, 3, 4, 5, 6]).commit(9)
    assert subject.propose(7, 8, position=6) == 2
    assert subject.held == (WAITING, 1, [])
    assert not Subject(Speculation.joined(LINK, 100.0)).is_hopeless


def test_what_the_trace_wants() -> None:
    """Catches a wait that is told twice, or taken for the next one's."""
    subject = Subject().commit(5)
    subject.now += 0.25
    subject.propose(6)
    assert subject.speculation.take_measured() == (0.25, 10)
    assert subject.speculation.take_measured() == (0.0, 0)
    subject.commit(9)
    subject.now += 0.125
    subject.find_nothing()
    assert subject.speculation.take_measured() == (0.125, 0)
    # A wait that was given up took its time, whatever comes before the next step.
    subject.commit(9)
    subject.wait(TIMEOUT)
    subject.propose(6)
    subject.speculation.leave()
    assert subject.speculation.take_measured() == (TIMEOUT, 10)
    assert subject.speculation.address == LINK.address


def test_without_a_drafter() -> None:
    alone = Subject(Speculation(None)).commit(5)
    assert alone.held == (ALONE, 0, [])
    assert (alone.speculation.drafter, alone.speculation.address) == (None, "")


def test_whatever_a_drafter_says() -> None:
    """Catches a state that no sequence should be in, over 2,000 histories of nonsense and time.

    Most proposals are nearly right. One that breaks the protocol costs the sequence its drafter.
    """
    seen: Counter[str] = Counter()
    for seed in range(2000):
        chance = random.Random(seed)
        subject = Subject() if chance.random() < 0.7 else Subject(Speculation.joined(LINK, 100.0))
        for _ in range(40):
            speculation = subject.speculation
            match chance.choice(["commit", "commit", "propose", "propose", "nothing", "time"]):
                case "commit" if speculation.state is not WAITING:
                    tokens = speculation.peek(chance.randint(0, 3)).token_ids
                    subject.commit(*tokens[: chance.randint(0, 3)], chance.randrange(3), has_room=chance.random() < 0.9)
                case "propose":
                    near = len(subject.committed) + len(speculation.drafts) + chance.choices([0, -1, 1], [40, 2, 1])[0]
                    epoch = speculation.epoch + chance.choices([0, -1, 1], [40, 6, 1])[0]
                    try:
                        subject.propose(*chance.choices(range(3), k=chance.randint(1, 4)), position=near, epoch=epoch)
                    except ProposalError:
                        speculation.leave()
                case "nothing":
                    subject.find_nothing(len(subject.committed) - chance.choice([0, 0, 1, 5]))
                case "time":
                    subject.wait(TIMEOUT * chance.choice([0.1, 1, 11]))
                    if subject.is_hopeless:
                        speculation.leave()
                        seen["hopeless"] += 1
            check(subject)
            seen[speculation.state.name] += 1
    assert all(seen[state.name] > 1000 for state in State), seen
    assert seen["hopeless"] > 100, seen
