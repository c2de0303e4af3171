"""Two revisions on one host, in turns: how much faster or slower one is, and how far single runs spread.

    python -m benchmarks.compare --base REV --rounds 3 --out DIR -- --device cuda:0 --batch-sizes 1 8
    python -m benchmarks.compare --base-dir CHECKOUT --module arrivals --out DIR -- --rates 10 20

Hosts of the same kind differ by more than most changes are worth, and so do starts of the same services: only runs of
both revisions on the same host, one after the other and more than once, say anything. `--base REV` takes the revision
from git; where there is no repository, `--base-dir` names a checkout that was made elsewhere, with
`git archive REV | tar -x -C DIR`. The other side, head, is the checkout that this program is part of. What stands
behind `--` goes to the benchmark of both sides, which run in different directories: paths in it must be absolute. Each
side runs its own benchmark as well, unless `--head-benchmarks` has both take head's, for a base without that benchmark.
A ratio is head over base of one round; of a run that failed, was refused or was void none is made.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.checkouts import ROOT, Checkout, CheckoutError, describe, ensure_stubs, export
from benchmarks.child import run_child
from benchmarks.records import EXIT_VOID, Record, Recorder, of_kind, progress, read_records, table

# What says which of a module's measurements a record is; a field that a record lacks is left out.
_KEYS = (
    *("batch_size", "num_positions", "temperature", "num_draft_tokens", "verification", "rule", "filters"),
    *("source", "what"),
    *("concurrency", "rate", "round", "traffic", "is_assisted", "engine", "tensor_parallel"),
)
_FIGURES = (
    *("tokens_per_second", "goodput_per_second", "acceptance_length", "cycle_ms", "inter_token_ms"),
    *("time_to_first_token_ms", "first_token_p50_ms", "first_token_p99_ms", "token_p50_ms", "token_p99_ms"),
    *("graph_ms", "eager_ms", "eager_wall_ms", "wall_ms", "device_ms", "total_ms", "seconds"),
)
_NOT_MEASURED = ("environment", "pair", "check", "placement", "bandwidth", "failed", "left_out", "refused", "capacity")

Figure = tuple[str, str]  # which measurement, and what of it


class Comparison:
    """Runs a benchmark module from two checkouts in turns."""

    def __init__(self, base: Checkout, head: Checkout, module: str, options: Sequence[str], recorder: Recorder) -> None:
        self._sides = (base, head)
        self._module = module
        self._options = options
        self._recorder = recorder

    def run(self, num_rounds: int, *, seconds_per_run: float, deadline: float) -> None:
        """All rounds; none is begun that would not be over by `deadline` (time.monotonic's clock) like the longest."""
        longest = 0.0
        for number in range(num_rounds):
            if time.monotonic() + longest > deadline:
                self._recorder.write("left_out", what=f"round {number + 1}")
                progress(f"left out, the time is up: round {number + 1}")
                continue
            start = time.monotonic()
            for side in self._sides:
                self._run_one(side, number, min(seconds_per_run, max(deadline - time.monotonic(), 1.0)))
            longest = max(longest, time.monotonic() - start)

    def _run_one(self, side: Checkout, number: int, seconds: float) -> None:
        out = self._recorder.path.with_name(f"{side.name}-{number + 1}.jsonl").resolve()
        log = out.with_suffix(".log")
        out.unlink(missing_ok=True)
        command = [sys.executable, "-m", f"benchmarks.{self._module}", "--out", str(out), *self._options]
        progress(f"round {number + 1}, {side.name}: {' '.join(command[1:])}")
        start = time.monotonic()
        with log.open("wb") as output:
            status = run_child(
                command, seconds, directory=side.directory, environment=side.environment(), output=output
            )
        failure = _failure(status, read_records(out), seconds)
        self._recorder.write(
            "run",
            round=number,
            side=side.name,
            status=status,
            seconds=round(time.monotonic() - start, 1),
            failure=failure,
            records=out.name,
        )
        if failure:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            progress(f"round {number + 1}, {side.name} FAILED: {failure}; its output ends:\n{tail}")


def _failure(status: int | None, records: Sequence[Record], seconds: float) -> str | None:
    """Why nothing of a run may be used; None where it may. A void measurement leaves the others of its run good."""
    if status is None:
        return f"stopped after {seconds:.0f} s"
    if refusals := of_kind(records, "refused"):
        return f"refused: {refusals[0]['reason']}"
    if status not in (0, EXIT_VOID):
        return f"exit status {status}"
    return None


def figures_of(records: Sequence[Record]) -> dict[Figure, float]:
    """All figures of one run that may be compared, those of void measurements left out."""
    found: dict[Figure, float] = {}
    for record in records:
        if record["kind"] in _NOT_MEASURED or record.get("void"):
            continue
        name = ", ".join(f"{key} {_short(record[key])}" for key in _KEYS if key in record)
        for figure in _FIGURES:
            value = record.get(figure)
            if isinstance(value, int | float) and value:
                found[f"{record['kind']}: {name}", figure] = float(value)
    return found


def ratios_of(directory: Path, records: Sequence[Record]) -> dict[Figure, list[tuple[float, float]]]:
    """(base, head) of each round in which both sides have the figure."""
    runs = {(run["round"], run["side"]): run for run in of_kind(records, "run")}
    pairs: dict[Figure, list[tuple[float, float]]] = {}
    for number in sorted({number for number, _ in runs}):
        sides = [runs.get((number, side)) for side in ("base", "head")]
        if any(run is None or run["failure"] for run in sides):
            continue
        base, head = (figures_of(read_records(directory / run["records"])) for run in sides if run is not None)
        for figure in base.keys() & head.keys():
            pairs.setdefault(figure, []).append((base[figure], head[figure]))
    return pairs


def summary(directory: Path, records: Sequence[Record]) -> str:
    """The table of ratios, and what there is none of."""
    runs = of_kind(records, "run")
    num_rounds = len({run["round"] for run in runs})
    pairs = ratios_of(directory, records)
    rows = []
    for (name, figure), values in sorted(pairs.items(), key=_order):
        ratios = [head / base for base, head in values]
        rows.append(
            (
                name,
                figure,
                statistics.median(base for base, _ in values),
                statistics.median(head for _, head in values),
                f"{statistics.median(ratios):.3f}",
                f"{min(ratios):.3f} to {max(ratios):.3f}",
                f"{len(values)} of {num_rounds}",
            )
        )
    lines = [table(("measurement", "figure", "base", "head", "head / base", "spread", "rounds"), rows)] if rows else []
    lines += [
        f"FAILED: round {run['round'] + 1}, {run['side']}: {run['failure']}: no ratio of this round"
        for run in runs
        if run["failure"]
    ]
    if not pairs:
        lines.append("no ratio: there is no round in which both sides measured the same thing")
    sides = {side["name"]: side for side in of_kind(records, "side")}
    lines += [f"{name}: {side['revision'] or 'revision unknown'} in {side['path']}" for name, side in sides.items()]
    return "\n".join(lines)


def _order(item: tuple[Figure, object]) -> tuple[list[object], int]:
    (name, figure), _ = item
    # Numbers within a name by their value: batch 8 before batch 32.
    words = [(0, float(word), "") if word.replace(".", "", 1).isdigit() else (1, 0.0, word) for word in name.split()]
    return [*words], _FIGURES.index(figure)


def _short(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _sides(options: argparse.Namespace, scratch: Path, recorder: Recorder) -> tuple[Checkout, Checkout]:
    """Both checkouts, ready to run, each recorded with the modules that it was seen to run."""
    if options.base_dir is not None:
        directory = options.base_dir.resolve()
        revision = options.base or describe(directory)
    else:
        directory, revision = scratch, export(options.base, scratch)
    programs = None
    if options.head_benchmarks:
        programs = scratch / ".programs"
        shutil.copytree(ROOT / "benchmarks", programs / "benchmarks", ignore=shutil.ignore_patterns("__pycache__"))
    sides = (Checkout("base", directory, programs), Checkout("head", ROOT))
    for side, name in zip(sides, (revision, describe(ROOT)), strict=True):
        stubs = ensure_stubs(side.path)
        recorder.write("side", name=side.name, revision=name, path=str(side.path), stubs=stubs, modules=side.modules())
        progress(f"{side.name}: {name or 'revision unknown'} in {side.path}, stubs {stubs}")
    return sides


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; the exit status, 1 where anything failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", help="revision to compare with; with --base-dir only its name in the record")
    parser.add_argument("--base-dir", type=Path, help="checkout of the base, where git cannot give it")
    parser.add_argument("--module", default="serve", help="of benchmarks (default %(default)s)")
    parser.add_argument("--head-benchmarks", action="store_true", help="measure the base with head's benchmarks")
    parser.add_argument("--rounds", type=int, default=2, help="each runs both sides (default %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("compare"), help="directory (default %(default)s)")
    parser.add_argument("--run-seconds", type=float, default=600.0, help="most for one run (default %(default)s)")
    parser.add_argument("--budget-seconds", type=float, default=3600.0, help="for everything (default %(default)s)")
    parser.add_argument("options", nargs="*", help="behind --: for the benchmark of both sides")
    options = parser.parse_args(arguments)
    if options.base is None and options.base_dir is None:
        parser.error("one of --base and --base-dir is needed")
    deadline = time.monotonic() + options.budget_seconds
    recorder = Recorder(options.out / "compare.jsonl", "compare", torch.device("cpu"))
    with tempfile.TemporaryDirectory(prefix="outrider-base-") as scratch:
        try:
            base, head = _sides(options, Path(scratch), recorder)
        except CheckoutError as error:
            recorder.write("failed", what="the checkouts", reason=str(error))
            print(f"FAILED: {error}", flush=True)
            return 1
        Comparison(base, head, options.module, options.options, recorder).run(
            options.rounds, seconds_per_run=options.run_seconds, deadline=deadline
        )
    print(f"\n{summary(options.out, recorder.records)}", flush=True)
    is_complete = ratios_of(options.out, recorder.records) and not of_kind(recorder.records, "left_out")
    return 0 if is_complete and not any(run["failure"] for run in of_kind(recorder.records, "run")) else 1


if __name__ == "__main__":
    sys.exit(main())
