"""The dashboard put together: what it watches, what it keeps, and its life."""

from __future__ import annotations

from typing import Any

from gateway.dashboard.feed import LiveFeed
from gateway.dashboard.receiver import Receiver
from gateway.dashboard.span_store import SpanStore
from gateway.generator import Generator
from gateway.verifier_pool import VerifierPool
from outrider.protocol.errors import OutriderError


class Dashboard:
    """Made with the gateway's own parts, on the event loop that serves it."""

    def __init__(self, generator: Generator, pool: VerifierPool, *, otlp_listen: str | None, shows_texts: bool) -> None:
        self._generator = generator
        self._pool = pool
        self.feed = LiveFeed(shows_texts=shows_texts)
        self.spans = SpanStore()
        self._receiver = Receiver(self.spans, otlp_listen) if otlp_listen is not None else None
        generator.watcher = self.feed

    @property
    def otlp_address(self) -> str:
        """host:port that takes traces, empty before it is bound or where there is none."""
        return "" if self._receiver is None else self._receiver.address

    async def start(self) -> None:
        """Begin to take in traces. Raises OSError when the address is taken."""
        if self._receiver is not None:
            await self._receiver.start()

    async def stop(self) -> None:
        """Take in no more."""
        if self._receiver is not None:
            await self._receiver.stop()

    def state(self) -> dict[str, Any]:
        """Everything but tokens and traces."""
        return {
            **self.feed.state(),
            "model": self._model_name(),
            "verifiers": [
                {
                    "address": link.address,
                    "is_ready": link.is_ready,
                    "num_sequences": link.num_sequences,
                    "num_running": link.load.num_running,
                    "num_waiting": link.load.num_waiting,
                    "num_kv_blocks": link.load.num_kv_blocks,
                    "num_free_kv_blocks": link.load.num_free_kv_blocks,
                }
                for link in self._pool.links
            ],
            "drafters": [
                {
                    "address": drafter.address,
                    "is_ready": drafter.is_ready,
                    "num_sequences": drafter.num_sequences,
                    "detail": drafter.detail,
                }
                for drafter in self._pool.drafter_members()
            ],
            "takes_traces": self._receiver is not None,
        }

    def _model_name(self) -> str:
        try:
            return self._generator.model_name
        except OutriderError:
            return ""
