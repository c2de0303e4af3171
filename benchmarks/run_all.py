"""Every benchmark, one process after another, each within its time.

    python -m benchmarks.run_all --out DIR

Writes DIR/PART.jsonl as it goes, DIR/serve.png where matplotlib is installed, and last DIR/summary.txt, which it
prints.
A part that fails, refuses or runs out of time does not keep the others from running, but the exit status tells of it.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.child import run_child
from benchmarks.pair import default_directory
from benchmarks.records import EXIT_REFUSED, EXIT_VOID, of_kind, progress, read_records
from benchmarks.shapes import SHAPES
from benchmarks.summary import summarize

# What a part may take beyond the time after which it begins nothing new, seconds.
_GRACE_SECONDS = 25.0


@dataclass(frozen=True)
class Part:
    """One script, and how many seconds it gets before it begins nothing new."""

    name: str
    seconds: float
    needs_pair: bool = True
    has_device: bool = True


PARTS = (
    Part("pair", 100.0, needs_pair=False),
    Part("loading", 60.0),
    Part("steps", 80.0),
    Part("sampling", 40.0, needs_pair=False),
    Part("host", 15.0, needs_pair=False, has_device=False),
    Part("serve", 150.0),
    Part("cycle", 55.0),
    Part("arrivals", 120.0),
    # Half of it is vLLM's, and unused where it is not installed.
    Part("peers", 240.0),
)
BUDGET_SECONDS = 900.0
_SHORT = {"arrivals": ("--shares", "0.7", "--seconds", "12", "--closed-seconds", "8", "--drain-seconds", "10")}


def run_part(part: Part, command: Sequence[str], seconds: float) -> str:
    """Run a part in a process group of its own and wait; what became of it, in a word or two."""
    progress(f"---- {part.name}: {' '.join(command[3:])}")
    start = time.monotonic()
    status = run_child(command, seconds)
    if status is None:
        return f"stopped after {seconds:.0f} s"
    words = {0: "done", EXIT_REFUSED: "REFUSED", EXIT_VOID: "done, with VOID runs"}
    return f"{words.get(status, f'FAILED with exit status {status}')} in {time.monotonic() - start:.0f} s"


def missing_runs(path: Path) -> str:
    """What a part's file says was not measured, in a few words; nothing where all was."""
    records = read_records(path)
    counts = {"FAILED": len(of_kind(records, "failed")), "left out": len(of_kind(records, "left_out"))}
    return ", ".join(f"{count} {word}" for word, count in counts.items() if count)


def command_of(part: Part, options: argparse.Namespace, pair: Path, seconds: float) -> list[str]:
    """The command line of a part."""
    out: Path = options.out
    command = [sys.executable, "-m", f"benchmarks.{part.name}"]
    if options.tiny:
        command.append("--tiny")
    if options.device != "auto" and part.has_device:
        command += ["--device", options.device]
    if part.name == "pair":
        return [*command, "--out", str(pair), "--agreement", str(options.agreement), "--seed", str(options.seed)]
    command += ["--out", str(out / f"{part.name}.jsonl"), "--budget-seconds", f"{seconds:.0f}"]
    if part.needs_pair:
        command += ["--pair", str(pair)]
    if part.name in _SHORT and not options.tiny:
        command += _SHORT[part.name]
    if part.name == "serve":
        command += ["--plot", str(out / "serve.png")]
    return command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all; the exit status, 1 when a part did not end well."""
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory for the results")
    parser.add_argument("--pair", type=Path, help="directory for the pair (default: in memory, or on disk)")
    parser.add_argument("--agreement", type=float, default=0.8, help="of the pair (default 0.8)")
    parser.add_argument("--seed", type=int, default=0, help="of the pair (default 0)")
    parser.add_argument("--device", default="auto", help="auto: all GPUs; cuda:0: only this; cpu")
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="run only these parts")
    parser.add_argument(
        "--limit", action="append", default=[], metavar="PART=SECONDS", help="a part's time instead of its usual one"
    )
    parser.add_argument(
        "--budget-seconds", type=float, default=BUDGET_SECONDS, help="for everything (default %(default)s)"
    )
    parser.add_argument("--tiny", action="store_true", help="tiny models, for a CPU")
    options = parser.parse_args(arguments)
    limits = {name: float(seconds) for name, _, seconds in (limit.partition("=") for limit in options.limit)}
    options.out.mkdir(parents=True, exist_ok=True)
    pair: Path = options.pair or default_directory(SHAPES["tiny" if options.tiny else "8b"])
    deadline = time.monotonic() + options.budget_seconds
    outcomes: dict[str, str] = {}
    for part in PARTS:
        if part.name not in options.only:
            continue
        records = options.out / f"{part.name}.jsonl"
        # An earlier run's figures must not stand for what this one fails to measure.
        for earlier in (records, records.with_suffix(".png")):
            earlier.unlink(missing_ok=True)
        remaining = deadline - time.monotonic()
        seconds = min(limits.get(part.name, part.seconds), remaining - _GRACE_SECONDS)
        if seconds < 10:
            outcomes[part.name] = "left out, the time is up"
        elif part.needs_pair and not (pair / "pair.json").exists():
            outcomes[part.name] = "left out, there is no pair"
        else:
            # The pair's script has no time of its own to watch.
            outcome = run_part(part, command_of(part, options, pair, seconds), min(seconds + _GRACE_SECONDS, remaining))
            missing = missing_runs(records)
            outcomes[part.name] = f"{missing}; {outcome}" if missing else outcome
        progress(f"---- {part.name}: {outcomes[part.name]}")
        if (pair / "pair.json").exists():
            shutil.copy(pair / "pair.json", options.out / "pair.json")
    text = summarize(options.out)
    text += "\n\n== parts ==\n" + "\n".join(f"{name}: {outcome}" for name, outcome in outcomes.items())
    (options.out / "summary.txt").write_text(text + "\n")
    print(f"\n{text}", flush=True)
    return 0 if all(outcome.startswith("done in") for outcome in outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
