"""An event loop whose clock jumps: what waits for a time costs none."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class _JumpingSelector(selectors.SelectSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "everything waits for something that will not come"
            self.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs as asyncio's own loop does, on a clock that starts at 0."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run(main: Coroutine[Any, Any, None]) -> float:
    """Run `main`; the seconds that it took on its own clock."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main)
        return runner.get_loop().time()
