"""Output tokens a second of the real services, plain and speculative, by batch size and temperature.

    python -m benchmarks.serve --pair DIR --out FILE [--device auto]

A batch is so many requests sent at once, each a prompt of random tokens; the next wave starts when the last one has
ended, so prefill and the tail of a wave are in the tokens a second. Before anything is timed, greedy outputs with and
without speculation are compared. A run in which speculation did not happen is reported as void.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import goals
from benchmarks.cluster import CpuClock, Placement, make_cluster, print_logs, wait_for_drafter
from benchmarks.load import Wave, Workload, mode_name, random_prompts, run_wave, statistics_of
from benchmarks.pair import PairDirectory, add_pair_arguments, pair_of
from benchmarks.parity import NUM_LOGPROBS, check_parity
from benchmarks.records import EXIT_VOID, Record, Recorder, has_goals, of_kind, progress, remarks, run_refusable, table
from benchmarks.serve_plot import save_plot
from benchmarks.timing import resolve_device
from kernels.limits import NUM_CANDIDATES
from outrider.client import AsyncClient, ClientError, Verification
from outrider.local import LocalCluster, StartError

_REQUEST_SECONDS = 60.0
# No further wave of a workload is begun after this.
_WORKLOAD_SECONDS = 8.0
_CHECK = Workload(batch_size=6, temperature=0.0, num_draft_tokens=None, num_prompt_tokens=32, num_output_tokens=48)


class ServeBenchmark:
    """Runs workloads against services that serve."""

    def __init__(
        self,
        cluster: LocalCluster,
        client: AsyncClient,
        pair: PairDirectory,
        recorder: Recorder,
        *,
        device_type: str,
        num_waves: int,
        deadline: float,  # on time.monotonic's clock: nothing new is begun after it
    ) -> None:
        self._cluster = cluster
        self._client = client
        self._vocab_size = pair.shape.target.vocab_size
        self._recorder = recorder
        self._device_type = device_type
        self._num_waves = num_waves
        self._deadline = deadline

    async def check(self, num_draft_tokens: int) -> None:
        """Greedy parity. Raises RefusalError."""
        plain = _CHECK
        speculative = Workload(**{**plain.__dict__, "num_draft_tokens": num_draft_tokens})
        for workload in (plain, speculative):
            await self._warm_up(workload)
        prompts = random_prompts(plain, self._vocab_size, seed=99)
        waves = [
            await run_wave(
                self._client,
                workload,
                prompts,
                seed=0,
                timeout_seconds=_REQUEST_SECONDS,
                num_logprobs=NUM_LOGPROBS,
            )
            for workload in (plain, speculative)
        ]
        parity = check_parity(waves[0].requests, waves[1].requests, self._device_type)
        self._recorder.write("check", **parity.__dict__)
        progress(
            f"greedy parity: {parity.num_identical} of {parity.num_sequences} sequences identical, "
            f"{parity.num_near_ties} part at a near tie"
        )

    async def run(self, workload: Workload) -> None:
        """Warm up, then measure one workload; a client's error is recorded in the place of a result."""
        if time.monotonic() > self._deadline:
            self._recorder.write("left_out", what=workload.name)
            progress(f"left out, the time is up: {workload.name}")
            return
        try:
            await self._warm_up(workload)
            clock = CpuClock(self._cluster)
            start = time.perf_counter()
            waves: list[Wave] = []
            for number in range(self._num_waves):
                if waves and time.perf_counter() - start > _WORKLOAD_SECONDS:
                    break
                prompts = random_prompts(workload, self._vocab_size, seed=number)
                waves.append(
                    await run_wave(
                        self._client, workload, prompts, seed=1000 * number, timeout_seconds=_REQUEST_SECONDS
                    )
                )
            cores = clock.cores(time.perf_counter() - start)
        except ClientError as error:
            self._recorder.write("failed", what=workload.name, reason=str(error))
            progress(f"FAILED: {workload.name}: {error}")
            print_logs(self._cluster)
            return
        record = self._recorder.write("serve", **workload.__dict__, **statistics_of(workload, waves), cores=cores)
        progress(_line(workload, record))
        if record["void"]:
            print_logs(self._cluster)

    async def _warm_up(self, workload: Workload) -> None:
        brief = Workload(**{**workload.__dict__, "num_output_tokens": min(24, workload.num_output_tokens)})
        prompts = random_prompts(brief, self._vocab_size, seed=77)
        await run_wave(self._client, brief, prompts, seed=5, timeout_seconds=_REQUEST_SECONDS)
        if workload.is_speculative:
            await wait_for_drafter(self._client)


