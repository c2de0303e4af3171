"""When a failed call is made again, and after how long: gRPC's own retries, as the service config has them."""

from __future__ import annotations

import json
from dataclasses import dataclass

# gRPC itself makes no more.
MAX_ATTEMPTS = 5


@dataclass(frozen=True)
class RetryPolicy:
    """Exponential back-off with gRPC's jitter. Only UNAVAILABLE is retried, and only before anything has come back.

    A gateway that names a time (`grpc-retry-pushback-ms`) is asked again after that one. All attempts are under the
    call's own deadline.
    """

    max_attempts: int = 4
    """In all, 1 to 5."""
    initial_delay_seconds: float = 0.1
    max_delay_seconds: float = 2.0

    def __post_init__(self) -> None:
        """Raises ValueError for what gRPC would refuse, or change in silence."""
        if not 1 <= self.max_attempts <= MAX_ATTEMPTS:
            raise ValueError(f"max_attempts: {self.max_attempts} is not between 1 and {MAX_ATTEMPTS}")
        for name in ("initial_delay_seconds", "max_delay_seconds"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name}: {getattr(self, name)} is no time to wait")

    def channel_options(self, max_request_bytes: int) -> list[tuple[str, int | str]]:
        """gRPC's options for a channel whose calls, of at most so many bytes, follow this policy."""
        if self.max_attempts == 1:
            return []
        policy = {
            "maxAttempts": self.max_attempts,
            "initialBackoff": f"{self.initial_delay_seconds:.9f}s",
            "maxBackoff": f"{self.max_delay_seconds:.9f}s",
            "backoffMultiplier": 2,
            "retryableStatusCodes": ["UNAVAILABLE"],
        }
        # A name without a service stands for all methods.
        config = {"methodConfig": [{"name": [{}], "retryPolicy": policy}]}
        return [
            ("grpc.service_config", json.dumps(config)),
            # gRPC keeps a request for its next attempt only up to this size, which would be 256 KiB.
            ("grpc.per_rpc_retry_buffer_size", max_request_bytes),
        ]
