"""The real services under traffic: requests of mixed lengths and sampling that arrive at random moments.

    python -m benchmarks.arrivals --pair DIR --out FILE [--rates 10 20 | --shares 0.5 0.8] [--uniform]

First closed loops, in which so many requests are always open, say what the services can bear; then open loops, in which
requests arrive by a Poisson process, say what users see of it: at given rates, or at shares of the requests a second
that the target alone served in its largest closed loop. Plain and speculative get the same requests at the same
moments. Prompts of 32 to 2,048 tokens, outputs of 16 to 512, both log-uniform; temperatures 0, 0.7 and 1 equally often;
a tenth of the requests with penalties or log-probabilities. `--uniform` runs everything a second time without these,
and prints how much slower the mixed traffic is. A request is good when its first token came within 1 s and each further
one took 25 ms or less. A run whose generator was late is void.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import grpc

from benchmarks.arrivals_tables import mode_name, summary
from benchmarks.cluster import CpuClock, Placement, make_cluster, print_logs, wait_for_drafter
from benchmarks.pair import PairDirectory, add_pair_arguments, pair_of
from benchmarks.records import EXIT_VOID, Record, Recorder, of_kind, progress, remarks, run_refusable
from benchmarks.serve import ServeBenchmark
from benchmarks.timing import resolve_device
from benchmarks.traffic import Traffic
from benchmarks.traffic_figures import Limits, figures_of
from benchmarks.traffic_sender import Sender
from kernels.limits import NUM_CANDIDATES
from outrider.client import AsyncClient, ClientError
from outrider.local import LocalCluster, StartError

_REQUEST_SECONDS = 120.0
_IDLE_SECONDS = 10.0
_WARM_UP_SECONDS = 4.0


class ArrivalsBenchmark:
    """Runs loops against services that serve."""

    def __init__(
        self,
        cluster: LocalCluster,
        client: AsyncClient,
        sender: Sender,
        recorder: Recorder,
        options: argparse.Namespace,
        deadline: float,  # on time.monotonic's clock: nothing is begun that would not be over by then
    ) -> None:
        self._cluster = cluster
        self._client = client
        self._sender = sender
        self._recorder = recorder
        self._options = options
        self._deadline = deadline
        self._limits = Limits(options.first_token_limit_ms, options.token_limit_ms, options.max_lag_ms)
        mixed = traffic_of(options)
        self._traffic = [mixed, mixed.uniform()] if options.uniform else [mixed]
        self._modes = [None, options.num_draft_tokens]

    async def run(self) -> None:
        """Everything, what matters most first."""
        options = self._options
        # The largest first: what the services have not compiled yet they compile here.
        for num_draft_tokens in self._modes:
            await self._sender.closed_loop(
                self._traffic[0].requests(),
                num_draft_tokens,
                concurrency=max(options.concurrency),
                seconds=min(_WARM_UP_SECONDS, options.closed_seconds),
            )
            await self._wait_until_idle()
        for number in range(options.rounds):
            for concurrency in sorted(options.concurrency, reverse=True):
                for num_draft_tokens in self._modes:
                    for traffic in self._traffic:
                        await self._closed(traffic, num_draft_tokens, concurrency, number)
        for rate, share in self._rates():
            for num_draft_tokens in self._modes:
                for traffic in self._traffic:
                    await self._open(traffic, num_draft_tokens, rate, share)

    def _rates(self) -> list[tuple[float, float | None]]:
        """Rates in requests a second, each with the share of the capacity that it was made from."""
        options = self._options
        if options.rates:
            return [(rate, None) for rate in options.rates]
        capacity = capacity_of(self._recorder.records, self._traffic[0])
        if capacity is None:
            self._recorder.write("failed", what="the open loops", reason="the capacity was not measured")
            progress("FAILED: the open loops: the capacity was not measured")
            return []
        self._recorder.write("capacity", requests_per_second=capacity)
        progress(f"the target alone serves {capacity:.2f} requests/s of this traffic")
        return [(share * capacity, share) for share in options.shares]

    async def _closed(self, traffic: Traffic, num_draft_tokens: int | None, concurrency: int, number: int) -> None:
        options = self._options
        what = f"closed loop, {concurrency} open, {mode_name(num_draft_tokens)}, {traffic.name}"
        seconds = options.skip_seconds + options.closed_seconds
        if self._is_late(what, seconds):
            return
        clock, start = CpuClock(self._cluster), time.perf_counter()
        run = await self._sender.closed_loop(
            traffic.requests(), num_draft_tokens, concurrency=concurrency, seconds=seconds
        )
        cores = clock.cores(time.perf_counter() - start)
        found = figures_of(
            run,
            start=options.skip_seconds,
            end=seconds,
            num_draft_tokens=num_draft_tokens,
            limits=self._limits,
        )
        record = self._recorder.write(
            "closed_loop",
            concurrency=concurrency,
            round=number,
            num_draft_tokens=num_draft_tokens,
            traffic=traffic.name,
            **found,
            cores=cores,
        )
        self._tell(what, record)
        await self._wait_until_idle()

    async def _open(self, traffic: Traffic, num_draft_tokens: int | None, rate: float, share: float | None) -> None:
        options = self._options
        what = f"open loop, {rate:.2f} requests/s, {mode_name(num_draft_tokens)}, {traffic.name}"
        seconds = options.skip_seconds + options.seconds
        if self._is_late(what, seconds + options.drain_seconds):
            return
        requests = list(zip(traffic.arrival_times(rate, seconds), traffic.requests(), strict=False))
        clock, start = CpuClock(self._cluster), time.perf_counter()
        run = await self._sender.open_loop(requests, num_draft_tokens, drain_seconds=options.drain_seconds)
        cores = clock.cores(time.perf_counter() - start)
        found = figures_of(
            run, start=options.skip_seconds, end=seconds, num_draft_tokens=num_draft_tokens, limits=self._limits
        )
        record = self._recorder.write(
            "open_loop",
            rate=rate,
            share=share,
            num_draft_tokens=num_draft_tokens,
            traffic=traffic.name,
            **found,
            cores=cores,
        )
        self._tell(what, record)
        await self._wait_until_idle()

    def _tell(self, what: str, record: Record) -> None:
        if record["void"]:
            progress(f"VOID: {what}: {record['void']}")
            return
        progress(
            f"{what}: {record['tokens_per_second']:,.1f} tokens/s, {record['goodput_per_second']:.2f} good requests/s, "
            f"{record['num_finished']} of {record['num_offered']} finished"
        )

    def _is_late(self, what: str, seconds: float) -> bool:
        """Whether a run of so many seconds would not be over in time; recorded if so."""
        is_late = time.monotonic() + seconds > self._deadline
        if is_late:
            self._recorder.write("left_out", what=what)
            progress(f"left out, the time is up: {what}")
        return is_late

    async def _wait_until_idle(self) -> None:
        """Until the services have forgotten what was cut off, and the drafter is there for the next run."""
        end = time.monotonic() + _IDLE_SECONDS
        while time.monotonic() < end:
            model = await self._client.model(timeout=5.0)
            if not any(member.num_sequences for member in (*model.verifiers, *model.drafters)):
                break
            await asyncio.sleep(0.05)
        await wait_for_drafter(self._client)


def traffic_of(options: argparse.Namespace) -> Traffic:
    """The traffic that the command line describes."""
    return Traffic(
        tuple(options.prompt_tokens),
        tuple(options.output_tokens),
        tuple(options.temperatures),
        options.special_share,
        options.traffic_seed,
    )


def capacity_of(records: Sequence[Record], traffic: Traffic) -> float | None:
    """Requests a second that the target alone bears: its tokens/s in the largest closed loop, over tokens a request."""
    runs = [
        run
        for run in of_kind(records, "closed_loop")
        if run["num_draft_tokens"] is None and run["traffic"] == traffic.name and not run["void"]
    ]
    if not runs:
        return None
    largest = max(runs, key=lambda run: run["concurrency"])
    return float(largest["tokens_per_second"] / traffic.mean_output_tokens())


async def _measure(options: argparse.Namespace, pair: PairDirectory, recorder: Recorder, deadline: float) -> int:
    placement = Placement(
        options.device,
        max(options.concurrency),
        options.prompt_tokens[1] + options.output_tokens[1] + options.num_draft_tokens,
        options.num_draft_tokens,
        max(deadline - time.monotonic(), 10.0),
        options.candidates,
        tuple(options.verifier_flag),
        tuple(options.drafter_flag),
    )
    progress("starting the services")
    # A connection of its own, that no other client of this process shares.
    channel_options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
    async with (
        make_cluster(pair, placement, log_directory=options.logs) as cluster,
        AsyncClient(cluster.address) as client,
        grpc.aio.insecure_channel(cluster.address, options=channel_options) as channel,
    ):
        recorder.write(
            "placement",
            verifier=cluster.devices.verifier,
            drafter=cluster.devices.drafters[0],
            num_candidates=options.candidates,
        )
        vocab_size = pair.shape.target.vocab_size
        sender = Sender(channel, vocab_size, timeout_seconds=_REQUEST_SECONDS)
        checks = ServeBenchmark(
            cluster, client, pair, recorder, device_type=placement.device_type, num_waves=1, deadline=deadline
        )
        try:
            await checks.check(options.num_draft_tokens)
            await ArrivalsBenchmark(cluster, client, sender, recorder, options, deadline).run()
        except (ClientError, grpc.aio.AioRpcError) as error:
            recorder.write("failed", what="arrivals", reason=str(error))
            progress(f"FAILED: {error}")
            print_logs(cluster)
            return 1
    runs = [*of_kind(recorder.records, "closed_loop"), *of_kind(recorder.records, "open_loop")]
    is_void = not runs or any(run["void"] for run in runs) or bool(of_kind(recorder.records, "failed"))
    return EXIT_VOID if is_void else 0


def _parser() -> argparse.ArgumentParser:
    limits = Limits()
    traffic = Traffic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_pair_arguments(parser)
    parser.add_argument("--out", type=Path, default=Path("arrivals.jsonl"), help="JSON lines (default %(default)s)")
    parser.add_argument("--logs", type=Path, help="directory for the services' logs (default: a temporary one)")
    parser.add_argument("--device", default="auto", help="auto: a GPU a service if there are two; cuda:0: share it")
    rates = parser.add_mutually_exclusive_group()
    rates.add_argument("--rates", type=float, nargs="*", default=[], help="open loops: requests a second")
    rates.add_argument(
        "--shares", type=float, nargs="*", default=[0.5, 0.8], help="or shares of the capacity (default 0.5 0.8)"
    )
    parser.add_argument("--concurrency", type=int, nargs="+", default=[64], help="closed loops: requests always open")
    parser.add_argument("--uniform", action="store_true", help="everything without special requests as well")
    parser.add_argument("--rounds", type=int, default=1, help="of the closed loops, in turns (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of an open loop (default %(default)s)")
    parser.add_argument("--closed-seconds", type=float, default=10.0, help="of a closed loop (default %(default)s)")
    parser.add_argument("--skip-seconds", type=float, default=3.0, help="before each of these (default %(default)s)")
    parser.add_argument(
        "--drain-seconds", type=float, default=15.0, help="for what is open after an open loop (default %(default)s)"
    )
    parser.add_argument("--prompt-tokens", type=int, nargs=2, default=traffic.prompt_tokens, metavar=("LEAST", "MOST"))
    parser.add_argument("--output-tokens", type=int, nargs=2, default=traffic.output_tokens, metavar=("LEAST", "MOST"))
    parser.add_argument("--temperatures", type=float, nargs="+", default=traffic.temperatures)
    parser.add_argument(
        "--special-share", type=float, default=traffic.special_share, help="with penalties or log-probabilities"
    )
    parser.add_argument("--traffic-seed", type=int, default=0)
    parser.add_argument("--first-token-limit-ms", type=float, default=limits.first_token_ms, help="default %(default)s")
    parser.add_argument("--token-limit-ms", type=float, default=limits.token_ms, help="default %(default)s")
    parser.add_argument("--max-lag-ms", type=float, default=limits.lag_ms, help="of the generator, default %(default)s")
    parser.add_argument("--num-draft-tokens", type=int, default=4, help="K (default %(default)s)")
    parser.add_argument("--candidates", type=int, default=NUM_CANDIDATES, help="of a draft token (default %(default)s)")
    parser.add_argument("--budget-seconds", type=float, default=300.0, help="begin nothing that takes longer than this")
    parser.add_argument("--verifier-flag", action="append", default=[], help="passed on, for example --draft-timeout=1")
    parser.add_argument("--drafter-flag", action="append", default=[], help="passed on")
    parser.add_argument("--tiny", action="store_true", help="a tiny pair and short runs, for a CPU")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; the exit status."""
    parser = _parser()
    if parser.parse_args(arguments).tiny:
        parser.set_defaults(
            shape="tiny",
            concurrency=[2],
            shares=[0.5],
            seconds=5.0,
            closed_seconds=2.0,
            skip_seconds=0.5,
            prompt_tokens=(8, 64),
            output_tokens=(8, 32),
        )
    options = parser.parse_args(arguments)
    if options.uniform and not options.special_share:
        parser.error("--uniform compares with special requests, and --special-share 0 leaves none")
    deadline = time.monotonic() + options.budget_seconds
    device = resolve_device(options.device)
    recorder = Recorder(options.out, "arrivals", device)

    def measure() -> int:
        pair = pair_of(options, device)
        recorder.write("pair", shape=pair.request.shape_name, **pair.measured.__dict__)
        recorder.write("traffic", **traffic_of(options).__dict__)
        recorder.write("limits", first_token_ms=options.first_token_limit_ms, token_ms=options.token_limit_ms)
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
