"""Drafters of all kinds without a network: real engines behind it, lawful ones and others, on frames that take time."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from drafter_service.chain_drafter import ChainDrafter
from drafter_service.drafter import Drafts, Expanded, NoDraft
from drafter_service.engine import DrafterEngine, EngineOutput, SessionOutput
from drafter_service.sequence import DraftSequence
from drafter_service.session import FrameArrived, SessionClosed, SessionOpened
from outrider.protocol.expansions import ROOT
from outrider.protocol.handshake import DraftLimits
from outrider.v1 import drafter_pb2
from tests.services.trees import Node
from verifier_service.frames import LinkFrame
from verifier_service.speculation import LinkKey

TURNS = DraftLimits(max_draft_tokens=4, max_candidates=4, num_children=2, max_expansions=64, takes_turns=True)
AHEAD = DraftLimits(max_draft_tokens=4, max_candidates=4, num_children=2, max_expansions=64, takes_turns=False)
FINAL_REASONS = (
    drafter_pb2.REFUSAL_REASON_MAX_LENGTH,
    drafter_pb2.REFUSAL_REASON_OVERLOADED,
    drafter_pb2.REFUSAL_REASON_UNKNOWN_SEQUENCE,
    drafter_pb2.REFUSAL_REASON_INTERNAL,
)
# Expansions that a drafter which runs ahead makes between two verdicts: it must rest some time.
MOST_BETWEEN_VERDICTS = 30


@dataclass
class Manners:
    """How likely it is that a drafter's answer is of a kind; what is left over is right."""

    working: float = 0.1  # none yet
    nothing: float = 0.05
    refusal: float = 0.005
    wrong: float = 0.3  # a first child, and then half of the others
    candidates: float = 0.1  # with a distribution, which nobody looks at where decoding is greedy or coupled
    root: float = 0.3  # begins anew at a verdict


@dataclass
class _Tree:
    next_id: int = 0
    root: int = 0
    # Children that are not expanded: parent, rank, position of what follows, and whether all up to there is right.
    unexpanded: list[tuple[int, int, int, bool]] = field(default_factory=list)
    num_since_verdict: int = 0


class RandomDrafter(ChainDrafter):
    """Knows what is right, and says something else now and then; expands whatever it likes."""

    kind = name = "random"
    limits = TURNS

    def __init__(
        self, texts: Mapping[int, Sequence[int]], vocabulary_size: int, chance: random.Random, manners: Manners
    ) -> None:
        """`texts`: by the sequence's id at the drafter, all of its tokens."""
        super().__init__()
        self._vocabulary_size = vocabulary_size
        self._manners = manners
        self._texts = texts
        self._chance = chance
        self._trees: dict[DraftSequence, _Tree] = {}

    def open(self, sequence: DraftSequence) -> None:
        self._trees[sequence] = _Tree()
        super().open(sequence)

    def commit(self, sequence: DraftSequence, token_ids: Sequence[int]) -> None:
        self._trees[sequence].num_since_verdict = 0
        super().commit(sequence, token_ids)

    def release(self, sequence: DraftSequence) -> None:
        self._trees.pop(sequence, None)
        super().release(sequence)

    def draft(self) -> Drafts:
        """An answer for most of them; who runs ahead may go on, and be asked again."""
        chance, manners = self._chance, self._manners
        wanting, self._wanting = list(self._wanting), {}
        kinds = [manners.working, manners.nothing, manners.refusal]
        found: list[tuple[DraftSequence, int, list[Node]]] = []
        refusals, computing = [], []
        for sequence in wanting:
            kind = chance.choices(["working", "nothing", "refusal", "draft"], [*kinds, 1.0 - sum(kinds)])[0]
            tree = self._trees[sequence]
            if kind == "working":
                self._wanting[sequence] = None
                computing.append(sequence)
            elif kind == "refusal":
                refusals.append(NoDraft(sequence, chance.choice(FINAL_REASONS)))
            elif kind == "nothing":
                refusals.append(NoDraft(sequence, drafter_pb2.REFUSAL_REASON_NO_MATCH))
            else:
                found.append((sequence, tree.next_id, self._grow(sequence, tree)))
                if not sequence.limits.takes_turns and tree.num_since_verdict < MOST_BETWEEN_VERDICTS:
                    self._wanting[sequence] = None
        with_candidates = [chance.random() < manners.candidates for _ in found]
        groups = [
            [answer for answer, has_candidates in zip(found, with_candidates, strict=True) if has_candidates == wanted]
            for wanted in (False, True)
        ]
        expanded = [self._expanded_of(group, has) for group, has in zip(groups, (False, True), strict=True) if group]
        return Drafts(expanded, refusals, computing)

    def _grow(self, sequence: DraftSequence, tree: _Tree) -> list[Node]:
        chance, manners = self._chance, self._manners
        text, length = self._texts[sequence.sequence_id], sequence.length
        is_new = not tree.unexpanded or (tree.num_since_verdict == 0 and chance.random() < manners.root)
        nodes: list[Node] = []
        for number in range(chance.randint(1, 6)):
            if number == 0 and (is_new or tree.next_id + 8 >= tree.root + sequence.limits.max_expansions):
                tree.unexpanded.clear()
                tree.root = tree.next_id
                parent, rank, position, is_right = ROOT, 0, length, True
            elif tree.unexpanded:
                # The newest first children mostly, so that there are chains.
                place = (
                    -2 if chance.random() < 0.7 and len(tree.unexpanded) > 1 else chance.randrange(len(tree.unexpanded))
                )
                parent, rank, position, is_right = tree.unexpanded.pop(place)
            else:
                break
            right = text[position] if is_right and position < len(text) else None
            others = [token for token in chance.sample(range(self._vocabulary_size), 3) if token != right]
            children = others[:2]
            if right is not None and chance.random() >= manners.wrong:
                children = [right, others[0]]
            elif right is not None and chance.random() < 0.5:
                children = [others[0], right]
            nodes.append(Node(parent, rank, children))
            tree.unexpanded += [
                (tree.next_id, rank, position + 1, token == right) for rank, token in enumerate(children)
            ]
            tree.next_id += 1
            tree.num_since_verdict += 1
        return nodes

    def _expanded_of(self, answers: Sequence[tuple[DraftSequence, int, list[Node]]], has_candidates: bool) -> Expanded:
        nodes = [node for _, _, of_one in answers for node in of_one]
        expanded = Expanded(
            sequences=[sequence for sequence, _, _ in answers],
            num_committed=np.array([sequence.length for sequence, _, _ in answers], np.int64),
            num_expansions=np.array([len(of_one) for _, _, of_one in answers], np.int64),
            first_ids=np.array([first_id for _, first_id, _ in answers], np.int64),
            parents=np.array([node.parent for node in nodes], np.int32),
            ranks=np.array([node.rank for node in nodes], np.uint8),
            child_ids=np.array([node.children for node in nodes], np.int32),
            probabilities=np.zeros((len(nodes), 2), np.uint16),
        )
        if has_candidates:
            # Distributions of two candidates or more, the first children among them.
            width = self._chance.randint(2, TURNS.max_candidates)
            ids = expanded.child_ids[:, :1] + np.arange(width, dtype=np.int32)
            weights = np.full((len(nodes), width), 16, np.uint16)
            weights[:, 0] = 65536 - 16 * (width - 1)
            expanded.candidate_ids = np.mod(ids, self._vocabulary_size, dtype=np.int32)
            expanded.candidate_weights = weights
        return expanded