def _line(workload: Workload, record: Record) -> str:
    if record["void"]:
        return f"VOID: {workload.name}: {record['void']}"
    length = f", {record['acceptance_length']:.2f} tokens a step" if workload.is_speculative else ""
    return (
        f"{workload.name}: {record['tokens_per_second']:,.1f} tokens/s{length}, first token "
        f"{record['time_to_first_token_ms']:.1f} ms, cycle {record['cycle_ms']:.2f} ms, cores {record['cores']}"
    )


def workloads(
    batch_sizes: Sequence[int],
    temperatures: Sequence[float],
    num_draft_tokens: int,
    num_output_tokens: int,
    verifications: Sequence[Verification],  # above temperature 0
) -> list[Workload]:
    """Plain and speculative at each batch size and temperature, what matters most first."""
    return [
        Workload(batch_size, temperature, drafts, num_output_tokens=num_output_tokens, verification=verification)
        for temperature in temperatures
        for batch_size in batch_sizes
        for drafts, verification in (
            # Without drafts, or at temperature 0, no rule makes a difference.
            *((num_draft_tokens, rule) for rule in (verifications if temperature else (Verification.GREEDY,))),
            (None, Verification.REJECTION if temperature else Verification.GREEDY),
        )
    ]


def summary(records: Sequence[Record]) -> str:
    """The table of what was recorded, with the ratio to the plain run beside each speculative one."""
    is_judged = has_goals(records)
    runs = of_kind(records, "serve")
    plain_speeds = {
        (run["batch_size"], run["temperature"]): run["tokens_per_second"]
        for run in runs
        if run["num_draft_tokens"] is None and not run["void"]
    }
    rows: list[Sequence[object]] = []
    for run in sorted(runs, key=_order):
        limit, batch_size, temperature = run["num_draft_tokens"], run["batch_size"], run["temperature"]
        mode = mode_name(limit, temperature, run.get("verification", "rejection"))
        if run["void"]:
            rows.append((f"{batch_size}", f"{temperature:g}", mode, "VOID", *[None] * 8))
            continue
        plain = plain_speeds.get((batch_size, temperature))
        ratio = run["tokens_per_second"] / plain if plain and limit is not None else None
        goal = peer = None
        if is_judged and temperature == 1 and limit in (None, 4):
            is_plain = limit is None
            goal = (goals.PLAIN_TOKENS_PER_SECOND if is_plain else goals.SPECULATIVE_TOKENS_PER_SECOND).get(batch_size)
            peer = (goals.VLLM_PLAIN_TOKENS_PER_SECOND if is_plain else goals.VLLM_SPECULATIVE_TOKENS_PER_SECOND).get(
                batch_size
            )
        rows.append(
            (
                f"{batch_size}",
                f"{temperature:g}",
                mode,
                run["tokens_per_second"],
                ratio,
                None if limit is None else run["acceptance_length"],
                run["acceptance_rate"],
                run["time_to_first_token_ms"],
                run["inter_token_ms"],
                run["cycle_ms"],
                goal,
                peer,
            )
        )
    headers = ("batch", "T", "mode", "tokens/s", "x plain", "tokens/step", "accepted", "first ms", "token ms")
    lines = [table((*headers, "cycle ms", "goal", "vLLM 0.25.1"), rows)]
    lines += _acceptance_lines(records)
    lines += [f"VOID: {run['batch_size']} x T {run['temperature']:g}: {run['void']}" for run in runs if run["void"]]
    return "\n".join(lines)


def _acceptance_lines(records: Sequence[Record]) -> list[str]:
    """How often a proposal's first token was accepted beside what the pair was measured to do: a check of the whole
    path, as the pair knows nothing of the services."""
    rates = [
        (run["first_acceptance_rate"], run["num_requests"])
        for run in of_kind(records, "serve")
        if run["temperature"] == 1
        and run["num_draft_tokens"]
        and not run["void"]
        and run.get("verification", "rejection") == "rejection"
    ]
    pairs = of_kind(records, "pair")
    if not rates or not pairs:
        return []
    mean = sum(rate * weight for rate, weight in rates) / sum(weight for _, weight in rates)
    expected = ", ".join(f"{value:.3f} with {m}" for m, value in pairs[0]["candidate_agreement"].items())
    return [f"first draft tokens accepted at T 1: {mean:.3f}; measured of the pair: {expected} candidates"]


