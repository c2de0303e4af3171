"""Capturing work of a fixed shape in CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector from freeing an old engine's graphs while a new one is captured: CUDA forbids that."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class GraphPool:
    """Captures graphs that share one pool of memory: only one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Work that has run before has its kernels compiled and its library handles made, which a capture cannot do;
        # on a stream of its own, as captures want it.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = None
        # The pool lives as long as a graph that uses it.
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def capture(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Run `work` once, then record it; what it reads and writes must keep its address."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            work()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # What other threads of the process do meanwhile, another engine's or a test's, is theirs and may go on.
        mode = "thread_local"
        with _no_collection(), torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode=mode):
            work()
        self._pool = graph.pool()
        self._graphs.append(graph)
        return graph


def batch_buckets(most: int) -> list[int]:
    """The batch sizes that graphs are captured for, ascending, the last one `most`: fine where padding costs most."""
    candidates = chain((1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64), range(80, 256, 16), range(256, most, 64))
    return [size for size in candidates if size < most] + [most]
