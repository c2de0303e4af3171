"""What a benchmark leaves behind: JSON lines written as it goes, tables for people, refusals."""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks.checkouts import ROOT, describe

EXIT_REFUSED = 3
EXIT_VOID = 4

_PACKAGES = ("torch", "triton", "transformers", "grpcio", "numpy")
_START = time.monotonic()

Record = dict[str, Any]


class RefusalError(Exception):
    """A correctness check failed: no speed may be reported. The message says what was wrong."""


class Recorder:
    """Appends records to a JSON-lines file, each on disk before the next measurement starts."""

    def __init__(self, path: Path, part: str, device: torch.device) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.records: list[Record] = []
        path.write_text("")
        self.write("environment", part=part, arguments=sys.argv[1:], **environment(device))

    def write(self, kind: str, **fields: Any) -> Record:
        """Append one record."""
        record = {"kind": kind, **fields}
        self.records.append(record)
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        return record


def run_refusable(recorder: Recorder, measure: Callable[[], int | None]) -> int:
    """Call `measure`; the exit status. A refusal is recorded and printed in the place of results."""
    try:
        return measure() or 0
    except RefusalError as error:
        recorder.write("refused", reason=str(error))
        print(f"\nREFUSED, no results: {error}", flush=True)
        return EXIT_REFUSED


def read_records(path: Path) -> list[Record]:
    """The records of a file, none where it is missing; a last line that was cut off is left out."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


def of_kind(records: Iterable[Record], kind: str) -> list[Record]:
    """The records of one kind."""
    return [record for record in records if record["kind"] == kind]


def has_goals(records: Iterable[Record]) -> bool:
    """Whether the records are of the shape and the kind of machine that the goals were set for."""
    records = list(records)
    is_full_size = any(record["shape"] == "8b" for record in of_kind(records, "pair"))
    return is_full_size and any("H200" in record["device"] for record in of_kind(records, "environment"))


def remarks(records: Iterable[Record]) -> str:
    """Lines to stand below a table: what failed, was left out, or could not be captured in a graph."""
    lines = []
    for record in records:
        if record["kind"] == "failed":
            lines.append(f"FAILED: {record['what']}: {record['reason']}")
        elif record["kind"] == "left_out":
            lines.append(f"left out, the time was up: {record['what']}")
        elif record["kind"] == "absent":
            lines.append(f"left out: {record['what']}: {record['reason']}")
        elif record.get("graph_error"):
            lines.append(f"no graph: {record['kind']}, batch {record['batch_size']}: {record['graph_error']}")
    return "".join(f"\n{line}" for line in lines)


def environment(device: torch.device) -> Record:
    """Versions, machine and time, for the head of every file of results."""
    is_cuda = device.type == "cuda"
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        **{name: version_of(name) for name in _PACKAGES},
        "cuda": torch.version.cuda if is_cuda else None,
        "device": torch.cuda.get_device_name(device) if is_cuda else platform.machine(),
        "cpu": _cpu(),
        "num_gpus": torch.cuda.device_count(),
        "revision": describe(ROOT),
    }


def progress(message: str) -> None:
    """Print one line with the time since the start, at once."""
    print(f"[{time.monotonic() - _START:6.1f} s] {message}", flush=True)


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A text table: the first column to the left, numbers to the right, None as a dash."""
    cells = [list(headers), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headers))]
    lines = []
    for row in cells:
        padded = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        padded[0] = row[0].ljust(widths[0])
        lines.append("  ".join(padded).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def optional_ms(value: float | None) -> str:
    """A duration, or that there is none."""
    return "-" if value is None else f"{value:.4f} ms"


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 0.1 else f"{value:.2f}"
    return str(value)


def _cpu() -> str | None:
    """The processor's name, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def version_of(package: str) -> str | None:
    """A package's version, None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
