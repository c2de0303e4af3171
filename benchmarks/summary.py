"""All tables of a directory of results, as text.

python -m benchmarks.summary DIR
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import arrivals_tables, cycle, host, loading, peers, sampling, serve, steps
from benchmarks.records import Record, of_kind, read_records, remarks

SUMMARIES: dict[str, Callable[[Sequence[Record]], str]] = {
    "loading": loading.summary,
    "steps": steps.summary,
    "sampling": sampling.summary,
    "host": host.summary,
    "serve": serve.summary,
    "cycle": cycle.summary,
    "arrivals": arrivals_tables.summary,
    "peers": peers.summary,
}


def summarize(directory: Path) -> str:
    """Every part's table, or why it has none."""
    sections = [_pair(directory / "pair.json")]
    for part, summary in SUMMARIES.items():
        records = read_records(directory / f"{part}.jsonl")
        refusals = of_kind(records, "refused")
        if not records:
            body = "was not run"
        elif refusals:
            body = f"REFUSED: {refusals[0]['reason']}"
        else:
            body = f"{_environment(records)}\n{summary(records)}{remarks(records)}"
        sections.append(f"== {part} ==\n{body}")
    return "\n\n".join(sections)


def _environment(records: Sequence[Record]) -> str:
    found = of_kind(records, "environment")[0]
    placement = "".join(
        f", verifier {record['verifier']}, drafter {record['drafter']}" for record in of_kind(records, "placement")
    )
    return (
        f"{found['date']}, {found['device']} x {found['num_gpus']}{placement}, torch {found['torch']}, triton "
        f"{found['triton']}, transformers {found['transformers']}, grpcio {found['grpcio']}"
    )


def _pair(path: Path) -> str:
    try:
        manifest = json.loads(path.read_text())
        measured, request = manifest["measured"], manifest["request"]
    except (OSError, ValueError, KeyError):
        return "== pair ==\nwas not made"
    candidates = ", ".join(f"{value:.3f} with {m}" for m, value in measured["candidate_agreement"].items())
    return (
        f"== pair ==\nshape {request['shape_name']}, seed {request['seed']}, damping {manifest['damping']:.5f}, "
        f"norm scale {manifest['norm_scale']:.4f}, made in {manifest.get('seconds', 0):.0f} s\n"
        f"agreement {measured['agreement']:.3f} ({candidates} candidates), greedy {measured['greedy_agreement']:.3f}, "
        f"entropy {measured['target_entropy']:.2f} nats, over {measured['num_positions']} positions"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description="All tables of a directory of results.")
    parser.add_argument("directory", type=Path)
    print(summarize(parser.parse_args(arguments).directory))
    return 0


if __name__ == "__main__":
    sys.exit(main())
