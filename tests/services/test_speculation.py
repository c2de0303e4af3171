"""One sequence's speculation at the verifier: every state by every event, and what is remembered on the way."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from outrider.protocol.expansions import ROOT
from tests.services.trees import Node, chain, expansions
from verifier_service.draft_tree import ExpansionError
from verifier_service.speculation import (
    AHEAD,
    ALONE,
    JOINING,
    LATE,
    MAX_LATE_IN_A_ROW,
    MAX_TIMEOUTS_BEHIND,
    PLAIN,
    READY,
    WAITING,
    LinkKey,
    Speculation,
    State,
)

LINK = LinkKey("drafter:1", 1)
TIMEOUT = 0.5


class Subject:
    """A speculation with the tokens that it belongs to, a drafter's count of ids, and a clock that others turn."""

    def __init__(self, speculation: Speculation | None = None, committed: list[int] | None = None) -> None:
        self.speculation = speculation or Speculation(LINK)
        self.committed = committed or [1, 2, 3]
        self.next_id = 0
        self.now = 100.0

    def commit(self, *token_ids: int, has_room: bool = True) -> Subject:
        self.committed += token_ids
        self.speculation.commit(self.committed, self.now, has_room=has_room)
        return self

    def draft(self, *token_ids: int, num_committed: int | None = None) -> Subject:
        """Let a root and a chain of first children arrive, behind what is committed unless told otherwise."""
        nodes = chain(token_ids, self.next_id)
        return self.take(nodes, len(self.committed) if num_committed is None else num_committed)

    def take(self, nodes: Sequence[Node], num_committed: int) -> Subject:
        first_id, self.next_id = self.next_id, self.next_id + len(nodes)
        frame = expansions(*nodes, num_committed=num_committed, first_id=first_id)
        self.speculation.take(frame, self.committed, self.now)
        return self

    def find_nothing(self, num_committed: int | None = None) -> None:
        num_committed = len(self.committed) if num_committed is None else num_committed
        self.speculation.find_nothing(num_committed, self.committed, self.now)

    def wait(self, seconds: float) -> bool:
        """Let time pass; whether that made the sequence late."""
        self.now += seconds
        return self.speculation.give_up_waiting(self.now, TIMEOUT)

    @property
    def held(self) -> tuple[State, list[int]]:
        """State and draft tokens."""
        return self.speculation.state, self.speculation.chain(99).token_ids

    @property
    def is_hopeless(self) -> bool:
        return self.speculation.is_hopeless(self.now, TIMEOUT)


def brought_to(state: State) -> Subject:
    """A sequence in this state, with drafts 6 and 7 where it is READY or AHEAD."""
    subject = Subject(Speculation(LINK, takes_turns=state is not AHEAD))
    if state is not JOINING:
        subject.commit(5)
    match state:
        case State.READY | State.AHEAD:
            subject.draft(6, 7)
        case State.PLAIN:
            subject.find_nothing()
        case State.LATE:
            assert subject.wait(TIMEOUT)
        case State.ALONE:
            subject.speculation.leave()
    assert subject.speculation.state is state
    return subject


