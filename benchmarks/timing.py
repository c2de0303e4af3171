"""Clocks: medians of repeated calls on a GPU or a CPU, CUDA graphs, and the bandwidth that floors are computed from."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable

import torch

_GIB = 1 << 30


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def resolve_device(name: str) -> torch.device:
    """The device for `auto`, `cpu` or `cuda:N`; makes it the current one.

    A CPU only ever runs the tiny shapes, whose work is too small to be shared out to threads.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    return device


def free_memory(device: torch.device) -> None:
    """Give back to the device what nothing refers to any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def wall_milliseconds(
    call: Callable[[], object], device: torch.device, *, num_runs: int = 30, seconds: float = 3.0
) -> float:
    """Median time from the call until the device is done with it, host work included.

    Three calls warm up; then `num_runs` calls, fewer (but 3 at least) where they take longer than `seconds`.
    """
    for _ in range(3):
        call()
    synchronize(device)
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < num_runs and (len(times) < 3 or time.perf_counter() < end):
        start = time.perf_counter()
        call()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def queued_milliseconds(
    call: Callable[[], object], device: torch.device, *, num_calls: int = 10, num_runs: int = 5
) -> float:
    """Time a call when calls are queued without waiting for results: the larger of device time and host time.

    Median over `num_runs` runs of `num_calls` calls; on a CPU the same as `wall_milliseconds`.
    """
    if device.type != "cuda":
        return wall_milliseconds(call, device, num_runs=num_runs)
    call()
    times = []
    for _ in range(num_runs):
        start, end = _event(), _event()
        synchronize(device)
        start.record()
        for _ in range(num_calls):
            call()
        end.record()
        synchronize(device)
        times.append(float(start.elapsed_time(end)) / num_calls)
    return statistics.median(times)


def graph_milliseconds(
    call: Callable[[], object], device: torch.device, *, num_calls: int = 1, num_replays: int = 20, num_runs: int = 7
) -> float:
    """Time of one of the `num_calls` pieces of work that `call` does, captured in a CUDA graph and replayed.

    Median over `num_runs` runs of `num_replays` replays back to back. On a CPU there is no graph: plain wall time.
    """
    if device.type != "cuda":
        return wall_milliseconds(call, device, num_runs=num_runs) / num_calls
    graph = capture(call, device)
    return queued_milliseconds(graph.replay, device, num_calls=num_replays, num_runs=num_runs) / num_calls


def capture(call: Callable[[], object], device: torch.device) -> torch.cuda.CUDAGraph:
    """A graph of what `call` does, after the warm-up that capturing needs; replayed twice already."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream(device).wait_stream(stream)
    synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for _ in range(2):
        graph.replay()
    synchronize(device)
    return graph


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second of a large copy within the device's memory, read and written bytes both counted."""
    num_bytes = 4 * _GIB if device.type == "cuda" else _GIB // 16
    # Random bytes: a copy of zeros may be faster than real data will ever be.
    source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    per_copy = queued_milliseconds(lambda: copy.copy_(source), device, num_calls=4, num_runs=5)
    return 2 * num_bytes / (per_copy * 1e-3)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
