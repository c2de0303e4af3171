"""Histories of draft trees: both ends of streams, what travels between them, and what must hold whatever happens.

Of the services, all that is pure is the real thing: the drafter's engine and frames, the bytes of the wire, the
verifier's trees and states. Frames take as long as they like, in order on each stream.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np

from drafter_service.engine import DrafterEngine, EngineOutput, SessionOutput
from drafter_service.session import FrameArrived, SessionClosed, SessionOpened
from outrider.protocol.handshake import DraftLimits
from outrider.protocol.packed import I32, U8, U16, U32, U64, pack
from outrider.protocol.wire import pack_tokens
from outrider.v1 import common_pb2, drafter_pb2
from tests.services.simulated_trees import (
    NUM_CHILDREN,
    NUM_TOKENS,
    VOCABULARY,
    RuleDrafter,
    TreeDrafter,
    children_of,
)
from verifier_service.draft_tree import ExpansionError, SequenceExpansions
from verifier_service.frames import LinkFrame, RefusedExpansions, read_expansions
from verifier_service.speculation import ALONE, LATE, WAITING, LinkKey, Speculation

MAX_DRAFT_TOKENS = 6


@dataclass(eq=False)
class Sequence:
    """One sequence at the verifier."""

    id: int
    committed: list[int]
    verification: int
    speculation: Speculation
    in_flight: list[int] | None = None  # the draft tokens of the step that the device works on
    num_steps: int = 0


@dataclass(eq=False)
class Link:
    """A stream, with the frames that are on their way as bytes: first in, first out."""

    id: int
    limits: DraftLimits
    sequences: dict[int, Sequence] = field(default_factory=dict)  # with a drafter
    frame: LinkFrame = field(default_factory=LinkFrame)  # not sent yet
    is_empty: bool = True
    to_drafter: deque[bytes] = field(default_factory=deque)
    to_verifier: deque[bytes] = field(default_factory=deque)
    # Of each frame to the verifier, the sequence that something is wrong with.
    spoilt: deque[int | None] = field(default_factory=deque)


class History:
    """One verifier or two, and a drafter."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = random.Random(seed)
        self.seen: Counter[str] = Counter()
        self.now = 0.0
        self.takes_turns = chance.random() < 0.3
        self.drafter: TreeDrafter | RuleDrafter = (
            RuleDrafter(chance) if self.takes_turns or chance.random() < 0.2 else TreeDrafter(chance, self.seen)
        )
        self.engine = DrafterEngine(self.drafter, max_sequences=8)
        self.limits = DraftLimits(
            MAX_DRAFT_TOKENS,
            max_candidates=2,
            num_children=NUM_CHILDREN,
            # Less than a handshake lets pass: limits must be reached.
            max_expansions=chance.choice([8, 24, 120]),
            takes_turns=self.takes_turns,
        )
        self.links: list[Link] = []
        self.num_links = 0
        self.next_id = 0
        for _ in range(chance.choice([1, 1, 2])):
            self.connect()
        self.open()

    # What the verifier does.

    def connect(self) -> None:
        self.num_links += 1
        self.links.append(Link(self.num_links, self.limits))
        self.engine.handle(SessionOpened(self.num_links, self.limits))

    def disconnect(self) -> None:
        """A stream is lost, with all that is on it, and made anew."""
        link = self.chance.choice(self.links)
        for sequence in link.sequences.values():
            sequence.speculation.leave()
        self.links.remove(link)
        self.engine.handle(SessionClosed(link.id))
        self.connect()
        self.seen["lost streams"] += 1

    def open(self) -> None:
        link = self.chance.choice(self.links)
        self.next_id += 1
        prompt = self.chance.choices(range(NUM_TOKENS), k=self.chance.randint(1, 4))
        key, takes_turns, most = LinkKey("drafter", link.id), self.takes_turns, self.limits.max_expansions
        if self.chance.random() < 0.5:
            speculation = Speculation(key, takes_turns=takes_turns, max_expansions=most)
        else:
            speculation = Speculation.joined(key, self.now, takes_turns=takes_turns, max_expansions=most)
        verification = self.chance.choice([common_pb2.VERIFICATION_REJECTION, common_pb2.VERIFICATION_COUPLED])
        link.sequences[self.next_id] = Sequence(self.next_id, prompt, verification, speculation)
        link.is_empty = False
        link.frame.opens.append(
            drafter_pb2.OpenSequence(
                sequence_id=self.next_id,
                token_ids=pack_tokens(prompt),
                num_prompt_tokens=len(prompt),
                sampling=common_pb2.SamplingParameters(temperature=1.0, seed=1),
                verification=verification,
                max_draft_tokens=MAX_DRAFT_TOKENS,
            )
        )

    def close(self) -> None:
        if (found := self.any_sequence()) is not None:
            self.leave(*found)
            self.seen["closed"] += 1

    def leave(self, link: Link, sequence: Sequence) -> None:
        del link.sequences[sequence.id]
        sequence.speculation.leave()
        if sequence.id in [opening.sequence_id for opening in link.frame.opens]:
            # Closes are handled before openings: this one would be kept for ever.
            self.send(link)
        link.frame.closes.append(sequence.id)
        link.is_empty = False

    def any_sequence(self) -> tuple[Link, Sequence] | None:
        found = [(link, sequence) for link in self.links for sequence in link.sequences.values()]
        return self.chance.choice(found) if found else None

    def launch(self) -> None:
        """Begin a step over some sequences."""
        for link in self.links:
            for sequence in link.sequences.values():
                if self.chance.random() < 0.7:
                    self._launch(sequence)

    def _launch(self, sequence: Sequence) -> None:
        """As the scheduler does: never while it waits."""
        speculation = sequence.speculation
        if sequence.in_flight is not None or speculation.state is WAITING:
            return
        drafts = speculation.chain(self.chance.randint(0, MAX_DRAFT_TOKENS) if speculation.num_drafts else 0)
        path = tuple(sequence.committed)
        for index, token_id in enumerate(drafts.token_ids):
            # What the acceptance test relies on: it was drafted behind exactly what stands before it now.
            assert token_id == children_of(path)[0]
            rows, row = drafts.rows[index], drafts.indexes[index]
            assert rows.token_ids[row] == token_id
            if isinstance(self.drafter, TreeDrafter) and sequence.verification == common_pb2.VERIFICATION_REJECTION:
                drawn, context = rows.candidate_ids[row].tolist()
                assert (drawn, self.drafter.contexts[context - NUM_TOKENS]) == (token_id, path)
                self.seen["tested with its q"] += 1
            path = (*path, token_id)
        sequence.in_flight = list(drafts.token_ids)

    def come_back(self) -> None:
        """A step ends."""
        for link in self.links:
            for sequence in link.sequences.values():
                if self.chance.random() < 0.7:
                    self._come_back(link, sequence)

    def _come_back(self, link: Link, sequence: Sequence) -> None:
        """Some of the draft tokens are accepted, and a token of the target's own is behind them."""
        if sequence.in_flight is None:
            return
        drafts, sequence.in_flight = sequence.in_flight, None
        num_accepted = self.chance.choice([len(drafts), self.chance.randint(0, len(drafts))])
        accepted = drafts[:num_accepted]
        children = children_of((*sequence.committed, *accepted))
        last = self.chance.choice([self.chance.randrange(NUM_TOKENS), children[1], children[2], children[0]])
        if num_accepted < len(drafts) and last == drafts[num_accepted]:
            last = children[1]
        new = [*accepted, last]
        self.seen["accepted"] += num_accepted
        self.seen["rejected"] += num_accepted < len(drafts)
        sequence.committed += new
        sequence.num_steps += 1
        outcome = sequence.speculation.commit(sequence.committed, self.now, has_room=True)
        self.seen[f"outcome {outcome.value}"] += 1
        is_lie = self.chance.random() < 0.01
        self.seen["lies to the drafter"] += is_lie
        link.frame.commit(sequence.id, len(sequence.committed) + is_lie, new)
        link.is_empty = False

    def send(self, link: Link | None = None) -> None:
        """What has gathered leaves as one frame."""
        link = link or self.chance.choice(self.links)
        if not link.is_empty:
            link.to_drafter.append(link.frame.to_message().SerializeToString())
            link.frame, link.is_empty = LinkFrame(), True

    def hear(self) -> None:
        """The next frame reaches the verifier."""
        link = self.chance.choice(self.links)
        if not link.to_verifier:
            return
        frame = drafter_pb2.DraftResponse.FromString(link.to_verifier.popleft())
        spoilt = link.spoilt.popleft()
        self.seen["signs of life"] += not frame.expansions and not frame.refusals
        for expansions in read_expansions(frame.expansions, VOCABULARY, link.limits):
            sequence = link.sequences.get(expansions.sequence_id)
            if sequence is None:
                self.seen["for nobody"] += 1
                continue
            if (error := self._error_of(expansions, sequence)) is not None:
                assert sequence.id == spoilt, f"{error}, and nothing was wrong"
                self.leave(link, sequence)
                self.seen["refused expansions"] += 1
        assert spoilt not in link.sequences, "what was wrong was taken in"
        for refusal in frame.refusals:
            sequence = link.sequences.get(refusal.sequence_id)
            if sequence is None:
                continue
            if refusal.reason == drafter_pb2.REFUSAL_REASON_NO_MATCH:
                sequence.speculation.find_nothing(refusal.num_committed, sequence.committed, self.now)
                self.seen["nothing found"] += 1
            else:
                self.leave(link, sequence)
                self.seen[drafter_pb2.RefusalReason.Name(refusal.reason)] += 1

    def _error_of(
        self, expansions: SequenceExpansions | RefusedExpansions, sequence: Sequence
    ) -> ExpansionError | None:
        """Take them in; what is wrong with them."""
        if isinstance(expansions, RefusedExpansions):
            return expansions.error
        self.seen["late"] += expansions.num_committed < len(sequence.committed)
        try:
            sequence.speculation.take(expansions, sequence.committed, self.now)
        except ExpansionError as error:
            return error
        return None

    def lose_patience(self) -> None:
        self.now += 1.0
        for link in self.links:
            for sequence in link.sequences.values():
                self.seen["gave up waiting"] += sequence.speculation.give_up_waiting(self.now, 2.0)

    # What the drafter does.

    def arrive(self) -> None:
        """The next frame reaches the drafter."""
        link = self.chance.choice(self.links)
        if link.to_drafter:
            frame = drafter_pb2.DraftRequest.FromString(link.to_drafter.popleft())
            self.engine.handle(FrameArrived.of(link.id, frame))

    def draft(self) -> None:
        """The drafter works, if it has anything to do, and says so."""
        pause = self.engine.step(self._take)
        assert (pause == 0.0) is self.drafter.has_work

    def _take(self, output: EngineOutput) -> None:
        assert isinstance(output, SessionOutput)
        (link,) = [link for link in self.links if link.id == output.session_id]
        link.to_verifier.append(output.frame.SerializeToString())
        link.spoilt.append(None)

    def restart(self) -> None:
        if isinstance(self.drafter, TreeDrafter):
            self.drafter.restart()
            self.seen["restarts"] += 1

    def spoil(self) -> None:
        """Something in a frame that is on its way is no longer what a lawful drafter sends."""
        link = self.chance.choice(self.links)
        places = [index for index, spoilt in enumerate(link.spoilt) if spoilt is None]
        if not places:
            return
        place = self.chance.choice(places)
        frame = drafter_pb2.DraftResponse.FromString(link.to_verifier[place])
        if frame.expansions:
            link.spoilt[place] = make_illegal(self.chance.choice(frame.expansions), self.chance)
            link.to_verifier[place] = frame.SerializeToString()

    # What must hold.

    def check(self) -> None:
        most = self.limits.max_expansions
        for link in self.links:
            for sequence in link.sequences.values():
                speculation = sequence.speculation
                assert speculation.state is not ALONE
                assert len(speculation.tree._sources) == most
                assert len(speculation.tree._expanded) <= 3 * most
                if speculation.state in (WAITING, LATE) and sequence.num_steps:
                    # Nobody waits for who waits for him.
                    assert self.drafter.has_work or not self._is_quiet(link), "waits for ever"
        if isinstance(self.drafter, TreeDrafter):
            for tree in self.drafter.trees.values():
                assert len(tree.nodes) <= most
                assert tree.stand is None or tree.next_id <= tree.stand + most

    def _is_quiet(self, link: Link) -> bool:
        """Whether nothing is on its way."""
        is_told = not self.engine._sessions[link.id].refusals
        return is_told and link.is_empty and not link.to_drafter and not link.to_verifier

    def settle(self) -> None:
        """Nothing is decoded any more, and all that is under way arrives: both sides know the same then."""
        for _ in range(100_000):
            for move in (self.draft, self.send, self.arrive, self.hear):
                move()
            if not self.drafter.has_work and all(map(self._is_quiet, self.links)):
                break
        else:
            raise AssertionError("a drafter that never rests")
        self.check()
        assert self.engine.num_sequences == sum(len(link.sequences) for link in self.links)
        for link in self.links:
            for sequence in link.sequences.values():
                assert sequence.speculation.state not in (WAITING, LATE) or not sequence.num_steps
                self._compare(link, sequence)

    def _compare(self, link: Link, sequence: Sequence) -> None:
        drafted = self.engine._sessions[link.id].sequences[sequence.id]
        assert drafted.token_ids == sequence.committed
        if not isinstance(self.drafter, TreeDrafter):
            return
        tree, here = self.drafter.trees[drafted], sequence.speculation.tree
        assert here._stand == tree.stand
        assert here.chain_length(len(sequence.committed)) == min(len(tree.chain), 32)
        assert here.chain(32).token_ids == tree.chain[:32]
        self.seen["compared"] += 1

    def end(self) -> None:
        """All is closed: nothing is kept."""
        for link in list(self.links):
            for sequence in list(link.sequences.values()):
                self.leave(link, sequence)
        self.settle()
        assert not self.engine.num_sequences
        assert not self.drafter._next_ids
        assert not self.drafter.has_work
        assert not isinstance(self.drafter, TreeDrafter) or not self.drafter.trees


