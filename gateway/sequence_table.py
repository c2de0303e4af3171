"""The running sequences, and how many there may be."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import contextmanager

from engine.errors import ResourceExhaustedError, UnavailableError
from gateway.sequence import Sequence

RETRY_DELAY_SECONDS = 1.0


class SequenceTable:
    """Admits sequences up to a capacity, until it is told to drain."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._ids = itertools.count(1)
        self._admitted: set[int] = set()
        self._sequences: dict[int, Sequence] = {}
        self._is_draining = False
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        """How many sequences are admitted."""
        return len(self._admitted)

    @contextmanager
    def admit(self) -> Iterator[int]:
        """A place, held while the context lasts, under an id that is never used again.

        Raises UnavailableError while draining and ResourceExhaustedError when full.
        """
        if self._is_draining:
            raise UnavailableError("the gateway is draining", retry_delay_seconds=RETRY_DELAY_SECONDS)
        if len(self._admitted) >= self._capacity:
            raise ResourceExhaustedError(
                f"{self._capacity} sequences are running, as many as this gateway takes",
                retry_delay_seconds=RETRY_DELAY_SECONDS,
            )
        sequence_id = next(self._ids)
        self._admitted.add(sequence_id)
        self._empty.clear()
        try:
            yield sequence_id
        finally:
            self._sequences.pop(sequence_id, None)
            self._admitted.discard(sequence_id)
            if not self._admitted:
                self._empty.set()

    def add(self, sequence: Sequence) -> None:
        """Keep an admitted sequence until its place is given up."""
        self._sequences[sequence.sequence_id] = sequence

    async def drain(self) -> None:
        """Admit nothing new and return when the last sequence is done."""
        self._is_draining = True
        await self._empty.wait()
