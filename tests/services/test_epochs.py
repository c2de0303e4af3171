"""Drafter and verifier reach the same decisions, whatever happens to them and to what travels between them."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np
import pytest
from drafter_service.proposing import ANSWERED, OPENED

from drafter_service.sequence import DraftSequence
from engine.draft_tokens import DraftRows, DraftTokens
from outrider.protocol.epochs import first_difference
from outrider.protocol.sampling_parameters import SamplingParameters
from verifier_service.speculation import (
    ALONE,
    JOINING,
    LATE,
    MAX_TIMEOUTS_BEHIND,
    PLAIN,
    READY,
    WAITING,
    LinkKey,
    Speculation,
)

VOCABULARY = 3  # so small that proposals are often right by chance
TIMEOUT = 1.0


@pytest.mark.parametrize(
    ("proposed", "committed", "difference"),
    [
        ([], [], None),
        ([], [1], None),
        ([1], [], None),
        ([1, 2, 3], [1], None),
        ([1], [1, 2, 3], None),
        ([1, 2], [1, 2], None),
        ([2], [1], 0),
        ([1, 2], [1, 3], 1),
        ([1, 2, 3], [1, 2, 4, 3, 9], 2),
        ([1, 2, 3, 9], [1, 2, 4], 2),
        ([1, 5, 6], [1, 2, 3], 1),
    ],
)
def test_the_rule(proposed: list[int], committed: list[int], difference: int | None) -> None:
    assert first_difference(proposed, committed) == difference


@dataclass(frozen=True)
class Opened:
    token_ids: list[int]


@dataclass(frozen=True)
class Verdict:
    token_ids: list[int]
    num_committed: int
    epoch: int


@dataclass(frozen=True)
class Proposal:
    epoch: int
    position: int
    drafts: DraftTokens


@dataclass(frozen=True)
class NoProposal:
    position: int
    is_final: bool


@dataclass
class Drafter:
    """One incarnation of the drafter's side, with the two channels to it: first in, first out."""

    key: LinkKey
    to_drafter: deque[Opened | Verdict] = field(default_factory=deque)
    to_verifier: deque[Proposal | NoProposal] = field(default_factory=deque)
    # None before the opening has arrived, and when the drafter has refused.
    sequence: DraftSequence | None = None


