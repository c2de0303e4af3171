"""How long a sequence waits for its drafter: by what its round trips usually take, within what waiting can be worth.

Pure arithmetic on durations in seconds; whoever measures hands them in.
"""

from __future__ import annotations

# A wait that costs nothing worth mentioning next to what a lost drafter costs, on any machine.
LEAST_SECONDS = 0.5
MOST_SECONDS = 10.0
# A chain is worth a few steps of the target; a wait for many more would be slower than the target alone.
MAX_STEPS = 10
# A drafter that owes an answer and has sent nothing at all for so many waits is taken for lost. Nobody waits all that
# time: sequences go on without drafts after the first.
WAITS_UNTIL_LOST = 10
# As TCP estimates when an answer is overdue (RFC 6298).
_MEAN_WEIGHT = 1 / 8
_DEVIATION_WEIGHT = 1 / 4
_DEVIATIONS = 4


class UsualTime:
    """Mean and mean deviation of a duration, the newest measurements first."""

    __slots__ = ("deviation", "mean")

    def __init__(self) -> None:
        self.mean: float | None = None  # None until something was measured
        self.deviation = 0.0

    def add(self, seconds: float) -> None:
        """Take in a measurement."""
        if self.mean is None:
            self.mean, self.deviation = seconds, seconds / 2
            return
        self.deviation += _DEVIATION_WEIGHT * (abs(seconds - self.mean) - self.deviation)
        self.mean += _MEAN_WEIGHT * (seconds - self.mean)


class Patience:
    """With one drafter. `step` is how long the target's steps take, which all drafters share."""

    def __init__(self, step: UsualTime, fixed_seconds: float | None = None) -> None:
        """`fixed_seconds`: neither measure nor guess, but wait exactly so long, and take silence in it for a loss."""
        self._step = step
        self._fixed_seconds = fixed_seconds
        self._round_trip = UsualTime()

    def answered(self, seconds: float) -> None:
        """An answer has come so long after the verdict that it answers."""
        self._round_trip.add(seconds)

    @property
    def seconds(self) -> float:
        """How long a sequence waits for drafts before it takes a step without."""
        if self._fixed_seconds is not None:
            return self._fixed_seconds
        worth_waiting = min(max(LEAST_SECONDS, MAX_STEPS * (self._step.mean or 0.0)), MOST_SECONDS)
        usual = self._round_trip.mean
        if usual is None:
            # The first answer comes after the drafter has computed a prompt.
            return worth_waiting
        return min(max(LEAST_SECONDS, usual + _DEVIATIONS * self._round_trip.deviation), worth_waiting)

    @property
    def seconds_until_lost(self) -> float:
        """After how long a silence a drafter that owes an answer is taken for lost."""
        return self.seconds if self._fixed_seconds is not None else WAITS_UNTIL_LOST * self.seconds
