"""How many draft tokens a step verifies: as many as bring most tokens a second.

A row more costs little while reading the weights is most of a step, and much when products are; what it brings falls
with its distance from the last committed token, as it counts only if all before it are accepted. After SmartSpec (Liu
et al., arXiv 2406.14066), with times that were measured at start-up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from engine.step_costs import StepCosts

# The weight of old tests against a new one, and how much is known of a sequence that has seen none.
_DECAY = 0.98
_PRIOR_RATE = 0.7
_PRIOR_WEIGHT = 4.0
# Of the host's work on a step, before the next can begin.
_HOST_SECONDS = 0.0003


class AcceptanceRate:
    """How often a sequence's draft tokens are accepted when they are tested, the newest tests counting most."""

    __slots__ = ("_num_accepted", "_num_tested")

    def __init__(self) -> None:
        self._num_accepted = _PRIOR_RATE * _PRIOR_WEIGHT
        self._num_tested = _PRIOR_WEIGHT

    def add(self, num_drafts: int, num_accepted: int) -> None:
        """A step verified so many draft tokens: those behind the first rejection were not tested."""
        if num_drafts:
            num_tested = min(num_accepted + 1, num_drafts)
            decay = _DECAY**num_tested
            self._num_accepted = self._num_accepted * decay + num_accepted
            self._num_tested = self._num_tested * decay + num_tested

    @property
    def value(self) -> float:
        """From 0 to 1."""
        return self._num_accepted / self._num_tested


class RowBudget:
    """Chooses for one step, from what is known before it: never from what was drawn for a position, or its chance."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs

    def choose(self, chains: Iterable[tuple[int, float]]) -> int:
        """The most draft tokens that a sequence should have verified, 0 included.

        `chains` has, for each sequence that decodes in the step, how many are at hand (or might be, where the number
        would tell of the tokens), and its acceptance rate.
        """
        lengths: Counter[int] = Counter()
        total = 0.0
        for length, rate in chains:
            lengths[length] += 1
            total += rate
        num_rows = lengths.total()
        if not num_rows:
            return 0
        rate = total / num_rows
        longest = max(lengths)
        # Rows that have a draft token at a distance, and what each of them brings.
        expected, num_left, share = float(num_rows), num_rows - lengths[0], rate
        gains = [expected]
        for distance in range(1, longest + 1):
            expected += num_left * share
            gains.append(expected)
            num_left -= lengths[distance]
            share *= rate
        best, best_speed = 0, 0.0
        for query_len, seconds in self._costs.of_rows(num_rows):
            num_drafts = min(query_len - 1, longest)
            speed = gains[num_drafts] / (seconds + _HOST_SECONDS)
            if speed > best_speed:
                best, best_speed = num_drafts, speed
            if num_drafts == longest:
                break
        return best
