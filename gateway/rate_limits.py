"""How much callers have used of their requests and tokens a minute, on this gateway."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from gateway.auth import Caller


@dataclass(frozen=True)
class Excess:
    """Why a caller has to wait: `reason` is a word for the metrics."""

    reason: str
    message: str
    seconds: float


class _Usage:
    """Fills as something is used, and empties at so much a minute; holds a minute's worth."""

    def __init__(self, now: float) -> None:
        self._used = 0.0
        self._at = now
        self._per_minute = 1

    def add(self, amount: float, now: float) -> None:
        self._advance(now)
        self._used += amount

    def seconds_until(self, amount: float, per_minute: int, now: float) -> float:
        """Until there is room for so much, with the limit as it is by now."""
        self._advance(now)
        self._per_minute = per_minute
        return max(0.0, self._used + amount - per_minute) * 60 / per_minute

    def _advance(self, now: float) -> None:
        self._used = max(0.0, self._used - (now - self._at) * self._per_minute / 60)
        self._at = now


class RateLimits:
    """Keeps the books; callers are as many as the file of keys names. All methods run on the event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._requests: dict[str, _Usage] = {}
        self._tokens: dict[str, _Usage] = {}

    def take(self, caller: Caller) -> Excess | None:
        """Count a request, or say why it is too early for it.

        How many tokens a request will cost nobody knows before its end: a caller that has any left may begin, and what
        it then uses beyond them it waits for afterwards.
        """
        now = self._clock()
        if (limit := caller.tokens_per_minute) is not None:
            seconds = self._tokens.setdefault(caller.name, _Usage(now)).seconds_until(1, limit, now)
            if seconds > 0:
                return Excess("token_rate", f"this caller's {limit} tokens a minute are used up", seconds)
        else:
            self._tokens.pop(caller.name, None)
        if (limit := caller.requests_per_minute) is not None:
            usage = self._requests.setdefault(caller.name, _Usage(now))
            seconds = usage.seconds_until(1, limit, now)
            if seconds > 0:
                return Excess("request_rate", f"this caller's {limit} requests a minute are used up", seconds)
            usage.add(1, now)
        return None

    def spend(self, caller_name: str, num_tokens: int) -> None:
        """Count tokens of a prompt or an output."""
        if (usage := self._tokens.get(caller_name)) is not None:
            usage.add(num_tokens, self._clock())