def make_illegal(message: drafter_pb2.Expansions, chance: random.Random) -> int | None:
    """Change one sequence's part of a frame into what is certain to be refused; its id, None if nothing was changed."""
    sequence_ids = np.frombuffer(message.sequence_ids, U64)
    counts = np.frombuffer(message.num_expansions, U32)
    index = chance.randrange(len(sequence_ids))
    first = int(counts[:index].sum())
    row = first + chance.randrange(int(counts[index]))

    def write(name: str, dtype: np.dtype[np.integer], place: int, value: int) -> None:
        values = np.frombuffer(getattr(message, name), dtype).copy()
        values[place] = value
        setattr(message, name, pack(values, dtype))

    width = len(message.child_ids) // 4 // int(counts.sum())
    kind = chance.choice(["parent", "rank", "vocabulary", "committed", "id", "weight", "twice"])
    if kind == "parent":
        write("parents", I32, row, int(np.frombuffer(message.first_ids, U32)[index]) + row - first)
    elif kind == "rank":
        write("ranks", U8, row, NUM_CHILDREN)
    elif kind == "vocabulary":
        write("child_ids", I32, row * width + chance.randrange(width), VOCABULARY)
    elif kind == "committed":
        write("num_committed", U64, index, 1 << 40)
    elif kind == "id":
        write("first_ids", U32, index, (1 << 31) - 1)
    elif kind == "weight" and message.candidate_weights:
        write("candidate_weights", U16, 2 * row, 60000)
    elif kind == "twice" and width > 1:
        write("child_ids", I32, row * width + 1, int(np.frombuffer(message.child_ids, I32)[row * width]))
    else:
        return None
    return int(sequence_ids[index])