def _order(run: Record) -> tuple[float, int, int, str]:
    return run["temperature"], run["batch_size"], run["num_draft_tokens"] or 0, run.get("verification", "")


async def _measure(options: argparse.Namespace, pair: PairDirectory, recorder: Recorder, deadline: float) -> int:
    placement = Placement(
        options.device,
        max(*options.batch_sizes, _CHECK.batch_size),
        128 + options.output_tokens + options.num_draft_tokens,
        options.num_draft_tokens,
        max(deadline - time.monotonic(), 10.0),
        options.candidates,
        tuple(options.verifier_flag),
        tuple(options.drafter_flag),
    )
    progress("starting the services")
    async with (
        make_cluster(pair, placement, log_directory=options.logs) as cluster,
        AsyncClient(cluster.address) as client,
    ):
        recorder.write(
            "placement",
            verifier=cluster.devices.verifier,
            drafter=cluster.devices.drafters[0],
            num_candidates=options.candidates,
        )
        benchmark = ServeBenchmark(
            cluster,
            client,
            pair,
            recorder,
            device_type=placement.device_type,
            num_waves=options.waves,
            deadline=deadline,
        )
        try:
            await benchmark.check(options.num_draft_tokens)
        except ClientError as error:
            recorder.write("failed", what="the check", reason=str(error))
            progress(f"FAILED: the check: {error}")
            print_logs(cluster)
            return 1
        for workload in workloads(
            options.batch_sizes,
            options.temperatures,
            options.num_draft_tokens,
            options.output_tokens,
            options.verifications,
        ):
            await benchmark.run(workload)
    is_void = any(run["void"] for run in of_kind(recorder.records, "serve"))
    return EXIT_VOID if is_void or of_kind(recorder.records, "failed") else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_pair_arguments(parser)
    parser.add_argument("--out", type=Path, default=Path("serve.jsonl"), help="JSON lines (default %(default)s)")
    parser.add_argument("--plot", type=Path, help="PNG to draw, where matplotlib is installed")
    parser.add_argument("--logs", type=Path, help="directory for the services' logs (default: a temporary one)")
    parser.add_argument("--device", default="auto", help="auto: a GPU a service if there are two; cuda:0: share it")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[1.0, 0.0])
    parser.add_argument(
        "--verifications",
        type=Verification,
        nargs="+",
        choices=(Verification.REJECTION, Verification.COUPLED),
        default=[Verification.REJECTION],
        help="above temperature 0 (default: rejection)",
    )
    parser.add_argument("--num-draft-tokens", type=int, default=4, help="K (default %(default)s)")
    parser.add_argument("--candidates", type=int, default=NUM_CANDIDATES, help="of a draft token (default %(default)s)")
    parser.add_argument("--output-tokens", type=int, default=256, help="a request (default %(default)s)")
    parser.add_argument("--waves", type=int, default=3, help="measured a workload (default %(default)s)")
    parser.add_argument("--budget-seconds", type=float, default=200.0, help="begin no new workload after this")
    parser.add_argument("--verifier-flag", action="append", default=[], help="passed on, for example --draft-timeout=1")
    parser.add_argument("--drafter-flag", action="append", default=[], help="passed on")
    parser.add_argument("--tiny", action="store_true", help="a tiny pair and small waves, for a CPU")
    if parser.parse_args(arguments).tiny:
        parser.set_defaults(shape="tiny", batch_sizes=[1, 3], output_tokens=24, waves=2)
    options = parser.parse_args(arguments)
    deadline = time.monotonic() + options.budget_seconds
    device = resolve_device("auto" if options.device == "auto" else options.device)
    recorder = Recorder(options.out, "serve", device)

    def measure() -> int:
        pair = pair_of(options, device)
        recorder.write("pair", shape=pair.request.shape_name, **pair.measured.__dict__)
        try:
            status = asyncio.run(_measure(options, pair, recorder, deadline))
        except StartError as error:
            recorder.write("failed", what="starting the services", reason=str(error))
            progress(f"FAILED: the services did not start: {error}")
            return 1
        print(f"\n{summary(recorder.records)}{remarks(recorder.records)}", flush=True)
        if options.plot is not None:
            save_plot(recorder.records, options.plot)
        return status

    return run_refusable(recorder, measure)


if __name__ == "__main__":
    sys.exit(main())
