"""One sequence on a verifier, seen from the request that waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from outrider.protocol.errors import OutriderError
from outrider.v1 import verifier_pb2


class SequenceUpdates:
    """The updates of one sequence, from the link that receives them to the request that takes them.

    What piles up while the client is slow is taken in one go; a request's own max_tokens bounds it.
    """

    def __init__(self, sequence_id: int, on_close: Callable[[SequenceUpdates], None]) -> None:
        self.sequence_id = sequence_id
        self._on_close = on_close
        self._updates: list[verifier_pb2.SequenceUpdate] = []
        self._error: OutriderError | None = None
        self._news = asyncio.Event()

    async def take(self) -> list[verifier_pb2.SequenceUpdate]:
        """All updates since the last call, at least one. Raises the link's error when those before it are taken."""
        await self._news.wait()
        if self._updates:
            updates, self._updates = self._updates, []
            if self._error is None:
                self._news.clear()
            return updates
        assert self._error is not None
        raise self._error

    def close(self) -> None:
        """End the sequence at the verifier unless it has ended; safe to call again."""
        self._on_close(self)

    def deliver(self, update: verifier_pb2.SequenceUpdate) -> None:
        """Called by the link for each update."""
        self._updates.append(update)
        self._news.set()

    def fail(self, error: OutriderError) -> None:
        """Called by the link when no update will come any more."""
        self._error = error
        self._news.set()
