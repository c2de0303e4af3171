"""How draft tokens are verified: the rules by the names that people write, and as messages have them."""

from __future__ import annotations

from enum import StrEnum

from outrider.v1 import common_pb2


class Verification(StrEnum):
    """How draft tokens are verified. At temperature 0 all rules are greedy."""

    GREEDY = "greedy"
    """Accept while the draft token is the target's most likely token; temperature 0 only."""
    REJECTION = "rejection"
    """Accept with min(1, p/q), then sample from the residual: the target's distribution, exactly."""
    COUPLED = "coupled"
    """Accept while the draft token is the one that the target draws itself: its distribution, exactly, and the same
    tokens with any drafts and without."""

    def to_message(self) -> common_pb2.Verification:
        """The rule in a message."""
        return _NUMBERS[self]

    @staticmethod
    def from_message(number: int) -> Verification | None:
        """The rule of a message; None where it names none that is known here."""
        return _RULES.get(number)


_NUMBERS = {
    Verification.GREEDY: common_pb2.VERIFICATION_GREEDY,
    Verification.REJECTION: common_pb2.VERIFICATION_REJECTION,
    Verification.COUPLED: common_pb2.VERIFICATION_COUPLED,
}
_RULES: dict[int, Verification] = {number: rule for rule, number in _NUMBERS.items()}
