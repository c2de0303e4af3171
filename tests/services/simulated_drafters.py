"""Drafters of all kinds without a network: real engines behind it, lawful ones and others, on frames that take time."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from drafter_service.drafter import Draft, NoDraft
from drafter_service.engine import (
    DrafterEngine,
    EngineOutput,
    FrameArrived,
    SessionClosed,
    SessionOpened,
    SessionOutput,
)
from drafter_service.scripted_drafter import ScriptedDrafter
from drafter_service.sequence import DraftSequence
from outrider.protocol.handshake import DraftLimits
from outrider.protocol.wire import pack_tokens, unpack_tokens
from outrider.v1 import drafter_pb2
from verifier_service.speculation import LinkKey

LIMITS = DraftLimits(max_draft_tokens=4, max_candidates=4)
FINAL_REASONS = (
    drafter_pb2.NO_PROPOSAL_REASON_MAX_LENGTH,
    drafter_pb2.NO_PROPOSAL_REASON_OVERLOADED,
    drafter_pb2.NO_PROPOSAL_REASON_UNKNOWN_SEQUENCE,
    drafter_pb2.NO_PROPOSAL_REASON_INTERNAL,
)


@dataclass
class Manners:
    """How likely it is that a drafter's answer is of a kind; what is left over is right."""

    working: float = 0.1  # none yet
    nothing: float = 0.05
    refusal: float = 0.005
    wrong: float = 0.3  # from some draft token on
    candidates: float = 0.1  # with a distribution, which nobody looks at where decoding is greedy


class RandomDrafter(ScriptedDrafter):
    """Knows what is right, and says something else now and then."""

    def __init__(
        self, texts: Mapping[int, Sequence[int]], vocabulary_size: int, chance: random.Random, manners: Manners
    ) -> None:
        """`texts`: by the sequence's id at the drafter, all of its tokens."""
        super().__init__(lambda token_ids, max_draft_tokens: ())
        self._vocabulary_size = vocabulary_size
        self._manners = manners
        self._texts = texts
        self._chance = chance

    def draft(self, wanting: Sequence[DraftSequence]) -> Sequence[Draft | NoDraft]:
        """An answer for most of them."""
        answers = [self._answer(sequence) for sequence in wanting]
        return [answer for answer in answers if answer is not None]

    def _answer(self, sequence: DraftSequence) -> Draft | NoDraft | None:
        chance, manners = self._chance, self._manners
        kinds = [manners.working, manners.nothing, manners.refusal]
        kind = chance.choices(["working", "nothing", "refusal", "draft"], [*kinds, 1.0 - sum(kinds)])[0]
        if kind == "working":
            return None
        if kind == "nothing":
            return NoDraft(sequence, drafter_pb2.NO_PROPOSAL_REASON_NO_MATCH)
        if kind == "refusal":
            return NoDraft(sequence, chance.choice(FINAL_REASONS))
        num_tokens = chance.randint(1, sequence.max_draft_tokens)
        tokens = list(self._texts[sequence.sequence_id][sequence.length : sequence.length + num_tokens])
        right = len(tokens)
        if chance.random() < manners.wrong:
            right = chance.randrange(num_tokens)
        tokens = [*tokens[:right], *chance.choices(range(self._vocabulary_size), k=num_tokens - len(tokens[:right]))]
        if chance.random() < manners.candidates:
            return Draft(sequence, tokens, *self._candidates(tokens))
        return Draft(sequence, tokens)

    def _candidates(self, tokens: Sequence[int]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Distributions of two candidates or more, the draft tokens among them."""
        width = self._chance.randint(2, LIMITS.max_candidates)
        ids = [[(token + step) % self._vocabulary_size for step in range(width)] for token in tokens]
        weights = np.full((len(tokens), width), 16, np.int32)
        weights[:, 0] = 65536 - 16 * (width - 1)
        return np.array(ids, np.int32), weights


@dataclass
class Link:
    """One connection of the verifier to a drafter, with the frames that are on their way: first in, first out."""

    key: LinkKey
    engine: DrafterEngine
    is_silent: bool = False  # nothing comes back any more
    is_retired: bool = False
    to_drafter: deque[drafter_pb2.DraftRequest] = field(default_factory=deque)
    to_verifier: deque[drafter_pb2.DraftResponse] = field(default_factory=deque)
    past: list[drafter_pb2.Proposal] = field(default_factory=list)

    def open(self) -> None:
        """The drafter has taken the stream."""
        self.engine.handle(SessionOpened(self.key.incarnation, LIMITS))

    def deliver(self) -> bool:
        """Let the next frame reach the drafter; whether there was one."""
        if not self.to_drafter:
            return False
        self.engine.handle(FrameArrived(self.key.incarnation, self.to_drafter.popleft()))
        return True

    def take(self, output: EngineOutput) -> None:
        """What the drafter's engine emits, for one of its links."""
        assert isinstance(output, SessionOutput)
        if output.session_id == self.key.incarnation and not self.is_silent:
            self.to_verifier.append(output.frame)
            self.past += output.frame.proposals

    def close(self) -> None:
        """The stream has ended."""
        self.engine.handle(SessionClosed(self.key.incarnation))


def make_illegal(proposal: drafter_pb2.Proposal, vocabulary_size: int, chance: random.Random) -> str:
    """Change a proposal into one that no lawful drafter sends; what is wrong with it."""
    kind = chance.choice(["epoch", "position", "vocabulary", "empty", "long", "candidates", "bytes"])
    tokens = unpack_tokens(proposal.token_ids)
    if kind == "epoch":
        proposal.epoch += 1000  # beyond all that the verifier may have begun meanwhile
    elif kind == "position":
        proposal.position += chance.randint(1, 5)
    elif kind == "vocabulary":
        proposal.token_ids = pack_tokens([*tokens[:-1], vocabulary_size])
    elif kind == "empty":
        proposal.token_ids = b""
    elif kind == "long":
        proposal.token_ids = pack_tokens(tokens * (LIMITS.max_draft_tokens + 1))
        proposal.candidate_ids = proposal.candidate_weights = b""
    elif kind == "candidates":
        proposal.candidate_ids = pack_tokens([token ^ 1 for token in tokens])
        proposal.candidate_weights = np.full(len(tokens), 1, "<u2").tobytes()
    else:
        proposal.token_ids += b"\0"
    return kind


def break_the_rules(
    frame: drafter_pb2.DraftResponse, link: Link, vocabulary_size: int, chance: random.Random, seen: Counter[str]
) -> int | None:
    """Put something unlawful into a frame that is about to arrive; the sequence that is certain to lose its drafter."""
    if link.past and chance.random() < 0.4:
        frame.proposals.append(chance.choice(link.past[-20:]))
        seen["repeated proposals"] += 1
        return None
    if not frame.proposals:
        return None
    proposal = chance.choice(frame.proposals)
    kind = make_illegal(proposal, vocabulary_size, chance)
    seen["illegal proposals"] += 1
    # Where the verifier has moved on meanwhile, what leaves a gap leaves none any more.
    return None if kind == "position" else proposal.sequence_id
