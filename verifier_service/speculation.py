"""What the verifier knows of one sequence's speculation, as a machine of named states: no I/O, and no clock.

    JOINING ──▶ WAITING ──▶ READY ──▶ WAITING … : a verdict, the proposal that answers it, a step that verifies it
                   │ ╲
                 LATE  PLAIN                      without a proposal: for as long as none comes, or for one position

ALONE follows from every state, and is final: another drafter is another Speculation. Times are monotonic, in seconds;
they are handed in with the event that happened then.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

from engine.draft_tokens import NO_DRAFT_TOKENS, DraftTokens, concatenate
from kernels.limits import MAX_DRAFT_TOKENS
from outrider.protocol.epochs import first_difference

# Draft tokens that one sequence may have waiting: several proposals, as the protocol allows, but no flood of them.
MAX_BUFFERED_TOKENS = 4 * MAX_DRAFT_TOKENS
# A sequence whose drafter keeps it waiting this often in a row is better off alone.
MAX_LATE_IN_A_ROW = 3
# So is one that has heard nothing for this many times the longest wait.
MAX_TIMEOUTS_BEHIND = 10


class LinkKey(NamedTuple):
    """One connection to a drafter. A drafter that was lost and found again has a new incarnation."""

    address: str
    incarnation: int


class ProposalError(ValueError):
    """A proposal that breaks the protocol; the sequence goes on without its drafter."""


class State(Enum):
    """What the next step of a sequence does about drafts."""

    # Nothing was committed since the drafter heard of the sequence. The first token falls to the prompt's own last row
    # and meets no proposal: whether one had arrived by then must not change what is sampled.
    JOINING = auto()
    # No step samples before the drafter has answered, or has taken too long.
    WAITING = auto()
    # Drafts are at hand.
    READY = auto()
    # This position goes without: the drafter found nothing for it, or it is the last and has no room for any.
    PLAIN = auto()
    # Steps go on without drafts until the drafter answers: one that is busy with a long prompt must not slow the target
    # down.
    LATE = auto()
    # There is no drafter, or none any more.
    ALONE = auto()


# For whoever asks about many sequences: a member of an enumeration takes three times as long to look up.
JOINING, WAITING, READY, PLAIN, LATE, ALONE = State


class Speculation:
    """One sequence at one drafter, from its opening there to its end, or until it goes on alone.

    Others read the attributes; only the methods, which are the events, write them. `committed` is always all of the
    sequence's tokens, prompt included: the next position is its length.
    """

    __slots__ = (
        "_has_had_proposal",
        "_has_room",
        "_num_late_in_a_row",
        "address",
        "drafter",
        "drafts",
        "epoch",
        "num_bytes",
        "since",
        "state",
        "waited",
    )

    def __init__(self, drafter: LinkKey | None) -> None:
        """A sequence of which nothing has been decoded here: JOINING, or ALONE without a drafter."""
        self.state = JOINING if drafter is not None else ALONE
        self.drafter = drafter
        # Stays when the sequence has left its drafter; empty where it never had one.
        self.address = drafter.address if drafter is not None else ""
        self.epoch = 0
        # For the positions right behind the committed tokens. READY, and while JOINING, there may be some.
        self.drafts = NO_DRAFT_TOKENS
        # Since when it has been WAITING or LATE.
        self.since = 0.0
        # Whether the next position has room for drafts: a step commits one more token than it accepts.
        self._has_room = True
        self._num_late_in_a_row = 0
        self._has_had_proposal = False
        # For the trace, since `take_measured`: how long the last wait took, seconds, and bytes of proposals.
        self.waited = 0.0
        self.num_bytes = 0

    @staticmethod
    def joined(drafter: LinkKey, now: float) -> Speculation:
        """A sequence that is being decoded and was opened at the drafter `now`, with what is committed.

        It is LATE from the beginning: the drafter has all of the text to compute, for which no step waits.
        """
        speculation = Speculation(drafter)
        speculation.state, speculation.since = LATE, now
        return speculation

    def commit(self, token_ids: list[int], now: float, *, has_room: bool) -> None:
        """The target committed these tokens, and the drafter is told; `has_room`: more than the last one is to come."""
        if self.state is ALONE:
            return
        if proposed := self.drafts.token_ids:
            if first_difference(proposed, token_ids) is not None:
                self.epoch += 1
                self.drafts = NO_DRAFT_TOKENS
            elif len(proposed) > len(token_ids):
                self.drafts = self.drafts.part(len(token_ids))
            else:
                self.drafts = NO_DRAFT_TOKENS
        self._has_room = has_room
        if self.state is not LATE:
            self._look_ahead(now)

    def arrive(
        self, epoch: int, position: int, drafts: DraftTokens, committed: list[int], now: float, *, num_bytes: int = 0
    ) -> int:
        """A proposal has come; how many of its tokens are too late to be verified.

        Raises ProposalError when it breaks the protocol.
        """
        if self.state is ALONE:
            return len(drafts.token_ids)
        num_stale = self._buffer(epoch, position, drafts, committed)
        self._has_had_proposal = True
        if self.drafts.token_ids:
            self._num_late_in_a_row = 0
            self.num_bytes += num_bytes
            if self.state is WAITING:
                self.waited = now - self.since
            if self.state is not JOINING:
                self.state = READY
        elif self.state is LATE:
            # What is still owed is the answer to the last verdict.
            self._look_ahead(now)
        return num_stale

    def find_nothing(self, position: int, committed: list[int], now: float) -> None:
        """The drafter has nothing to propose for a position."""
        if position != len(committed):
            if self.state is LATE:
                self._look_ahead(now)
            return
        self._num_late_in_a_row = 0
        if self.state is WAITING:
            self.waited = now - self.since
        if self.state is WAITING or self.state is LATE:
            self.state = PLAIN

    def give_up_waiting(self, now: float, timeout: float) -> bool:
        """Time has passed: whether the sequence, which was WAITING, is LATE from now on."""
        if self.state is not WAITING or now - self.since < timeout:
            return False
        self.waited = now - self.since
        # A long prompt may keep a drafter busy for a while; that is no reason to do without it afterwards.
        self._num_late_in_a_row += int(self._has_had_proposal)
        self.state, self.since = LATE, now
        return True

    def leave(self) -> None:
        """The sequence goes on without the drafter, for good."""
        self.state, self.drafter, self.drafts = ALONE, None, NO_DRAFT_TOKENS

    def take_measured(self) -> tuple[float, int]:
        """How long the last wait took, seconds, and bytes of proposals, since the last call."""
        measured = self.waited, self.num_bytes
        self.waited, self.num_bytes = 0.0, 0
        return measured

    def peek(self, num_tokens: int) -> DraftTokens:
        """The next draft tokens, `num_tokens` at most; they stay until `commit`."""
        drafts = self.drafts
        return drafts if num_tokens >= len(drafts.token_ids) else drafts.part(0, num_tokens)

    def deadline(self, timeout: float) -> float | None:
        """When the wait for a proposal will have taken too long; None while nothing waits for one."""
        return self.since + timeout if self.state is WAITING else None

    def is_overdue(self, now: float, timeout: float) -> bool:
        """Whether the drafter owes an answer for so long that nothing waits for it any more."""
        return self.state is LATE or (self.state is WAITING and now - self.since >= timeout)

    def is_hopeless(self, now: float, timeout: float) -> bool:
        """Whether proposals come too late, or not at all, and the sequence should leave."""
        return self.state is LATE and (
            self._num_late_in_a_row >= MAX_LATE_IN_A_ROW or now - self.since >= MAX_TIMEOUTS_BEHIND * timeout
        )

    def _look_ahead(self, now: float) -> None:
        if self.drafts.token_ids:
            self.state = READY
        elif self._has_room:
            self.state, self.since = WAITING, now
        else:
            self.state = PLAIN

    def _buffer(self, epoch: int, position: int, drafts: DraftTokens, committed: list[int]) -> int:
        """Put a proposal behind those at hand, as far as it is still of use; how many of its tokens are not."""
        if epoch > self.epoch:
            raise ProposalError(f"epoch: {epoch} has not begun, {self.epoch} has not ended")
        num_offered = len(drafts.token_ids)
        if epoch < self.epoch:
            return num_offered
        num_committed, num_waiting = len(committed), len(self.drafts.token_ids)
        next_position = num_committed + num_waiting
        if position > next_position or (num_waiting and position != next_position):
            raise ProposalError(f"position: {position} leaves a gap or repeats, {next_position} comes next")
        if num_waiting + num_offered > MAX_BUFFERED_TOKENS:
            raise ProposalError(f"token_ids: more than {MAX_BUFFERED_TOKENS} draft tokens wait for this sequence")
        num_stale = 0
        if position < num_committed:
            # Committed while the proposal was on its way: compared now, as the drafter does with the verdict.
            overtaken = committed[position : position + num_offered]
            if first_difference(drafts.token_ids, overtaken) is not None:
                self.epoch += 1
                return num_offered
            num_stale = len(overtaken)
            drafts = drafts.part(num_stale)
        if num_waiting:
            together = concatenate([self.drafts, drafts])
            drafts = DraftTokens([*self.drafts.token_ids, *drafts.token_ids], together)
        self.drafts = drafts
        return num_stale
