"""loading.py tells the disk from memory, and reports nothing of weights that are not those in the files."""

from __future__ import annotations

import itertools
import mmap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import loading
from benchmarks.loading import main, on_disk, peak_memory
from benchmarks.pair import PairDirectory
from benchmarks.records import EXIT_REFUSED, RefusalError, of_kind, read_records
from engine.model_loader import LoadedModel, load_model


@pytest.fixture(autouse=True)
def disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk, whatever this machine keeps its temporary files on: asked again, it has always fetched another GB."""
    fetched = itertools.count(0, 1_000_000_000)
    monkeypatch.setattr(loading, "bytes_from_disk", lambda: next(fetched))
    monkeypatch.setattr(loading, "_file_system", lambda path: "ext4")


def _run(pair: PairDirectory, out: Path) -> int:
    return main(["--tiny", "--device", "cpu", "--pair", str(pair.path), "--out", str(out)])


def test_tiny_run(pair: PairDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "loading.jsonl"
    assert _run(pair, out) == 0
    found = of_kind(read_records(out), "loading")
    assert [(r["source"], r["what"]) for r in found] == [
        ("disk", "read"), ("disk", "load"), ("memory", "read"), ("memory", "load")
    ]  # fmt: skip
    assert all(r["seconds"] > 0 for r in found)
    assert "load from disk" in capsys.readouterr().out


def test_files_that_stayed_in_memory_are_no_measurement_of_the_disk(
    pair: PairDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loading, "bytes_from_disk", lambda: 0)
    out = tmp_path / "loading.jsonl"
    assert _run(pair, out) == 0
    assert {r["source"] for r in of_kind(read_records(out), "loading")} == {"memory"}
    assert "FAILED: load from disk: only 0.00 of" in capsys.readouterr().out


def test_refuses_weights_that_are_not_those_in_the_files(
    pair: PairDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: a loader that gets the weights wrong."""

    def wrong(*arguments: Any, **options: Any) -> LoadedModel:
        loaded = load_model(*arguments, **options)
        parameter: Any
        for parameter in loaded.model.parameters():
            # Not in place: on a CPU a parameter may be the mapped file itself.
            parameter.data = parameter.data * 1.5
        return loaded

    monkeypatch.setattr(loading, "load_model", wrong)
    out = tmp_path / "loading.jsonl"
    assert _run(pair, out) == EXIT_REFUSED
    assert not of_kind(read_records(out), "loading")


def test_a_copy_in_the_hosts_memory_shows() -> None:
    # Straight from the system: an allocator may have as much left over from what others have freed.
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    with peak_memory() as peak, mmap.mmap(-1, 64 << 20, flags=private) as block:
        block.write(bytes(64 << 20))
        _wait_for(lambda: peak[0] >= 60 << 20)
    assert peak[0] < 256 << 20


def test_a_model_in_memory_is_copied_to_a_disk(
    pair: PairDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "_file_system", lambda path: "tmpfs" if path.is_relative_to(pair.target) else "ext4")
    with on_disk(pair.target, tmp_path) as model:
        assert model.is_relative_to(tmp_path)
        assert {path.name for path in model.iterdir()} == {path.name for path in pair.target.iterdir()}
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(loading, "_file_system", lambda path: "tmpfs")
    with pytest.raises(RefusalError, match="--scratch"), on_disk(pair.target, tmp_path):
        pass


def test_file_systems_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert loading._file_system(Path("/proc/self")) == "proc"


def _wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)