# What happens, and what follows on JOINING, WAITING, READY, PLAIN, LATE, AHEAD and ALONE.
TRANSITIONS: dict[str, tuple[Callable[[Subject], object], list[State]]] = {
    "a token": (lambda s: s.commit(9), [WAITING, WAITING, WAITING, WAITING, LATE, AHEAD, ALONE]),
    "a draft token": (lambda s: s.commit(6), [WAITING, WAITING, WAITING, WAITING, LATE, AHEAD, ALONE]),
    "and a bonus token": (lambda s: s.commit(6, 7, 8), [WAITING, WAITING, WAITING, WAITING, LATE, AHEAD, ALONE]),
    "the last but one": (lambda s: s.commit(9, has_room=False), [PLAIN, PLAIN, PLAIN, PLAIN, LATE, AHEAD, ALONE]),
    "an answer": (lambda s: s.draft(8), [JOINING, READY, READY, PLAIN, READY, AHEAD, ALONE]),
    "an old answer": (lambda s: s.draft(8, num_committed=2), [JOINING, WAITING, PLAIN, PLAIN, WAITING, AHEAD, ALONE]),
    "nothing found": (lambda s: s.find_nothing(), [JOINING, PLAIN, READY, PLAIN, PLAIN, AHEAD, ALONE]),
    "nothing before": (lambda s: s.find_nothing(2), [JOINING, WAITING, READY, PLAIN, WAITING, AHEAD, ALONE]),
    "a moment": (lambda s: s.wait(0.9 * TIMEOUT), [JOINING, WAITING, READY, PLAIN, LATE, AHEAD, ALONE]),
    "the timeout": (lambda s: s.wait(TIMEOUT), [JOINING, LATE, READY, PLAIN, LATE, AHEAD, ALONE]),
    "leaving": (lambda s: s.speculation.leave(), [ALONE] * 7),
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
    state, num_drafts = speculation.state, speculation.num_drafts
    assert (state is ALONE) == (speculation.drafter is None)
    assert (num_drafts > 0) == (state is READY) or state is AHEAD
    assert len(speculation.chain(99)) == num_drafts
    assert len(speculation.chain(2)) == min(num_drafts, 2)
    if num_drafts:
        assert num_drafts == speculation.tree.chain_length(len(subject.committed))
    deadline = speculation.deadline(TIMEOUT)
    assert (deadline is not None) == (state is WAITING)
    if deadline is not None:
        assert speculation.is_overdue(deadline + 1e-6, TIMEOUT)
        assert not speculation.is_overdue(deadline - 1e-6, TIMEOUT)


def test_in_turns_a_step_waits_for_the_whole_answer() -> None:
    """Catches drafts that are tested or not by what was faster: a seed's tokens would depend on it."""
    subject = Subject().commit(5).draft(6, 7, 8)
    # The drafter's tree has more for what was committed, and the answer to it comes.
    assert subject.commit(6).held == (WAITING, [])
    subject.take([Node(2, 0, [9])], num_committed=5)
    assert subject.held == (READY, [7, 8, 9])
    # An answer that brings nothing for this place.
    subject.commit(4)
    subject.take([Node(3, 0, [10])], num_committed=6)
    assert subject.held == (PLAIN, [])


def test_the_first_token_meets_no_draft() -> None:
    """Catches a first token that depends on whether the drafter or the target was faster."""
    for takes_turns in (True, False):
        subject = Subject(Speculation(LINK, takes_turns=takes_turns)).draft(6, 7)
        assert subject.held == (JOINING, [])
    assert subject.commit(6).held == (AHEAD, [7])


def test_ahead_of_the_target_what_is_there_is_taken() -> None:
    subject = Subject(Speculation(LINK, takes_turns=False)).draft(6, 7, 8).commit(6)
    assert subject.held == (AHEAD, [7, 8])
    subject.take([Node(2, 0, [9])], num_committed=3)
    assert subject.held == (AHEAD, [7, 8, 9])
    assert subject.commit(7, 8).held == (AHEAD, [9])
    assert subject.commit(4).held == (AHEAD, [])
    assert subject.draft(5).held == (AHEAD, [5])


def test_ahead_of_the_target_only_a_root_is_owed() -> None:
    """Catches a drafter that is given up because nothing was worth a row, or because it has found nothing."""
    subject = Subject(Speculation(LINK, takes_turns=False))
    assert not subject.speculation.is_overdue(1e9, TIMEOUT), "a prompt takes its time"
    subject.commit(5)
    assert subject.speculation.is_overdue(subject.now + TIMEOUT, TIMEOUT), "the first root"
    subject.draft(6)
    subject.commit(6)
    assert subject.held == (AHEAD, [])
    assert not subject.speculation.is_overdue(1e9, TIMEOUT), "the child of a child"
    subject.now += 50
    subject.commit(9)
    assert not subject.speculation.is_overdue(1e9, TIMEOUT), "it was not known of"
    subject.take([Node(0, 0, [7])], num_committed=4)
    assert subject.speculation.tree.is_lost, "a miss, found late"
    subject.commit(8)
    assert not subject.speculation.is_overdue(subject.now + 0.9 * TIMEOUT, TIMEOUT)
    assert subject.speculation.is_overdue(subject.now + TIMEOUT, TIMEOUT)
    subject.find_nothing()
    assert not subject.speculation.is_overdue(1e9, TIMEOUT)
    subject.now += 50
    subject.commit(9)
    assert not subject.speculation.is_overdue(subject.now + 0.9 * TIMEOUT, TIMEOUT)
    assert subject.speculation.is_overdue(subject.now + TIMEOUT, TIMEOUT)
    assert not subject.is_hopeless


@pytest.mark.parametrize("state", list(State)[:-1], ids=lambda state: state.name)
def test_what_breaks_the_protocol(state: State) -> None:
    subject = brought_to(state)
    before = subject.held
    with pytest.raises(ExpansionError, match="num_committed"):
        subject.draft(8, num_committed=99)
    assert subject.held == before


def test_who_keeps_a_sequence_waiting_too_often_is_hopeless() -> None:
    """Catches a wait of the whole timeout at every token."""
    subject = Subject().commit(5)
    subject.draft(6)
    for number in range(MAX_LATE_IN_A_ROW):
        assert not subject.is_hopeless
        subject.commit(9)
        assert subject.wait(TIMEOUT)
        if number < MAX_LATE_IN_A_ROW - 1:
            subject.commit(9)
            subject.draft(6, num_committed=4)  # to the verdict before: the drafter lives, and is of no use
            assert subject.speculation.state is WAITING
    assert subject.is_hopeless


@pytest.mark.parametrize("answer", [lambda s: s.draft(6), lambda s: s.find_nothing()], ids=["drafts", "nothing"])
def test_an_answer_in_time_makes_up_for_late_ones(answer: Callable[[Subject], object]) -> None:
    subject = Subject().commit(5)
    for _ in range(5 * MAX_LATE_IN_A_ROW):
        subject.draft(6)
        subject.commit(9)
        assert subject.wait(TIMEOUT)
        assert not subject.is_hopeless
        answer(subject)
        subject.commit(9)


def test_a_long_prompt_at_the_drafter_is_no_reason_to_leave_it_afterwards() -> None:
    """Catches a drafter that is given up for what it did before its first answer."""
    subject = Subject().commit(5)
    for _ in range(MAX_LATE_IN_A_ROW + 1):
        assert subject.wait(TIMEOUT)
        subject.find_nothing(2)  # a sign of life, and no drafts
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
    # What comes for the text before is an answer as well: to the verdict, the next one comes soon.
    assert subject.draft(7, 8, num_committed=6).held == (WAITING, [])
    assert subject.draft(8, 9).held == (READY, [8, 9])
    assert not Subject(Speculation.joined(LINK, 100.0)).is_hopeless
    subject = Subject(Speculation.joined(LINK, 100.0, takes_turns=False), committed=[1, 2, 3, 4, 5, 6])
    assert subject.commit(7).held == (AHEAD, [])
    assert subject.draft(7, 8, num_committed=6).held == (AHEAD, [8])


def test_what_the_trace_wants() -> None:
    """Catches a wait that is told twice, or taken for the next one's."""
    subject = Subject().commit(5)
    subject.now += 0.25
    subject.draft(6)
    assert subject.speculation.take_measured() == (0.25, 11)
    assert subject.speculation.take_measured() == (0.0, 0)
    subject.commit(9)
    subject.now += 0.125
    subject.find_nothing()
    assert subject.speculation.take_measured() == (0.125, 0)
    # A wait that was given up took its time, whatever comes before the next step.
    subject.commit(9)
    subject.wait(TIMEOUT)
    subject.draft(6)
    subject.speculation.leave()
    assert subject.speculation.take_measured() == (TIMEOUT, 11)
    assert subject.speculation.address == LINK.address


def test_without_a_drafter() -> None:
    alone = Subject(Speculation(None)).commit(5)
    assert alone.held == (ALONE, [])
    assert (alone.speculation.drafter, alone.speculation.address) == (None, "")


def test_whatever_a_drafter_says() -> None:
    """Catches a state that no sequence should be in, over 2,000 histories of nonsense and time.

    Most frames are nearly right. One that breaks the protocol costs the sequence its drafter.
    """
    seen: Counter[str] = Counter()
    for seed in range(2000):
        chance = random.Random(seed)
        takes_turns = chance.random() < 0.7
        is_new = chance.random() < 0.7
        subject = Subject(
            Speculation(LINK, takes_turns=takes_turns)
            if is_new
            else Speculation.joined(LINK, 100.0, takes_turns=takes_turns)
        )
        for _ in range(40):
            speculation = subject.speculation
            match chance.choice(["commit", "commit", "draft", "draft", "nothing", "time"]):
                case "commit" if speculation.state is not WAITING:
                    tokens = speculation.chain(chance.randint(0, 3)).token_ids
                    subject.commit(*tokens[: chance.randint(0, 3)], chance.randrange(3), has_room=chance.random() < 0.9)
                case "draft":
                    behind = chance.choices([0, 1, -1], [40, 6, 1])[0]
                    parents = chance.choices([ROOT, *range(max(subject.next_id - 4, 0), subject.next_id)], k=1)
                    nodes = [Node(parent, 0, [chance.randrange(3)]) for parent in parents]
                    num_more = chance.randint(0, 3)
                    nodes += [Node(subject.next_id + place, 0, [chance.randrange(3)]) for place in range(num_more)]
                    try:
                        subject.take(nodes, len(subject.committed) - behind)
                    except ExpansionError:
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
            seen["drafts"] += speculation.num_drafts > 0
    assert all(seen[state.name] > 1000 for state in State), seen
    assert seen["hopeless"] > 100, seen
    assert seen["drafts"] > 5000, seen
