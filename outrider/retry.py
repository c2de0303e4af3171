"""When a failed call may be made again, and after how long."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from outrider.errors import ClientError, UnavailableError


@dataclass(frozen=True)
class RetryPolicy:
    """Exponential backoff with jitter. Only UNAVAILABLE is retried, and only before the first message."""

    max_attempts: int = 4
    initial_delay_seconds: float = 0.1
    max_delay_seconds: float = 2.0


class Attempts:
    """The attempts at one call, under one deadline for all of them."""

    def __init__(self, policy: RetryPolicy, timeout: float | None) -> None:
        self._policy = policy
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._num_failed = 0

    @property
    def remaining_seconds(self) -> float | None:
        """Time until the deadline; None without one."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def delay_after(self, error: ClientError) -> float | None:
        """Seconds to wait before the next attempt; None when the error is final."""
        self._num_failed += 1
        if not isinstance(error, UnavailableError) or self._num_failed >= self._policy.max_attempts:
            return None
        backoff = self._policy.initial_delay_seconds * 2 ** (self._num_failed - 1)
        # The jitter spreads out clients that lost the same gateway at the same moment.
        delay = min(self._policy.max_delay_seconds, max(backoff, error.retry_delay_seconds)) * random.uniform(0.8, 1.2)
        remaining = self.remaining_seconds
        return delay if remaining is None or delay < remaining else None
