"""Time of the drafter's replays when it runs ahead, by sequences and expansions of each in a pass, host included.

    python -m benchmarks.tree_rounds --pair DIR --out FILE

`wall` is what one replay adds to several behind each other, as the service makes them: plan, launch, and the last one's
arrays on the host while the next one runs. `device` is the graph alone. `expansions` are those that verifiers are told
of in a replay.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.drafter_loop import DrafterLoop
from benchmarks.pair import PairDirectory, add_pair_arguments, pair_of
from benchmarks.records import Record, Recorder, of_kind, optional_ms, progress, remarks, run_refusable, table
from benchmarks.timing import resolve_device

_BLOCK_SIZE = 16


def _measure(options: argparse.Namespace, pair: PairDirectory, device: torch.device, recorder: Recorder) -> None:
    deadline = time.monotonic() + options.budget_seconds
    most = max(options.batch_sizes)
    progress("loading the drafter")
    loop = DrafterLoop(
        pair.drafter,
        device,
        num_draft_tokens=options.num_draft_tokens,
        num_blocks=most * -(-(options.context + 128) // _BLOCK_SIZE) + 128,
        max_batch_size=most,
        takes_turns=False,
    )
    for batch_size in options.batch_sizes:
        if time.monotonic() > deadline:
            recorder.write("left_out", what=f"batch {batch_size}")
            continue
        found = loop.replay(batch_size, options.context)
        record = recorder.write(
            "tree_replay",
            batch_size=batch_size,
            wall_ms=found.milliseconds,
            device_ms=loop.device_milliseconds(batch_size),
            num_expansions=found.num_expansions,
            expansions_per_second=1e3 * found.num_expansions / found.milliseconds,
        )
        progress(
            f"{batch_size}: {record['wall_ms']:.3f} ms a replay of {found.num_expansions:.0f} expansions, "
            f"{optional_ms(record['device_ms'])} on the device"
        )


def summary(records: Sequence[Record]) -> str:
    """The table of what was recorded."""
    names = ("batch_size", "wall_ms", "device_ms", "num_expansions", "expansions_per_second")
    rows = [[record[name] for name in names] for record in of_kind(records, "tree_replay")]
    headers = ("batch", "wall, ms", "device, ms", "expansions", "expansions/s")
    return "\n".join(["replays of the drafter that runs ahead", table(headers, rows)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_pair_arguments(parser)
    parser.add_argument("--out", type=Path, default=Path("tree_rounds.jsonl"), help="JSON lines (default %(default)s)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 4, 8, 16, 32, 64])
    parser.add_argument("--context", type=int, default=256, help="tokens in the cache (default %(default)s)")
    parser.add_argument("--num-draft-tokens", type=int, default=4, help="K (default %(default)s)")
    parser.add_argument("--budget-seconds", type=float, default=100.0, help="begin nothing new after this")
    parser.add_argument("--tiny", action="store_true", help="a tiny pair, for a CPU")
    if parser.parse_args(arguments).tiny:
        parser.set_defaults(shape="tiny", batch_sizes=[1, 2], context=64)
    options = parser.parse_args(arguments)
    device = resolve_device(options.device)
    recorder = Recorder(options.out, "tree_rounds", device)

    def measure() -> int:
        pair = pair_of(options, device)
        recorder.write("pair", shape=pair.request.shape_name, agreement=pair.measured.agreement)
        _measure(options, pair, device, recorder)
        print(f"\n{summary(recorder.records)}{remarks(recorder.records)}", flush=True)
        return 0

    return run_refusable(recorder, measure)


if __name__ == "__main__":
    sys.exit(main())
