"""Waiting without going to sleep, for services whose frames come every few milliseconds.

A core that has idled for a millisecond is in a deep sleep, and the way out of it can take longer than everything else
that happens to a small frame. Polling for a while keeps the core awake as long as there is traffic; without traffic the
service sleeps as any other.
"""

from __future__ import annotations

import asyncio
import os
import selectors
import time

AUTOMATIC_SECONDS = 0.02
# Two threads of a service poll; with fewer cores they would take what gRPC and the model need.
MIN_CORES = 8


def resolve_busy_poll(seconds: float | None, *, has_gpu: bool) -> float:
    """How long a service's threads poll, seconds: as the operator said, or as it suits the machine."""
    if seconds is not None:
        return seconds
    return AUTOMATIC_SECONDS if has_gpu and len(os.sched_getaffinity(0)) >= MIN_CORES else 0.0


class BusyPollSelector(selectors.DefaultSelector):
    """A selector that looks again and again for `busy_poll_seconds` before it sleeps."""

    def __init__(self, busy_poll_seconds: float) -> None:
        super().__init__()
        self._busy_poll_seconds = busy_poll_seconds

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """As any selector's."""
        if timeout is not None and timeout <= 0:
            return super().select(timeout)
        start = time.monotonic()
        busy = self._busy_poll_seconds if timeout is None else min(self._busy_poll_seconds, timeout)
        while time.monotonic() - start < busy:
            if ready := super().select(0):
                return ready
            time.sleep(0)  # lets the engine's thread have the interpreter
        return super().select(None if timeout is None else max(timeout - (time.monotonic() - start), 0.0))


def new_event_loop(busy_poll_seconds: float) -> asyncio.AbstractEventLoop:
    """An event loop that polls so long before it sleeps; an ordinary one for 0."""
    if busy_poll_seconds <= 0:
        return asyncio.new_event_loop()
    return asyncio.SelectorEventLoop(BusyPollSelector(busy_poll_seconds))
