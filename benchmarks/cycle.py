"""Where the time of a speculative cycle goes: draft, transport, forward and sampling, host.

    python -m benchmarks.cycle --pair DIR --out FILE

Runs the services with tracing on and reads their spans. A cycle lasts from the start of one verify step of a sequence
to the start of its next. Of it, `verify` is the step itself (forward pass, sampling and the copy of the results),
`draft` the drafter's own step, `transport` the rest of the wait for the proposal (two hops, and host work and queueing
at both ends), and `host` what is left: the verifier's work between steps. Tracing costs host time on every service,
more with larger batches: compare the cycle with that of `benchmarks.serve`, which is not traced.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cluster import Placement, make_cluster, print_logs, wait_for_drafter
from benchmarks.load import Workload, random_prompts, run_wave
from benchmarks.pair import PairDirectory, add_pair_arguments, pair_of
from benchmarks.records import EXIT_VOID, Record, Recorder, of_kind, progress, remarks, run_refusable, table
from benchmarks.timing import resolve_device
from benchmarks.trace_collector import Span, TraceCollector
from outrider.client import AsyncClient, ClientError
from outrider.local import StartError

_REQUEST_SECONDS = 60.0
_EXPORT_SECONDS = 15.0


@dataclass(frozen=True)
class Cycle:
    """One sequence's way from a verify step to the next, seconds."""

    total: float
    verify: float
    draft: float
    transport: float
    host: float


def cycles_of(spans: Iterable[Span]) -> Iterator[Cycle]:
    """The cycles of one request whose proposal the drafter reported on."""
    spans = list(spans)
    steps = sorted((span for span in spans if span.name == "verify_step"), key=lambda span: span.start)
    drafts = {
        span.attributes.get("outrider.position"): span.seconds for span in spans if span.name.startswith("draft ")
    }
    for step, following in itertools.pairwise(steps):
        wait = following.attributes.get("outrider.draft_wait_seconds")
        draft = drafts.get(following.attributes.get("outrider.position"))
        if wait is None or draft is None:
            continue
        total = following.start - step.start
        # A drafter that began before the verdict was out has nothing of its work in the wait.
        draft = min(draft, wait)
        yield Cycle(total, step.seconds, draft, wait - draft, max(total - step.seconds - wait, 0.0))


def split_of(traces: Iterable[Iterable[Span]]) -> dict[str, float] | None:
    """Medians over all cycles, milliseconds; None where there was not one."""
    cycles = [cycle for spans in traces for cycle in cycles_of(spans)]
    if not cycles:
        return None
    names = ("total", "verify", "draft", "transport", "host")
    medians = {f"{name}_ms": 1e3 * statistics.median(getattr(cycle, name) for cycle in cycles) for name in names}
    return {**medians, "num_cycles": len(cycles)}


@contextmanager
def environment_of(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables, which the services inherit, for as long as entered."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


async def _measure(options: argparse.Namespace, pair: PairDirectory, recorder: Recorder, deadline: float) -> int:
    placement = Placement(
        options.device,
        max(options.batch_sizes),
        128 + options.output_tokens + options.num_draft_tokens,
        options.num_draft_tokens,
        max(deadline - time.monotonic(), 10.0),
    )
    with TraceCollector() as collector, environment_of(collector.environment):
        progress("starting the services, tracing on")
        async with (
            make_cluster(pair, placement, log_directory=options.logs) as cluster,
            AsyncClient(cluster.address) as client,
        ):
            for batch_size in options.batch_sizes:
                workload = Workload(batch_size, 1.0, options.num_draft_tokens, num_output_tokens=options.output_tokens)
                if time.monotonic() > deadline:
                    recorder.write("left_out", what=workload.name)
                    continue
                try:
                    split = await _trace(client, collector, workload, pair.shape.target.vocab_size)
                except ClientError as error:
                    recorder.write("failed", what=workload.name, reason=str(error))
                    progress(f"FAILED: {workload.name}: {error}")
                    print_logs(cluster)
                    continue
                void = None if split else "no cycle with a proposal was traced"
                recorder.write("cycle", batch_size=batch_size, void=void, **(split or {}))
                progress(f"{workload.name}: {split or 'VOID: ' + str(void)}")
    records = of_kind(recorder.records, "cycle")
    return 0 if records and not any(record["void"] for record in records) else EXIT_VOID


async def _trace(
    client: AsyncClient, collector: TraceCollector, workload: Workload, vocab_size: int
) -> dict[str, float] | None:
    for seed in (7, 8):
        # Of the first wave nothing is kept: it warms up.
        collector.clear()
        prompts = random_prompts(workload, vocab_size, seed=seed)
        await run_wave(client, workload, prompts, seed=seed, timeout_seconds=_REQUEST_SECONDS)
        await wait_for_drafter(client)
        traces = await _all_traces(collector, workload.batch_size)
    return split_of(traces)


async def _all_traces(collector: TraceCollector, num_requests: int) -> list[list[Span]]:
    """Wait until every request's own span has come, which ends last, and the rest has had time to."""
    deadline = time.monotonic() + _EXPORT_SECONDS
    num_spans = -1
    while time.monotonic() < deadline:
        await asyncio.sleep(0.5)
        spans = [span for trace in collector.traces() for span in trace]
        num_ended = sum(span.name.startswith("text_completion") for span in spans)
        if num_ended >= num_requests and len(spans) == num_spans:
            break
        num_spans = len(spans)
    return collector.traces()


def summary(records: Sequence[Record]) -> str:
    """The table of what was recorded."""
    names = ("total_ms", "draft_ms", "transport_ms", "verify_ms", "host_ms")
    rows = [
        (str(record["batch_size"]), *(record.get(name) for name in names), record.get("num_cycles"))
        for record in of_kind(records, "cycle")
    ]
    headers = ("batch", "cycle", "draft", "transport", "forward + sampling", "host", "cycles")
    return "\n".join(["a speculative cycle, traced, medians in ms", table(headers, rows)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_pair_arguments(parser)
    parser.add_argument("--out", type=Path, default=Path("cycle.jsonl"), help="JSON lines (default %(default)s)")
    parser.add_argument("--logs", type=Path, help="directory for the services' logs (default: a temporary one)")
    parser.add_argument("--device", default="auto", help="auto: a GPU a service if there are two; cuda:0: share it")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--num-draft-tokens", type=int, default=4, help="K (default %(default)s)")
    parser.add_argument("--output-tokens", type=int, default=64, help="a request (default %(default)s)")
    parser.add_argument("--budget-seconds", type=float, default=80.0, help="begin no new workload after this")
    parser.add_argument("--tiny", action="store_true", help="a tiny pair and small waves, for a CPU")
    if parser.parse_args(arguments).tiny:
        parser.set_defaults(shape="tiny", batch_sizes=[1, 2], output_tokens=24)
    options = parser.parse_args(arguments)
    deadline = time.monotonic() + options.budget_seconds
    device = resolve_device(options.device)
    recorder = Recorder(options.out, "cycle", device)

    def measure() -> int:
        pair = pair_of(options, device)
        recorder.write("pair", shape=pair.request.shape_name, agreement=pair.measured.agreement)
        try:
            status = asyncio.run(_measure(options, pair, recorder, deadline))
        except StartError as error:
            recorder.write("failed", what="starting the services", reason=str(error))
            progress(f"FAILED: the services did not start: {error}")
            return 1
        print(f"\n{summary(recorder.records)}{remarks(recorder.records)}", flush=True)
        return status

    return run_refusable(recorder, measure)


if __name__ == "__main__":
    sys.exit(main())