class Simulation:
    """Both sides of one sequence. Each draft token's candidate stands for what it was drafted behind."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.committed = [self.random.randrange(VOCABULARY) for _ in range(self.random.randint(1, 3))]
        self.num_joined = 0
        self.length_limit = self.random.choice([12, 1000])
        self.contexts: list[list[int]] = []  # by candidate
        self.in_flight: list[int] | None = None  # the draft tokens of the step that the device works on
        self.seen: Counter[str] = Counter()
        self.join(Speculation)

    def join(self, begin: type[Speculation]) -> None:
        self.num_joined += 1
        self.drafter = Drafter(LinkKey("drafter", self.num_joined))
        self.speculation = begin(self.drafter.key)
        self.drafter.to_drafter.append(Opened(list(self.committed)))

    def leave(self, reason: str) -> None:
        self.speculation.leave()
        self.seen[reason] += 1

    # What the drafter does.

    def draft(self, *, always: bool = False) -> None:
        sequence = self.drafter.sequence
        if sequence is None or sequence.proposing.state is ANSWERED:
            return
        proposing = sequence.proposing
        luck = self.random.random() if not always else 0.0
        if luck < 0.75:
            tokens = [self.random.randrange(VOCABULARY) for _ in range(self.random.randint(1, 5))]
            proposing.propose(tokens)
            first = len(self.contexts)
            self.contexts += [sequence.token_ids + tokens[:index] for index in range(len(tokens))]
            serials = np.arange(first, len(self.contexts), dtype=np.int32)[:, None]
            rows = DraftRows(np.array(tokens, np.int32), serials, np.zeros(serials.shape, np.int32))
            self.drafter.to_verifier.append(Proposal(proposing.epoch, sequence.length, DraftTokens(tokens, rows)))
        elif luck < 0.98:
            proposing.find_nothing()
            self.drafter.to_verifier.append(NoProposal(sequence.length, is_final=False))
        else:
            self.drafter.sequence = None
            self.drafter.to_verifier.append(NoProposal(sequence.length, is_final=True))
            return
        for verdict in proposing.release():
            sequence.commit(*verdict)

    def deliver_to_drafter(self) -> None:
        if not self.drafter.to_drafter:
            return
        message, sequence = self.drafter.to_drafter.popleft(), self.drafter.sequence
        if isinstance(message, Opened):
            self.drafter.sequence = DraftSequence(
                sequence_id=1,
                token_ids=list(message.token_ids),
                num_prompt_tokens=1,
                sampling=SamplingParameters(),
                max_draft_tokens=5,
                wants_candidates=True,
            )
        elif sequence is not None:
            verdict = (message.token_ids, message.num_committed, message.epoch)
            if not sequence.proposing.hold(*verdict):
                sequence.commit(*verdict)

    # What the verifier does.

    def deliver_to_verifier(self) -> None:
        if not self.drafter.to_verifier:
            return
        message, speculation = self.drafter.to_verifier.popleft(), self.speculation
        if isinstance(message, NoProposal):
            if message.is_final:
                self.leave("refused")
            else:
                self.seen["nothing found" if message.position == len(self.committed) else "nothing, too late"] += 1
                speculation.find_nothing(message.position, self.committed, self.now)
            return
        is_late, num_held = len(self.committed) > message.position, len(speculation.drafts)
        num_stale = speculation.arrive(message.epoch, message.position, message.drafts, self.committed, self.now)
        num_fresh = len(speculation.drafts) - num_held
        assert num_fresh == len(message.drafts) - num_stale
        self.seen["late and useful" if is_late and num_fresh else "late and useless" if is_late else "in time"] += 1

    def launch(self) -> None:
        """As the scheduler does: never while it waits."""
        speculation = self.speculation
        if self.in_flight is not None or speculation.state is WAITING or len(self.committed) >= self.length_limit:
            return
        drafts = speculation.peek(self.random.randint(0, 4) if speculation.state is READY else 0)
        for index, (token_id, (serial,)) in enumerate(zip(drafts.token_ids, drafts.candidate_ids, strict=True)):
            # What the acceptance test relies on: it was drafted behind exactly what stands before it now.
            assert self.contexts[serial] == self.committed + drafts.token_ids[:index]
            assert drafts.rows.token_ids[drafts.first_row + index] == token_id
        self.in_flight = drafts.token_ids

    def come_back(self) -> None:
        if self.in_flight is None:
            return
        drafts, self.in_flight = self.in_flight, None
        num_accepted = self.random.randint(0, len(drafts))
        last = self.random.randrange(VOCABULARY)
        if num_accepted < len(drafts):
            # A one-hot draft token that was rejected is not the recovered one.
            last = self.random.choice([token for token in range(VOCABULARY) if token != drafts[num_accepted]])
        self.seen["rejected" if num_accepted < len(drafts) else "accepted" if drafts else "plain"] += 1
        new = [*drafts[:num_accepted], last]
        self.committed += new
        if self.speculation.state is ALONE:
            return
        self.speculation.commit(new, self.now, has_room=len(self.committed) + 1 < self.length_limit)
        self.drafter.to_drafter.append(Verdict(new, len(self.committed), self.speculation.epoch))

    def turn_the_clock(self) -> None:
        self.now += self.random.choice([0.125, 0.5, 1.0, 1.0])
        if self.speculation.give_up_waiting(self.now, TIMEOUT):
            self.seen["late"] += 1
        if self.speculation.is_hopeless(self.now, TIMEOUT):
            self.leave("hopeless")

    def change_the_drafter(self) -> None:
        if self.speculation.state is ALONE:
            self.join(lambda key: Speculation.joined(key, self.now))  # type: ignore[arg-type]
            self.seen["joined in mid-sequence"] += 1
        elif self.random.random() < 0.3:
            self.leave("lost")

    # What must hold.

    def check(self) -> None:
        if self.speculation.state is ALONE:
            # Nothing reaches it any more; what is at the drafter is closed.
            self.drafter = Drafter(self.drafter.key)
            return
        drafter, sequence = self.drafter, self.drafter.sequence
        if self.speculation.state in (WAITING, LATE) and sequence is not None:
            # Nobody waits for who waits for him.
            owes = sequence.proposing.state is not ANSWERED
            assert owes or drafter.to_drafter or drafter.to_verifier, f"{self.speculation.state} for ever"

    def settle(self) -> None:
        """Let all arrive, and the drafter answer: both sides know the same then, and nothing waits."""
        self.come_back()
        self.check()
        for _ in range(50):
            self.deliver_to_verifier()
            self.deliver_to_drafter()
            self.check()
        sequence = self.drafter.sequence
        if self.speculation.state is ALONE or sequence is None:
            return
        if sequence.proposing.state is not OPENED:
            assert sequence.token_ids == self.committed
            assert sequence.proposing.epoch == self.speculation.epoch
            # What the drafter still counts on is what the verifier still holds.
            assert sequence.proposing.proposed == self.speculation.drafts.token_ids
        for _ in range(3):  # to the opening, to a verdict that came before, to what was held back
            self.draft(always=True)
            self.deliver_to_verifier()
        assert sequence.token_ids == self.committed
        assert self.speculation.state in (READY, PLAIN, JOINING)

    def fall_silent(self) -> None:
        """Nothing arrives any more: the sequence goes on all the same, and leaves the drafter in the end."""
        for _ in range(MAX_TIMEOUTS_BEHIND + 8):
            if self.speculation.state is not ALONE:
                self.now += TIMEOUT
                self.speculation.give_up_waiting(self.now, TIMEOUT)
                assert self.speculation.state is not WAITING
                if self.speculation.is_hopeless(self.now, TIMEOUT):
                    self.leave("silent")
            self.length_limit = 1000
            length = len(self.committed)
            self.launch()
            self.come_back()
            assert len(self.committed) > length
        # After a step for each draft token at hand, at most, and the timeouts.
        assert self.speculation.state is ALONE


def test_both_sides_agree_whatever_happens() -> None:
    """Catches an epoch that one side ends and the other does not, drafts behind another prefix, and a deadlock.

    6,000 histories of random steps, deliveries, refusals, losses, other drafters and time; each channel is in order.
    """
    seen: Counter[str] = Counter()
    for seed in range(6000):
        simulation = Simulation(seed)
        chance = simulation.random
        moves = [
            (simulation.draft, chance.random() + 0.1),
            (simulation.deliver_to_verifier, chance.random() + 0.1),
            (simulation.deliver_to_drafter, chance.random() + 0.1),
            (simulation.launch, 0.4 * chance.random() + 0.1),
            (simulation.come_back, 0.4 * chance.random() + 0.1),
            (simulation.turn_the_clock, chance.choice([0.0, 0.02, 0.3, 3.0])),
            (simulation.change_the_drafter, chance.choice([0.0, 0.0, 0.05])),
        ]
        for move in chance.choices(*zip(*moves, strict=True), k=80):
            move()
            simulation.check()
        if seed % 3:
            simulation.settle()
        else:
            simulation.fall_silent()
        seen += simulation.seen
    # A simulation in which these do not happen proves nothing.
    expected = {"rejected", "accepted", "plain", "in time", "late and useful", "late and useless", "late", "silent"}
    expected |= {"nothing found", "nothing, too late", "refused", "lost", "hopeless", "joined in mid-sequence"}
    assert expected == set(seen)
    assert min(seen.values()) > 100, seen
