"""Drafter and verifier reach the same decisions, whatever the delays between them."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field

import pytest

from drafter_service.sequence import DraftSequence
from engine.draft_tokens import DraftTokens
from outrider.protocol.errors import InvalidArgumentError
from outrider.protocol.sampling_parameters import SamplingParameters
from outrider.protocol.wire import pack_tokens, unpack_tokens
from outrider.v1 import drafter_pb2
from verifier_service.proposal_buffer import ProposalBuffer, parse_proposals

VOCABULARY = 3  # so small that proposals are often right by chance


def draft_sequence(token_ids: list[int], max_draft_tokens: int = 4) -> DraftSequence:
    return DraftSequence(
        sequence_id=1,
        token_ids=list(token_ids),
        num_prompt_tokens=len(token_ids),
        sampling=SamplingParameters(),
        max_draft_tokens=max_draft_tokens,
        wants_candidates=False,
    )


def test_a_verdict_that_agrees_leaves_the_rest_of_the_proposal() -> None:
    sequence = draft_sequence([1, 2])
    sequence.proposed, sequence.wants_draft, sequence.num_computed = [0, 1, 2], False, 4
    sequence.commit([0], 3, 0)
    assert (sequence.epoch, sequence.proposed, sequence.wants_draft) == (0, [1, 2], False)
    assert sequence.num_computed == 4
    sequence.commit([1, 2, 2], 6, 0)
    assert (sequence.epoch, sequence.proposed, sequence.wants_draft) == (0, [], True)
    assert sequence.num_computed == 4


def test_a_verdict_that_differs_truncates_to_the_committed_prefix() -> None:
    """Catches a drafter that goes on with keys and values of tokens that were rejected."""
    sequence = draft_sequence([1, 2])
    sequence.proposed, sequence.wants_draft, sequence.num_computed = [0, 1, 2], False, 4
    sequence.commit([0, 2], 4, 0)
    assert (sequence.epoch, sequence.proposed, sequence.wants_draft) == (1, [], True)
    assert sequence.num_computed == 3


@pytest.mark.parametrize(
    ("token_ids", "num_committed", "epoch", "field"),
    [([], 2, 0, "token_ids"), ([0], 4, 0, "num_committed"), ([0], 2, 0, "num_committed"), ([0], 3, 1, "epoch")],
)
def test_a_verdict_that_contradicts_what_went_before(
    token_ids: list[int], num_committed: int, epoch: int, field: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=f"verdict.{field}"):
        draft_sequence([1, 2]).commit(token_ids, num_committed, epoch)


@dataclass
class Simulation:
    """Both sides of one sequence, with a queue in each direction whose messages arrive when chance wants it.

    A proposal carries, beside the wire, the prefix that it was really drafted from.
    """

    random: random.Random
    committed: list[int]
    drafter: DraftSequence = field(init=False)
    buffer: ProposalBuffer = field(default_factory=ProposalBuffer)
    to_verifier: deque[tuple[drafter_pb2.Proposal, list[int]]] = field(default_factory=deque)
    to_drafter: deque[drafter_pb2.Verdict] = field(default_factory=deque)
    # The prefix of each buffered draft token.
    prefixes: list[list[int]] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.drafter = draft_sequence(self.committed, max_draft_tokens=self.random.randint(1, 5))

    def draft(self) -> None:
        if not self.drafter.wants_draft:
            return
        tokens = [self.random.randrange(VOCABULARY) for _ in range(self.random.randint(1, 5))]
        self.drafter.proposed, self.drafter.wants_draft = list(tokens), False
        message = drafter_pb2.Proposal(
            epoch=self.drafter.epoch, position=self.drafter.length, token_ids=pack_tokens(tokens)
        )
        self.to_verifier.append((message, list(self.drafter.token_ids)))

    def deliver_proposal(self) -> None:
        if not self.to_verifier:
            return
        message, prefix = self.to_verifier.popleft()
        before = len(self.buffer)
        is_late = len(self.committed) > message.position
        tokens = unpack_tokens(message.token_ids)
        (drafts,) = parse_proposals([message], VOCABULARY)
        assert isinstance(drafts, DraftTokens)
        self.buffer.offer(message.epoch, message.position, drafts, self.committed)
        num_fresh = len(self.buffer) - before
        self.prefixes += [prefix + tokens[:index] for index in range(len(tokens) - num_fresh, len(tokens))]
        self.seen["late and useful" if is_late and num_fresh else "late and useless" if is_late else "in time"] += 1

    def deliver_verdict(self) -> None:
        if self.to_drafter:
            verdict = self.to_drafter.popleft()
            self.drafter.commit(unpack_tokens(verdict.token_ids), verdict.num_committed, verdict.epoch)

    def verify(self) -> None:
        drafts = self.buffer.peek(self.random.randint(0, 4)).token_ids
        for index in range(len(drafts)):
            # What the acceptance test relies on: the draft token was made behind exactly what stands before it now.
            assert self.prefixes[index] == self.committed + drafts[:index]
        num_accepted = self.random.randint(0, len(drafts))
        last = self.random.randrange(VOCABULARY)
        if num_accepted < len(drafts):
            # A one-hot draft token that was rejected is not the recovered one.
            last = self.random.choice([token for token in range(VOCABULARY) if token != drafts[num_accepted]])
        self.seen["rejected" if num_accepted < len(drafts) else "accepted" if drafts else "plain"] += 1
        new = [*drafts[:num_accepted], last]
        self.committed += new
        num_buffered = len(self.buffer)
        self.buffer.commit(new)
        self.prefixes = self.prefixes[num_buffered - len(self.buffer) :] if len(self.buffer) else []
        self.to_drafter.append(
            drafter_pb2.Verdict(epoch=self.buffer.epoch, num_committed=len(self.committed), token_ids=pack_tokens(new))
        )

    def settle(self) -> None:
        while self.to_drafter or self.to_verifier:
            self.deliver_proposal()
            self.deliver_verdict()


def test_both_sides_agree_over_any_delays() -> None:
    """Catches an epoch that one side ends and the other does not, and a proposal verified behind another prefix.

    4,000 sequences of random steps and deliveries; in each the two queues are in order, as on a stream.
    """
    seen: Counter[str] = Counter()
    for seed in range(4000):
        chance = random.Random(seed)
        simulation = Simulation(chance, [chance.randrange(VOCABULARY) for _ in range(chance.randint(1, 3))])
        weights = [chance.random() + 0.1, chance.random() + 0.1, chance.random() + 0.1, 0.4 * chance.random() + 0.1]
        moves = [simulation.draft, simulation.deliver_proposal, simulation.deliver_verdict, simulation.verify]
        for _ in range(60):
            chance.choices(moves, weights)[0]()
        simulation.settle()
        assert simulation.drafter.token_ids == simulation.committed
        assert simulation.drafter.epoch == simulation.buffer.epoch
        # What the drafter still counts on is what the verifier still holds.
        assert simulation.drafter.proposed == simulation.buffer.peek(99).token_ids
        seen += simulation.seen
    # A simulation in which these do not happen proves nothing.
    for outcome in ("rejected", "accepted", "plain", "in time", "late and useful", "late and useless"):
        assert seen[outcome] > 1000, seen
