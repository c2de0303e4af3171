"""Time to load the target: from the disk itself, and from files that the system already has in memory.

    python -m benchmarks.loading --pair DIR --out FILE

`load` is `engine.model_loader.load_model`, from the call to the weights' arrival on the device; libraries are imported
and the device is in use before. `read` is the same files read into a buffer and dropped. `host` is the most memory of
its own that the process held meanwhile beyond what it held before: a copy of the weights on their way would show. A
pair in memory (tmpfs) is copied to a disk first. Weights that are not those in the files are a refusal.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open

from benchmarks import goals
from benchmarks.pair import add_pair_arguments, pair_of
from benchmarks.process_stats import ProcessStats
from benchmarks.records import (
    Record,
    Recorder,
    RefusalError,
    has_goals,
    of_kind,
    progress,
    remarks,
    run_refusable,
    table,
)
from benchmarks.timing import free_memory, resolve_device, synchronize
from engine.model_loader import LoadedModel, load_model

_READERS = 4  # as many as transformers has
_BUFFER_BYTES = 16 << 20
_NUM_COMPARED = 3
# What of the files has to come from the disk for a measurement to be one of the disk.
_COLD_SHARE = 0.9


class LoadingBenchmark:
    """All measurements of one model on one device."""

    def __init__(self, model: Path, dtype: torch.dtype, device: torch.device, recorder: Recorder) -> None:
        self._model = model
        self._dtype = dtype
        self._device = device
        self._recorder = recorder
        self._files = sorted(model.glob("*.safetensors"))
        self._num_bytes = sum(file.stat().st_size for file in self._files)

    def run(self) -> None:
        """Measure. Raises RefusalError when the weights on the device are not those in the files."""
        self._load("warm-up")
        for source in ("disk", "memory"):
            if source == "disk":
                evict(self._files)
            self._record(source, "read", lambda: read_through(self._files))
            if source == "disk":
                evict(self._files)
            self._load(source)

    def _load(self, source: str) -> None:
        loaded: LoadedModel | None = None

        def load() -> None:
            nonlocal loaded
            loaded = load_model(self._model, device=self._device, dtype=self._dtype)
            synchronize(self._device)

        if source == "warm-up":
            load()
        else:
            self._record(source, "load", load)
        assert loaded is not None
        _check(loaded.model, self._files, self._dtype)
        del loaded
        free_memory(self._device)

    def _record(self, source: str, what: str, action: Callable[[], None]) -> None:
        read_before = bytes_from_disk()
        with peak_memory() as peak:
            start = time.perf_counter()
            action()
            seconds = time.perf_counter() - start
        fetched = bytes_from_disk() - read_before
        progress(f"{what} from {source}: {seconds:.2f} s, {fetched / 1e9:.2f} GB from the disk")
        if source == "disk" and fetched < _COLD_SHARE * self._num_bytes:
            reason = f"only {fetched / 1e9:.2f} of {self._num_bytes / 1e9:.2f} GB came from the disk"
            self._recorder.write("failed", what=f"{what} from {source}", reason=reason)
            return
        self._recorder.write(
            "loading",
            source=source,
            what=what,
            seconds=seconds,
            num_bytes=self._num_bytes,
            bytes_from_disk=fetched,
            host_bytes=peak[0],
        )


def evict(files: Sequence[Path]) -> None:
    """Let the system forget what it has of the files in memory."""
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())  # pages that are not written yet cannot be dropped
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_through(files: Sequence[Path]) -> None:
    """Read the files from beginning to end, several at a time."""

    def read(file: Path) -> None:
        buffer = bytearray(_BUFFER_BYTES)
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass

    with ThreadPoolExecutor(_READERS) as pool:
        list(pool.map(read, files))


def bytes_from_disk() -> int:
    """What this process has had fetched from a disk so far."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """A list whose one number is, at the end, the most memory of its own that this process gained, in bytes."""
    peak = [0]
    start = ProcessStats.of_this().anonymous_bytes
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(0.005):
            peak[0] = max(peak[0], ProcessStats.of_this().anonymous_bytes - start)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        is_over.set()
        watcher.join()


def _check(model: torch.nn.Module, files: Sequence[Path], dtype: torch.dtype) -> None:
    found = model.state_dict()
    for file in files:
        with safe_open(file, framework="pt") as opened:
            names = sorted(opened.keys())
            for name in names[:: max(1, len(names) // _NUM_COMPARED)]:
                if not torch.equal(found[name].cpu(), opened.get_tensor(name).to(dtype)):
                    raise RefusalError(f"{name} on the device is not what {file.name} holds")


@contextmanager
def on_disk(model: Path, scratch: Path) -> Iterator[Path]:
    """The model's directory, or a copy in `scratch` where the directory is in memory."""
    if _file_system(model) != "tmpfs":
        yield model
        return
    with tempfile.TemporaryDirectory(prefix="outrider-loading-", dir=scratch) as directory:
        if _file_system(Path(directory)) == "tmpfs":
            raise RefusalError(f"{scratch} is in memory: name a directory on a disk with --scratch")
        progress(f"copying the model to {directory}")
        yield shutil.copytree(model, Path(directory) / "model")


def _file_system(path: Path) -> str:
    """The type of the file system that a path is on."""
    path = path.resolve()
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    over = [(mount, kind) for mount, kind in mounts if path.is_relative_to(mount)]
    return max(over, key=lambda pair: len(pair[0]))[1]


def summary(records: Sequence[Record]) -> str:
    """The table of what was recorded."""
    rows = []
    for record in of_kind(records, "loading"):
        goal = goals.LOADING_SECONDS if has_goals(records) and record["what"] == "load" else None
        gigabytes = (record["num_bytes"] / 1e9, record["bytes_from_disk"] / 1e9, record["host_bytes"] / 1e9)
        rows.append((f"{record['what']} from {record['source']}", record["seconds"], goal, *gigabytes))
    return table(("", "seconds", "goal", "GB", "from the disk, GB", "host, GB"), rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_pair_arguments(parser)
    parser.add_argument("--out", type=Path, default=Path("loading.jsonl"), help="JSON lines (default %(default)s)")
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--scratch", type=Path, default=Path(tempfile.gettempdir()), help="on a disk (default %(default)s)"
    )
    parser.add_argument(
        "--budget-seconds", type=float, default=90.0, help="accepted as by the other parts; nothing is cut short"
    )
    parser.add_argument("--tiny", action="store_true", help="a tiny pair, for a CPU")
    options = parser.parse_args(arguments)
    if options.tiny:
        options.shape = "tiny"
    device = resolve_device(options.device)
    recorder = Recorder(options.out, "loading", device)
    pair = pair_of(options, device)
    recorder.write("pair", shape=pair.request.shape_name)

    def measure() -> int:
        with on_disk(pair.target, options.scratch) as model:
            LoadingBenchmark(model, pair.shape.target.dtype, device, recorder).run()
        print(f"\n{summary(recorder.records)}{remarks(recorder.records)}", flush=True)
        return 0

    return run_refusable(recorder, measure)


if __name__ == "__main__":
    sys.exit(main())
