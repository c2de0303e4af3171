"""Links to drafters as the engine knows them, and what passes between them and the sequences' speculation."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from outrider.protocol.wire import pack_tokens
from outrider.v1 import common_pb2, drafter_pb2
from verifier_service.draft_tree import Outcome, SequenceExpansions
from verifier_service.gathering import Gathering
from verifier_service.patience import Patience, UsualTime
from verifier_service.sequence import TargetSequence
from verifier_service.speculation import AHEAD, JOINING, LATE, WAITING, LinkKey, Speculation, State

_FALLBACKS = {
    drafter_pb2.REFUSAL_REASON_MAX_LENGTH: common_pb2.FALLBACK_REASON_DRAFTER_MAX_LENGTH,
    drafter_pb2.REFUSAL_REASON_OVERLOADED: common_pb2.FALLBACK_REASON_DRAFTER_OVERLOADED,
}


@dataclass
class TreeCounts:
    """What became of draft trees; they only ever grow."""

    num_expansions: int = 0  # that came
    num_walked: int = 0  # of these, that committed tokens walked over
    outcomes: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(Outcome, 0))  # of steps, by their cause


@dataclass
class _Link:
    max_length: int
    heard_at: float  # monotonic, seconds
    patience: Patience
    is_retired: bool = False


class DraftingLinks:
    """Which drafters are up, and how long their sequences wait for drafts."""

    def __init__(self, draft_timeout: float | None, gathering: Gathering) -> None:
        """`draft_timeout`: how long to wait for an answer, seconds; None: by what they usually take."""
        self._draft_timeout = draft_timeout
        self._step = UsualTime()
        self._gathering = gathering
        self._links: dict[LinkKey, _Link] = {}
        self.num_late = 0  # times that a sequence gave up waiting; only ever grows
        self.trees = TreeCounts()

    def add(self, key: LinkKey, max_length: int) -> None:
        """A drafter is ready."""
        self._links[key] = _Link(max_length, time.monotonic(), Patience(self._step, self._draft_timeout))

    def remove(self, key: LinkKey) -> None:
        """A drafter is gone."""
        self._links.pop(key, None)

    def retire(self, key: LinkKey, *, is_retired: bool) -> None:
        """Note whether the drafter is wanted for nothing but the sequences that it has."""
        if link := self._links.get(key):
            link.is_retired = is_retired

    def take_idle(self, sequences: Iterable[TargetSequence]) -> list[LinkKey]:
        """Retired links that none of the sequences uses; each is returned once."""
        retired = {key for key, link in self._links.items() if link.is_retired}
        if not retired:
            return []
        idle = retired - {sequence.speculation.drafter for sequence in sequences}
        for key in idle:
            self._links[key].is_retired = False
        return list(idle)

    def stepped(self, seconds: float) -> None:
        """Note how long a step of the target took."""
        self._step.add(seconds)

    def is_up(self, key: LinkKey) -> bool:
        """Whether frames to the drafter can be sent."""
        return key in self._links

    def has_heard(self, key: LinkKey) -> bool:
        """Note that a frame has come; False when the connection it came from counts as lost."""
        if link := self._links.get(key):
            link.heard_at = time.monotonic()
        return key in self._links

    def is_outgrown_by(self, sequence: TargetSequence) -> bool:
        """Whether the sequence's next chain would pass the drafter's context."""
        assert sequence.speculation.drafter is not None
        max_length = self._links[sequence.speculation.drafter].max_length
        if not max_length:
            return False
        # The first token is the target's own: the first drafts that matter are those behind it.
        position = len(sequence.token_ids) + (0 if sequence.num_committed_here else 1)
        return position + sequence.max_draft_tokens > max_length

    def opening(self, sequence: TargetSequence) -> drafter_pb2.OpenSequence:
        """The message that opens a sequence at its drafter."""
        return drafter_pb2.OpenSequence(
            sequence_id=sequence.link_sequence_id,
            token_ids=pack_tokens(sequence.token_ids),
            num_prompt_tokens=sequence.num_prompt_tokens,
            sampling=sequence.sampling.to_message(),
            verification=sequence.verification.to_message(),
            max_draft_tokens=sequence.max_draft_tokens,
            traceparent=sequence.traceparent,
        )

    def commit(self, sequence: TargetSequence, now: float) -> None:
        """Walk the tree of a sequence that has a drafter by what was committed `now`, monotonic."""
        speculation, trees = sequence.speculation, self.trees
        tree = speculation.tree
        num_walked = tree.num_walked
        has_room = len(sequence.token_ids) + 1 < sequence.length_limit
        is_first = speculation.state is JOINING
        outcome = speculation.commit(sequence.token_ids, now, has_room=has_room)
        if not is_first:
            trees.outcomes[outcome] += 1
        trees.num_walked += tree.num_walked - num_walked

    def take(self, sequence: TargetSequence, expansions: SequenceExpansions, now: float) -> None:
        """Take in expansions that have come `now`, monotonic. Raises ExpansionError for what breaks the protocol."""
        speculation = sequence.speculation
        state, since, tree = speculation.state, speculation.since, speculation.tree
        num_walked = tree.num_walked
        speculation.take(expansions, sequence.token_ids, now)
        self.trees.num_expansions += expansions.end - expansions.start
        self.trees.num_walked += tree.num_walked - num_walked
        if state is WAITING or state is LATE:
            self._note_round_trip(speculation, state, now - since)
            if speculation.num_drafts:
                self._gathering.answered(sequence, now)

    def take_refusal(self, sequence: TargetSequence, refusal: drafter_pb2.Refusal) -> common_pb2.FallbackReason | None:
        """Note that there are no drafts; the reason to fall back, or None where only this position goes without."""
        if refusal.reason != drafter_pb2.REFUSAL_REASON_NO_MATCH:
            return _FALLBACKS.get(refusal.reason, common_pb2.FALLBACK_REASON_DRAFTER_LOST)
        sequence.speculation.find_nothing(refusal.num_committed, sequence.token_ids, time.monotonic())
        return None

    def silent(self, running: Iterable[TargetSequence]) -> set[LinkKey]:
        """Drafters that owe an answer or a root and have sent nothing at all for so long that they count as lost."""
        now, waits = time.monotonic(), self._waits()
        silent = set()
        # Looked at before anything is called: hardly any of many sequences is overdue.
        for speculation in [sequence.speculation for sequence in running]:
            state = speculation.state
            if state is AHEAD and not speculation.tree.is_lost:
                continue
            if (state is WAITING or state is LATE or state is AHEAD) and (key := speculation.drafter) in waits:
                link = self._links[key]
                # What was not owed yet was no silence: a drafter without sequences has nothing to say.
                silence = now - max(link.heard_at, speculation.since)
                if speculation.is_overdue(now, waits[key]) and silence >= link.patience.seconds_until_lost:
                    silent.add(key)
        return silent

    def go_on_plainly(self, running: Iterable[TargetSequence]) -> list[TargetSequence]:
        """Let sequences that have waited long enough take steps without drafts until their drafters answer.

        Those that should stop hoping for answers, because they come too late or not at all, are returned.
        """
        now, waits = time.monotonic(), self._waits()
        hopeless = []
        for sequence in running:
            speculation = sequence.speculation
            if (key := speculation.drafter) not in waits:
                continue
            if speculation.state is WAITING and speculation.give_up_waiting(now, waits[key]):
                self.num_late += 1
                if sequence.trace is not None:
                    sequence.trace.draft_is_late(speculation.waited, sequence.length)
            if speculation.state is LATE and speculation.is_hopeless(now, waits[key]):
                hopeless.append(sequence)
        return hopeless

    def time_until_late(self, running: Iterable[TargetSequence]) -> float | None:
        """Seconds until the next sequence will have waited too long; None when none is waiting."""
        waits = self._waits()
        deadlines = [
            speculation.deadline(waits[speculation.drafter])
            for speculation in [sequence.speculation for sequence in running]
            if speculation.drafter in waits
        ]
        earliest = min((deadline for deadline in deadlines if deadline is not None), default=None)
        # A clock's tick above zero, so that sleeping cannot come back a moment too early and find nothing to do.
        return max(earliest - time.monotonic(), 0.001) if earliest is not None else None

    def _waits(self) -> dict[LinkKey, float]:
        """How long a sequence of each drafter waits for an answer, seconds."""
        return {key: link.patience.seconds for key, link in self._links.items()}

    def _note_round_trip(self, speculation: Speculation, state: State, seconds: float) -> None:
        """Expansions have come to a sequence that had been in `state` for so long."""
        link = self._links.get(speculation.drafter) if speculation.drafter is not None else None
        if link is None:
            return
        if state is LATE:
            # It was waited for before it was late.
            link.patience.answered(link.patience.seconds + seconds)
        elif speculation.num_drafts:
            link.patience.answered(seconds)
