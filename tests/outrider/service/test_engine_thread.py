"""The thread that owns a model, and its two queues."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest

from outrider.service.engine_thread import EngineThread


class Recorder:
    """An engine that notes what happens to it; `pauses` is what its steps return, None for ever after."""

    def __init__(self, *pauses: float | None) -> None:
        self.log: list[str] = []
        self.threads: set[str] = set()
        self._pauses = list(pauses)

    def load(self) -> None:
        self._note("load")

    def handle(self, event: str) -> None:
        self._note(event)
        if event == "bad":
            raise RuntimeError("planted")

    def step(self, emit: Callable[[str], None]) -> float | None:
        self._note("step")
        emit(f"after {self.log[-2]}")
        return self._pauses.pop(0) if self._pauses else None

    def _note(self, what: str) -> None:
        self.log.append(what)
        self.threads.add(threading.current_thread().name)


class Harness:
    def __init__(self, engine: Recorder) -> None:
        self.outputs: list[str] = []
        self.failures: list[BaseException] = []
        self.loop_thread = threading.current_thread().name
        self.delivered_on: set[str] = set()
        self.thread: EngineThread[str, str] = EngineThread(engine, self._deliver, self.failures.append, "engine")

    def _deliver(self, output: str) -> None:
        self.outputs.append(output)
        self.delivered_on.add(threading.current_thread().name)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


async def test_everything_runs_on_the_engines_thread_and_comes_back_on_the_loop() -> None:
    engine = Recorder()
    harness = Harness(engine)
    harness.thread.post("early")
    await harness.thread.start()
    await until(lambda: harness.outputs != [])
    harness.thread.post("one")
    harness.thread.post("two")
    await until(lambda: "two" in engine.log and engine.log[-1] == "step")
    await until(lambda: harness.outputs[-1] == "after two")
    await harness.thread.stop()
    assert engine.log[:3] == ["load", "early", "step"]
    assert engine.log.index("one") < engine.log.index("two")
    assert engine.threads == {"engine"}
    assert harness.delivered_on == {harness.loop_thread}
    assert harness.failures == []


async def test_it_sleeps_when_there_is_nothing_to_do_and_wakes_for_an_event() -> None:
    """Catches a thread that spins, and one that sleeps through an event."""
    engine = Recorder(0.0, 0.0, None)
    harness = Harness(engine)
    await harness.thread.start()
    await until(lambda: len(harness.outputs) == 3)
    await asyncio.sleep(0.05)
    assert engine.log.count("step") == 3
    harness.thread.post("wake up")
    await until(lambda: len(harness.outputs) == 4)
    await harness.thread.stop()


async def test_it_wakes_by_itself_after_the_pause() -> None:
    engine = Recorder(0.05)
    harness = Harness(engine)
    start = time.monotonic()
    await harness.thread.start()
    await until(lambda: len(harness.outputs) == 2)
    assert time.monotonic() - start >= 0.05
    await harness.thread.stop()


async def test_a_flood_of_events_does_not_keep_it_from_stepping() -> None:
    """Catches a peer that stops everybody's tokens by sending faster than frames are handled."""
    engine = Recorder()
    harness = Harness(engine)
    handle = engine.handle

    def handle_and_repeat(event: str) -> None:
        handle(event)
        if len(engine.log) < 500:
            harness.thread.post("flood")

    engine.handle = handle_and_repeat  # type: ignore[method-assign]
    harness.thread.post("flood")
    await harness.thread.start()
    await until(lambda: len(engine.log) >= 500)
    await harness.thread.stop()
    assert engine.log.count("step") > 100


async def test_what_loading_raises_is_raised_by_start() -> None:
    engine = Recorder()

    def fail() -> None:
        raise ValueError("no such model")

    engine.load = fail  # type: ignore[method-assign]
    harness = Harness(engine)
    with pytest.raises(ValueError, match="no such model"):
        await harness.thread.start()
    await harness.thread.stop()
    assert harness.failures == []


async def test_a_failure_is_reported_once_and_the_thread_ends() -> None:
    engine = Recorder()
    harness = Harness(engine)
    await harness.thread.start()
    harness.thread.post("bad")
    await until(lambda: harness.failures != [])
    harness.thread.post("good")
    await asyncio.sleep(0.02)
    await harness.thread.stop()
    assert "good" not in engine.log
    assert [str(error) for error in harness.failures] == ["planted"]


async def test_stopping_waits_for_the_step_in_progress() -> None:
    engine = Recorder()
    harness = Harness(engine)
    step = engine.step

    def slow(emit: Callable[[str], None]) -> float | None:
        time.sleep(0.1)
        return step(emit)

    engine.step = slow  # type: ignore[method-assign]
    await harness.thread.start()
    await asyncio.sleep(0.01)
    await harness.thread.stop()
    assert engine.log[-1] == "step"


def test_outputs_after_the_loop_has_closed_are_dropped() -> None:
    """Catches a process that ends with a traceback because its engine was faster than its network."""
    engine = Recorder(*[0.0] * 10_000)
    harness: list[Harness] = []

    async def main() -> None:
        harness.append(Harness(engine))
        await harness[0].thread.start()

    asyncio.run(main())
    time.sleep(0.02)
    asyncio.run(harness[0].thread.stop())
    assert harness[0].failures == []
