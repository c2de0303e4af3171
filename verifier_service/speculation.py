"""What the verifier knows of one sequence's speculation, as a machine of named states: no I/O, and no clock.

In turns, where both models share a device or cores, a step waits for the drafter's answer to what was committed last:

    JOINING ──▶ WAITING ──▶ READY ──▶ WAITING … : a verdict, the frame that answers it, a step that verifies its chain
                   │ ╲
                 LATE  PLAIN                      without drafts: for as long as no answer comes, or for one position

Where the drafter runs ahead, nothing waits: a step takes the drafts that are there.

    JOINING ──▶ AHEAD

ALONE follows from every state, and is final: another drafter is another Speculation. Times are monotonic, in seconds;
they are handed in with the event that happened then.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple

from engine.draft_tokens import DraftTokens
from outrider.protocol.wire import NUM_EXPANSIONS
from verifier_service.draft_tree import DraftTree, Outcome, SequenceExpansions

# A sequence whose drafter keeps it waiting this often in a row is better off alone.
MAX_LATE_IN_A_ROW = 3
# So is one that has heard nothing for this many times the longest wait.
MAX_TIMEOUTS_BEHIND = 10


class LinkKey(NamedTuple):
    """One connection to a drafter. A drafter that was lost and found again has a new incarnation."""

    address: str
    incarnation: int


class State(Enum):
    """What the next step of a sequence does about drafts."""

    # Nothing was committed since the drafter heard of the sequence. The first token falls to the prompt's own last row
    # and meets no draft: whether one had arrived by then must not change what is sampled.
    JOINING = auto()
    # No step samples before the drafter has answered, or has taken too long.
    WAITING = auto()
    # The answer is there, and with it drafts.
    READY = auto()
    # This position goes without: the drafter found nothing for it, or it is the last and has no room for any.
    PLAIN = auto()
    # Steps go on without drafts until the drafter answers: one that is busy with a long prompt must not slow the target
    # down.
    LATE = auto()
    # The drafter runs ahead: steps take the drafts that are there, and go without where there are none.
    AHEAD = auto()
    # There is no drafter, or none any more.
    ALONE = auto()


# For whoever asks about many sequences: a member of an enumeration takes three times as long to look up.
JOINING, WAITING, READY, PLAIN, LATE, AHEAD, ALONE = State


class Speculation:
    """One sequence at one drafter, from its opening there to its end, or until it goes on alone.

    Others read the attributes; only the methods, which are the events, write them. `committed` is always all of the
    sequence's tokens, prompt included: the next position is its length.
    """

    __slots__ = (
        "_has_had_answer",
        "_has_nothing_to_say",
        "_has_room",
        "_num_late_in_a_row",
        "address",
        "drafter",
        "num_bytes",
        "num_drafts",
        "since",
        "state",
        "takes_turns",
        "tree",
        "waited",
    )

    def __init__(
        self, drafter: LinkKey | None, *, takes_turns: bool = True, max_expansions: int = NUM_EXPANSIONS
    ) -> None:
        """A sequence of which nothing has been decoded here: JOINING, or ALONE without a drafter.

        `max_expansions` of its tree are kept, at least 1 with a drafter.
        """
        self.state = JOINING if drafter is not None else ALONE
        self.drafter = drafter
        # Stays when the sequence has left its drafter; empty where it never had one.
        self.address = drafter.address if drafter is not None else ""
        self.takes_turns = takes_turns
        self.tree = DraftTree(max_expansions if drafter is not None else 0)
        # Draft tokens that the next step may verify: READY there are some, AHEAD there may be.
        self.num_drafts = 0
        # Since when it has been WAITING or LATE, or, AHEAD, there has been nothing to stand on.
        self.since = 0.0
        # Whether the next position has room for drafts: a step commits one more token than it accepts.
        self._has_room = True
        self._num_late_in_a_row = 0
        self._has_had_answer = False
        # AHEAD: the drafter has said that there is nothing to draft behind what is committed.
        self._has_nothing_to_say = False
        # For the trace, since `take_measured`: how long the last wait took, seconds, and bytes of expansions.
        self.waited = 0.0
        self.num_bytes = 0

    @staticmethod
    def joined(
        drafter: LinkKey, now: float, *, takes_turns: bool = True, max_expansions: int = NUM_EXPANSIONS
    ) -> Speculation:
        """A sequence that is being decoded and was opened at the drafter `now`, with what is committed.

        The drafter has all of the text to compute, for which no step waits: in turns it is LATE from the beginning.
        """
        speculation = Speculation(drafter, takes_turns=takes_turns, max_expansions=max_expansions)
        speculation.state, speculation.since = LATE if takes_turns else AHEAD, now
        return speculation

    def commit(self, committed: Sequence[int], now: float, *, has_room: bool) -> Outcome:
        """The target committed the last ones of these, and the drafter is told; what the tree had for the very last.

        `has_room`: more than one token is to come.
        """
        if self.state is ALONE:
            return Outcome.UNSEEN
        was_lost = self.tree.is_lost
        outcome = self.tree.commit(committed)
        self._has_room = has_room
        if not self.takes_turns:
            if self.state is JOINING:
                self.state, self.since = AHEAD, now
            elif self.tree.is_lost and (not was_lost or self._has_nothing_to_say):
                self.since = now
            self._has_nothing_to_say = False
            self.num_drafts = self.tree.chain_length(len(committed))
        elif self.state is not LATE:
            self._wait(now)
        return outcome

    def take(self, expansions: SequenceExpansions, committed: Sequence[int], now: float) -> None:
        """Expansions have come, in turns all that answer a verdict. Raises ExpansionError for bad ones."""
        if self.state is ALONE:
            return
        was_lost = self.tree.is_lost
        self.tree.take(expansions, committed)
        self.num_bytes += expansions.num_bytes
        self._has_had_answer = True
        if self.state is AHEAD:
            self.num_drafts = self.tree.chain_length(len(committed))
            if self.tree.is_lost and not was_lost:
                # Tokens were committed in the meantime that its expansions do not have.
                self.since = now
        elif self.state is READY:
            # Nothing was owed; what comes all the same may have changed the chain.
            self.num_drafts = self.tree.chain_length(len(committed))
            self.state = READY if self.num_drafts else PLAIN
        elif self.state is not JOINING:
            self._hear(expansions.num_committed, committed, now)

    def find_nothing(self, num_committed: int, committed: Sequence[int], now: float) -> None:
        """The drafter has nothing to draft behind so many committed tokens."""
        if self.state is AHEAD:
            self._has_nothing_to_say = num_committed == len(committed)
        elif self.state is not JOINING and self.state is not ALONE:
            self._hear(num_committed, committed, now)

    def give_up_waiting(self, now: float, timeout: float) -> bool:
        """Time has passed: whether the sequence, which was WAITING, is LATE from now on."""
        if self.state is not WAITING or now - self.since < timeout:
            return False
        self.waited = now - self.since
        # A long prompt may keep a drafter busy for a while; that is no reason to do without it afterwards.
        self._num_late_in_a_row += int(self._has_had_answer)
        self.state, self.since = LATE, now
        return True

    def leave(self) -> None:
        """The sequence goes on without the drafter, for good."""
        self.state, self.drafter, self.tree, self.num_drafts = ALONE, None, DraftTree(0), 0

    def take_measured(self) -> tuple[float, int]:
        """How long the last wait took, seconds, and bytes of expansions, since the last call."""
        measured = self.waited, self.num_bytes
        self.waited, self.num_bytes = 0.0, 0
        return measured

    def chain(self, num_tokens: int) -> DraftTokens:
        """The next draft tokens, at most `num_tokens` of `num_drafts`; they stay until `commit`."""
        return self.tree.chain(min(num_tokens, self.num_drafts))

    def deadline(self, timeout: float) -> float | None:
        """When the wait for an answer will have taken too long; None while nothing waits for one."""
        return self.since + timeout if self.state is WAITING else None

    def is_overdue(self, now: float, timeout: float) -> bool:
        """Whether the drafter owes something for so long that nothing waits for it any more.

        Where it runs ahead, all that it owes is a root: whatever else it does not expand may not have been worth it.
        """
        if self.state is AHEAD:
            return self.tree.is_lost and not self._has_nothing_to_say and now - self.since >= timeout
        return self.state is LATE or (self.state is WAITING and now - self.since >= timeout)

    def is_hopeless(self, now: float, timeout: float) -> bool:
        """Whether answers come too late, or not at all, and the sequence should leave."""
        return self.state is LATE and (
            self._num_late_in_a_row >= MAX_LATE_IN_A_ROW or now - self.since >= MAX_TIMEOUTS_BEHIND * timeout
        )

    def _wait(self, now: float) -> None:
        """In turns: for the answer to the last verdict, unless the next position has no room for drafts."""
        self.num_drafts = 0
        if self._has_room:
            self.state, self.since = WAITING, now
        else:
            self.state = PLAIN

    def _hear(self, num_committed: int, committed: Sequence[int], now: float) -> None:
        """In turns: an answer to the verdict that brought `num_committed`."""
        if num_committed != len(committed):
            if self.state is LATE:
                # What is still owed is the answer to the last verdict.
                self._wait(now)
            return
        if self.state is WAITING:
            self.waited = now - self.since
        if self.state is WAITING or self.state is LATE:
            self._num_late_in_a_row = 0
            self.num_drafts = self.tree.chain_length(len(committed)) if self._has_room else 0
            self.state = READY if self.num_drafts else PLAIN
