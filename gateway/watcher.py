"""Somebody who looks on while requests run: the dashboard."""

from __future__ import annotations

from typing import Protocol

from outrider.v1 import generation_pb2

Event = generation_pb2.Started | generation_pb2.Chunk | generation_pb2.Finished


class Watcher(Protocol):
    """Hears of the events of all requests, on the event loop; it must be quick, and change nothing."""

    @property
    def wants_texts(self) -> bool:
        """Whether each token shall come with its text, and not only with its origin."""

    def saw(self, sequence_id: int, event: Event) -> None:
        """An event is about to go to the client."""

    def lost(self, sequence_id: int) -> None:
        """No more events will come for this sequence, whether or not the last one was `Finished`."""
