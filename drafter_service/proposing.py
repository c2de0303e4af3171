"""What the drafter knows of the protocol for one sequence, as a machine of named states: no I/O, and no clock.

    OPENED ──▶ ANSWERED ◀──▶ WANTING

It works in lockstep: one answer, a proposal or none, and then nothing until verdicts have used it up.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

from outrider.protocol.epochs import first_difference
from outrider.protocol.errors import InvalidArgumentError

# (token_ids, num_committed, epoch), as in the message.
Verdict = tuple[list[int], int, int]


class State(Enum):
    """What is owed for a sequence."""

    # The answer to the opening. Verdicts that come before it are held back: what is drafted must not depend on whether
    # the target's first token was faster.
    OPENED = auto()
    # An answer to the last verdict.
    WANTING = auto()
    # Nothing: what was proposed is on its way or being verified, or there was nothing to propose for the position.
    ANSWERED = auto()


# For whoever asks about many sequences: a member of an enumeration takes three times as long to look up.
OPENED, WANTING, ANSWERED = State


class Proposing:
    """Which proposals of one sequence are out, and in which epoch.

    Others read the attributes; only the methods, which are the events, write them.
    """

    __slots__ = ("_held", "epoch", "proposed", "state")

    def __init__(self) -> None:
        self.state = OPENED
        self.epoch = 0
        # Draft tokens right behind the committed ones that no verdict has reached yet.
        self.proposed: list[int] = []
        self._held: list[Verdict] = []

    def propose(self, token_ids: Sequence[int]) -> None:
        """These draft tokens, for the positions right behind the committed ones, are the answer."""
        self.proposed = list(token_ids)
        self.state = ANSWERED

    def find_nothing(self) -> None:
        """There is nothing to propose: the next verdict brings new tokens, and with them perhaps a match."""
        self.state = ANSWERED

    def hold(self, token_ids: list[int], num_committed: int, epoch: int) -> bool:
        """Keep a verdict back that must not be taken in yet; False where it is to be taken in at once."""
        if self.state is not OPENED and not self._held:
            return False
        self._held.append((token_ids, num_committed, epoch))
        return True

    def release(self) -> Sequence[Verdict]:
        """The verdicts that were held back, in order, once the opening is answered: to be taken in now."""
        if self.state is OPENED or not self._held:
            return ()
        held, self._held = self._held, []
        return held

    def take(self, token_ids: list[int], num_committed: int, epoch: int, *, length: int) -> int | None:
        """A verdict on what stands behind `length` committed tokens: how many draft tokens it accepted before the first
        that differs, or None where it agrees as far as both reach.

        Raises InvalidArgumentError when it does not
        continue what is committed, or is of an epoch that has not begun.
        """
        if not token_ids:
            raise InvalidArgumentError("verdict.token_ids", "is empty")
        if length + len(token_ids) != num_committed:
            raise InvalidArgumentError(
                "verdict.num_committed",
                f"is {num_committed}, but {length} tokens are committed and {len(token_ids)} are new",
            )
        difference = first_difference(self.proposed, token_ids)
        if difference is None:
            del self.proposed[: len(token_ids)]
        else:
            self.epoch += 1
            self.proposed.clear()
        if epoch > self.epoch:
            raise InvalidArgumentError("verdict.epoch", f"is {epoch}, but the sequence is in epoch {self.epoch}")
        # Proposals that the verdict has not reached yet are still good: there is nothing to add to them.
        self.state = ANSWERED if self.proposed else WANTING
        return difference
