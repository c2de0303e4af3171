"""The one thread that owns a model, and the queues between it and the event loop."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

logger = logging.getLogger(__name__)

Event = TypeVar("Event")
Output = TypeVar("Output")
EventIn = TypeVar("EventIn", contravariant=True)
OutputOut = TypeVar("OutputOut", covariant=True)


class Engine(Protocol[EventIn, OutputOut]):
    """What the thread runs. Every method is called on the engine's thread."""

    def load(self) -> None:
        """Load and warm up; called once, first."""

    def handle(self, event: EventIn) -> None:
        """Take in one event from the network."""

    def step(self, emit: Callable[[OutputOut], None]) -> float | None:
        """Do one step of work, handing what it produces to `emit`.

        Returns how long the thread may sleep when no event comes, seconds: 0 when there is more to do, None for ever.
        """


class EngineThread(Generic[Event, Output]):
    """Runs an engine: events in from the loop, outputs back to the loop, in order.

    `busy_poll_seconds` is how long an idle thread looks for an event again and again before it sleeps; see
    `outrider.service.busy_poll`.

    `deliver` is called on the loop for each output. `on_failure` is called on the loop, once, when the engine raises:
    an engine handles what can be handled, so an exception here is a bug or a dead device, and the process should end.
    """

    def __init__(
        self,
        engine: Engine[Event, Output],
        deliver: Callable[[Output], None],
        on_failure: Callable[[BaseException], None],
        name: str,
        *,
        busy_poll_seconds: float = 0.0,
    ) -> None:
        self._engine = engine
        self._deliver = deliver
        self._on_failure = on_failure
        self._busy_poll_seconds = busy_poll_seconds
        self._inbox: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loaded: asyncio.Future[None] | None = None

    async def start(self) -> None:
        """Start the thread and return when the engine has loaded. Raises what loading raised."""
        self._loop = asyncio.get_running_loop()
        self._loaded = self._loop.create_future()
        self._thread.start()
        await self._loaded

    def post(self, event: Event) -> None:
        """Queue an event for the engine, from any thread."""
        self._inbox.put(event)

    async def stop(self) -> None:
        """End the thread after the step in progress."""
        if self._thread.is_alive():
            self._inbox.put(None)
            await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        assert self._loaded is not None
        try:
            self._engine.load()
        except BaseException as error:
            self._on_loop(_settle, self._loaded, error)
            return
        self._on_loop(_settle, self._loaded, None)
        try:
            self._work()
        except BaseException as error:
            logger.exception("the engine failed")
            self._on_loop(self._on_failure, error)

    def _work(self) -> None:
        pause: float | None = 0.0
        while True:
            for event in self._next_events(pause):
                if event is None:
                    return
                self._engine.handle(event)
            pause = self._engine.step(self._emit)

    def _next_events(self, pause: float | None) -> list[Event | None]:
        """What has arrived, or what arrives first within `pause`; what comes later waits, or a flood would stop us."""
        try:
            first = self._inbox.get_nowait() if pause == 0.0 else self._wait(pause)
        except queue.Empty:
            return []
        return [first, *(self._inbox.get_nowait() for _ in range(self._inbox.qsize()))]

    def _wait(self, pause: float | None) -> Event | None:
        """The next event. Raises queue.Empty when none comes within `pause`."""
        start = time.monotonic()
        busy = self._busy_poll_seconds if pause is None else min(self._busy_poll_seconds, pause)
        while time.monotonic() - start < busy:
            try:
                return self._inbox.get_nowait()
            except queue.Empty:
                time.sleep(0)  # lets the event loop have the interpreter
        return self._inbox.get(timeout=None if pause is None else max(pause - (time.monotonic() - start), 0.0))

    def _emit(self, output: Output) -> None:
        self._on_loop(self._deliver, output)

    def _on_loop(self, function: Callable[..., None], *arguments: object) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            # The loop is closed: the process is ending and nobody is left to tell.
            logger.debug("dropped an output: the event loop is closed")


def _settle(future: asyncio.Future[None], error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
