"""What tracing costs real services: output tokens/s with tracing off, at a ratio of 1%, and of every request.

    python -m benchmarks.tracing --pair DIR --out FILE

Services that do not trace and services that do run one after the other, several times in turns, as no two starts are
alike; within the latter, waves in which one request in a hundred is sampled alternate with waves in which all are. The
spans go over OTLP to a receiver in this process, which on a small machine takes CPU time from the services as well: the
figure for 100% is an upper bound. `benchmarks.tracing_host` measures the host alone, more finely than tokens/s can.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from opentelemetry import context, trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from benchmarks.cluster import Placement, make_cluster, wait_for_drafter
from benchmarks.cycle import environment_of
from benchmarks.load import Workload, random_prompts, run_request
from benchmarks.pair import PairDirectory, add_pair_arguments, pair_of
from benchmarks.records import EXIT_VOID, Record, Recorder, of_kind, progress, remarks, run_refusable, table
from benchmarks.timing import resolve_device
from benchmarks.trace_collector import TraceCollector
from outrider.client import AsyncClient
from outrider.local import StartError

_REQUEST_SECONDS = 120.0
# As an operator has them: steps are folded here, and batches have their usual size.
_PLAIN = ("OUTRIDER_VERIFIER_STEP_SPANS", "OUTRIDER_DRAFTER_STEP_SPANS")


async def _wave(client: AsyncClient, workload: Workload, vocab_size: int, seed: int, sampled: set[int]) -> float:
    """Output tokens/s of a wave in which the requests of these numbers are sampled."""
    prompts = random_prompts(workload, vocab_size, seed=seed)
    start = time.perf_counter()

    async def send(index: int) -> int:
        ids = random.Random(seed * 1000 + index)
        flags = TraceFlags(TraceFlags.SAMPLED if index in sampled else TraceFlags.DEFAULT)
        parent = SpanContext(ids.getrandbits(128), ids.getrandbits(64), is_remote=False, trace_flags=flags)
        # In this task alone: the client sends what stands in the context.
        context.attach(trace.set_span_in_context(NonRecordingSpan(parent)))
        request = await run_request(client, workload, prompts[index], seed + index, _REQUEST_SECONDS)
        return len(request.token_ids)

    counts = await asyncio.gather(*(asyncio.create_task(send(index)) for index in range(workload.batch_size)))
    return sum(counts) / (time.perf_counter() - start)


async def _measure(options: argparse.Namespace, pair: PairDirectory, recorder: Recorder) -> int:
    size = options.batch_size
    workload = Workload(size, 1.0, options.num_draft_tokens, num_output_tokens=options.output_tokens)
    tokens = workload.num_prompt_tokens + options.output_tokens + options.num_draft_tokens
    placement = Placement(options.device, size, tokens, options.num_draft_tokens, options.start_seconds)
    seeds = itertools.count(1)
    # One in a hundred, evenly: of wave after wave, the request that makes the hundred full.
    numbers = itertools.count(1)
    with TraceCollector() as collector:
        variables = {name: value for name, value in collector.environment.items() if name not in _PLAIN}
        for round_number in range(options.rounds):
            for is_tracing in (False, True):
                progress(f"round {round_number + 1}: starting the services, tracing {'on' if is_tracing else 'off'}")
                with environment_of(variables if is_tracing else {}):
                    cluster = make_cluster(pair, placement, log_directory=options.logs)
                    async with cluster, AsyncClient(cluster.address) as client:
                        await wait_for_drafter(client)
                        vocab_size = pair.shape.target.vocab_size
                        await _wave(client, workload, vocab_size, next(seeds), set())
                        for wave in range(options.waves * (2 if is_tracing else 1)):
                            one_percent = {index for index in range(size) if next(numbers) % 100 == 0}
                            is_all = is_tracing and wave % 2 == 1
                            sampled = set(range(size)) if is_all else one_percent
                            speed = await _wave(client, workload, vocab_size, next(seeds), sampled)
                            mode = "off" if not is_tracing else "100%" if is_all else "1%"
                            recorder.write("wave", mode=mode, round=round_number, tokens_per_second=speed)
        recorder.write("spans", num_traces=len(collector.traces()))
    if not collector.traces():
        recorder.write("failed", what="tracing", reason="no span arrived")
        return EXIT_VOID
    return 0


def summary(records: Sequence[Record]) -> str:
    """Medians over all waves, and what tracing costs of them."""
    speeds: dict[str, list[float]] = {}
    for record in of_kind(records, "wave"):
        speeds.setdefault(record["mode"], []).append(record["tokens_per_second"])
    off = statistics.median(speeds["off"])
    rows = [
        (
            mode,
            statistics.median(found),
            f"{1 - statistics.median(found) / off:+.2%}",
            min(found),
            max(found),
            len(found),
        )
        for mode, found in speeds.items()
    ]
    return table(("tracing", "tokens/s", "cost", "least", "most", "waves"), rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_pair_arguments(parser)
    parser.add_argument("--out", type=Path, default=Path("tracing.jsonl"), help="JSON lines (default %(default)s)")
    parser.add_argument("--logs", type=Path, help="directory for the services' logs (default: a temporary one)")
    parser.add_argument("--device", default="auto", help="auto: a GPU a service if there are two; cuda:0: share it")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--num-draft-tokens", type=int, default=4, help="K (default %(default)s)")
    parser.add_argument("--output-tokens", type=int, default=256, help="a request (default %(default)s)")
    parser.add_argument("--waves", type=int, default=5, help="of each mode after each start (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="starts of each kind (default %(default)s)")
    parser.add_argument("--start-seconds", type=float, default=180.0, help="most that a start may take")
    parser.add_argument("--tiny", action="store_true", help="a tiny pair and small waves, for a CPU")
    if parser.parse_args(arguments).tiny:
        parser.set_defaults(shape="tiny", batch_size=4, output_tokens=24, waves=2, rounds=1)
    options = parser.parse_args(arguments)
    device = resolve_device(options.device)
    recorder = Recorder(options.out, "tracing", device)
    for name in list(os.environ):
        if name.startswith("OTEL_"):
            del os.environ[name]

    def measure() -> int:
        pair = pair_of(options, device)
        recorder.write("pair", shape=pair.request.shape_name, agreement=pair.measured.agreement)
        try:
            status = asyncio.run(_measure(options, pair, recorder))
        except StartError as error:
            recorder.write("failed", what="starting the services", reason=str(error))
            return 1
        print(f"\n{summary(recorder.records)}{remarks(recorder.records)}", flush=True)
        return status

    return run_refusable(recorder, measure)


if __name__ == "__main__":
    sys.exit(main())