@dataclass
class Link:
    """One connection of the verifier to a drafter, with the frames that are on their way: first in, first out."""

    key: LinkKey
    engine: DrafterEngine
    limits: DraftLimits
    is_silent: bool = False  # nothing comes back any more
    is_retired: bool = False
    to_drafter: deque[LinkFrame] = field(default_factory=deque)
    to_verifier: deque[drafter_pb2.DraftResponse] = field(default_factory=deque)
    past: list[drafter_pb2.Expansions] = field(default_factory=list)

    def open(self) -> None:
        """The drafter has taken the stream."""
        self.engine.handle(SessionOpened(self.key.incarnation, self.limits))

    def deliver(self) -> bool:
        """Let the next frame reach the drafter; whether there was one."""
        if not self.to_drafter:
            return False
        self.engine.handle(FrameArrived.of(self.key.incarnation, self.to_drafter.popleft().to_message()))
        return True

    def take(self, output: EngineOutput) -> None:
        """What the drafter's engine emits, for one of its links."""
        assert isinstance(output, SessionOutput)
        if output.session_id == self.key.incarnation and not self.is_silent:
            self.to_verifier.append(output.frame)
            self.past += output.frame.expansions

    def close(self) -> None:
        """The stream has ended."""
        self.engine.handle(SessionClosed(self.key.incarnation))


def sequence_ids(frame: drafter_pb2.DraftResponse) -> list[int]:
    """Those that the frame names."""
    found = [int(id_) for one in frame.expansions for id_ in np.frombuffer(one.sequence_ids, "<u8")]
    return found + [refusal.sequence_id for refusal in frame.refusals]


def make_illegal(expansions: drafter_pb2.Expansions, vocabulary_size: int, chance: random.Random) -> int:
    """Change one sequence's expansions into what no lawful drafter sends; which sequence's."""
    ids = np.frombuffer(expansions.sequence_ids, "<u8")
    index = chance.randrange(len(ids))
    starts = [0, *np.frombuffer(expansions.num_expansions, "<u4").cumsum().tolist()]
    node = chance.randrange(starts[index], starts[index + 1])

    def put(name: str, dtype: str, place: int, *values: int) -> None:
        array = np.frombuffer(getattr(expansions, name), dtype).copy()
        array[place : place + len(values)] = values
        setattr(expansions, name, array.tobytes())

    kind = chance.choice(["committed", "vocabulary", "parent", "rank", "twice", "id", "candidates"])
    if kind == "candidates" and not expansions.candidate_weights:
        kind = "twice"
    if kind == "committed":
        put("num_committed", "<u8", index, 1 << 40)
    elif kind == "vocabulary":
        put("child_ids", "<u4", 2 * node + chance.randrange(2), vocabulary_size)
    elif kind == "parent":
        put("parents", "<i4", node, 1 << 30)
    elif kind == "rank":
        put("ranks", "u1", node, 2)
    elif kind == "twice":
        put("child_ids", "<u4", 2 * node, 3, 3)
    elif kind == "id":
        put("first_ids", "<u4", index, (1 << 32) - 1)
    else:
        num_nodes = len(expansions.ranks)
        width = len(expansions.candidate_weights) // 2 // num_nodes
        put("candidate_weights", "<u2", node * width, 1)
    return int(ids[index])


def break_the_rules(
    frame: drafter_pb2.DraftResponse, link: Link, vocabulary_size: int, chance: random.Random, seen: Counter[str]
) -> int | None:
    """Put something unlawful into a frame that is about to arrive; the sequence that is certain to lose its drafter."""
    if link.past and chance.random() < 0.4:
        frame.expansions.append(chance.choice(link.past[-20:]))
        seen["repeated frames"] += 1
        return None
    if not frame.expansions:
        return None
    seen["illegal frames"] += 1
    return make_illegal(chance.choice(frame.expansions), vocabulary_size, chance)
