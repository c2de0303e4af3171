"""Somebody who looks on while requests run: the dashboard."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from outrider.v1 import generation_pb2

if TYPE_CHECKING:
    from gateway.sequence import Sequence

Event = generation_pb2.Started | generation_pb2.Chunk | generation_pb2.Finished


class Watcher(Protocol):
    """Hears of the events of all requests, on the event loop; it must be quick, and change nothing."""

    @property
    def wants_texts(self) -> bool:
        """Whether each token shall come with its text, and not only with its origin."""

    def saw(self, sequence: Sequence, event: Event) -> None:
        """An event is about to go to the client."""

    def left(self, sequence: Sequence) -> None:
        """No more events will come for this sequence, whether or not the last one was `Finished`."""
