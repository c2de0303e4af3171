"""Many times the load that the services can bear: what is still served, how fast the rest is refused, what is left.

    python -m benchmarks.overload [--seconds 60] [--times 10] [--out FILE]

Gateway, verifier and drafter run with the bundled pair on this machine's CPU, the load comes from a process of its own.
First a closed loop with as many requests as have a place finds the peak; then an open loop sends `times` as many
requests a second; then the peak is measured again, as a machine that is shared is not the same a minute later. At the
end nothing may be left: sequences, KV blocks, connections, tasks, memory. Prints JSON; the exit status is 1 when
something that should hold did not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from benchmarks.process_stats import ProcessStats, machine_cpu_seconds
from outrider.bundled import bundled_model
from outrider.client import AsyncClient
from outrider.local import LocalCluster, Options
from outrider.v1 import drafter_pb2, drafter_pb2_grpc, verifier_pb2, verifier_pb2_grpc

_ROOT = Path(__file__).resolve().parents[1]
_EMPTY_SECONDS = 15.0


@dataclass(frozen=True)
class Plan:
    """What is run, and what has to hold."""

    seconds: float = 60.0  # of overload
    peak_seconds: float = 30.0  # of each measurement of the peak
    skip_seconds: float = 4.0  # at the start of each part, until as many run as may
    times: float = 10.0
    max_running: int = 12
    max_queued: int = 24
    num_output_tokens: int = 384  # of a request in the mean
    min_goodput_ratio: float = 0.9
    max_refusal_ms: float = 100.0  # at the 99th percentile
    max_growth_mb: float = 20.0  # of each process's memory over the overload
    max_other_cores: float = 0.15  # kept busy by what is not part of this


async def run(plan: Plan, *, log_directory: Path | None = None) -> dict[str, Any]:
    """The measurements, and under `problems` what did not hold."""
    metrics = {name: f"127.0.0.1:{_free_port()}" for name in ("gateway", "verifier", "drafter")}
    scraped = {name: ("--metrics-listen", address) for name, address in metrics.items()}
    # Two cores for everything: threads of one model would wait for the other's.
    one_thread = ("--num-threads", "1")
    options = Options(
        target=bundled_model("target"),
        draft=bundled_model("draft"),
        device="cpu",
        dtype="float32",
        drain_seconds=2.0,
        log_level="WARNING",
        log_directory=log_directory,
        restart=False,
        gateway_flags=(*scraped["gateway"], "--max-queued-requests", str(plan.max_queued)),
        verifier_flags=(*scraped["verifier"], *one_thread, "--max-running", str(plan.max_running)),
        drafter_flags=(*scraped["drafter"], *one_thread),
    )
    async with LocalCluster(options) as cluster:
        return await _Overload(plan, cluster, metrics).measure()


class _Overload:
    """One measurement on services that serve."""

    def __init__(self, plan: Plan, cluster: LocalCluster, metrics: dict[str, str]) -> None:
        self._plan = plan
        self._cluster = cluster
        self._metrics = metrics
        services = (cluster.gateway, cluster.verifier, cluster.drafter)
        self._pids = {service.name: service.pid for service in services}

    async def measure(self) -> dict[str, Any]:
        """Peak, overload, peak."""
        plan = self._plan
        closed = ("--concurrency", str(plan.max_running))
        # Caches, pools of threads and memory grow to what they need before anything is compared.
        await self._generate(plan.skip_seconds, *closed)
        peaks = [await self._part(plan.peak_seconds, *closed)]
        rate = plan.times * peaks[0]["goodput_requests_per_second"]
        overload = await self._part(plan.seconds, "--rate", f"{rate:.3f}")
        peaks.append(await self._part(plan.peak_seconds, *closed))
        peak = statistics.mean(part["goodput_tokens_per_second"] for part in peaks)
        result: dict[str, Any] = {
            "plan": plan.__dict__,
            "offered_requests_per_second": rate,
            "goodput_ratio": overload["goodput_tokens_per_second"] / peak,
            "peaks": peaks,
            "overload": overload,
        }
        return {**result, "problems": _problems(plan, result)}

    async def _part(self, seconds: float, *flags: str) -> dict[str, Any]:
        """One run of the load generator, and what it cost and left."""
        before, machine = await self._stats(), machine_cpu_seconds()
        began = time.monotonic()
        report = await self._generate(seconds, *flags)
        wall = time.monotonic() - began
        machine = machine_cpu_seconds() - machine
        left = await self._left_in_the_end()
        after = await self._stats()
        cpu = {name: after[name]["cpu_seconds"] - before[name]["cpu_seconds"] for name in before}
        cpu["load_generator"] = report["cpu_seconds"]
        cpu["all_else"] = machine - sum(cpu.values())
        cores = {name: round(value / wall, 2) for name, value in cpu.items()}
        return {**report, "cores": cores, "left": left, "before": before, "after": after}

    async def _generate(self, seconds: float, *flags: str) -> dict[str, Any]:
        plan = self._plan
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.load_generator", self._cluster.address, "--seconds", str(seconds)),
            *("--skip", str(min(plan.skip_seconds, seconds / 2)), "--output-tokens", str(plan.num_output_tokens)),
            *flags,
            stdout=asyncio.subprocess.PIPE,
            cwd=_ROOT,
        )
        try:
            output, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
        if process.returncode != 0:
            raise RuntimeError(f"the load generator ended with {process.returncode}")
        report: dict[str, Any] = json.loads(output)
        return report

    async def _stats(self) -> dict[str, dict[str, float]]:
        """What each process holds and has used."""
        texts = [await asyncio.to_thread(_scrape, self._metrics[name]) for name in self._pids]
        return {
            name: {**ProcessStats.of(pid).__dict__, "num_tasks": _sample(text, f"outrider_{name}_tasks")}
            for (name, pid), text in zip(self._pids.items(), texts, strict=True)
        }

    async def _left_in_the_end(self) -> dict[str, float]:
        """What is left of the requests, once nothing is or after a while."""
        deadline = time.monotonic() + _EMPTY_SECONDS
        while True:
            left = await self._left()
            if not any(left.values()) or time.monotonic() > deadline:
                return left
            await asyncio.sleep(0.1)

    async def _left(self) -> dict[str, float]:
        cluster = self._cluster
        async with (
            AsyncClient(cluster.address) as client,
            grpc.aio.insecure_channel(cluster.verifier.address) as verifier_channel,
            grpc.aio.insecure_channel(cluster.drafter.address) as drafter_channel,
        ):
            model = await client.model(timeout=5.0)
            verifier = await verifier_pb2_grpc.VerifierServiceStub(verifier_channel).GetInfo(
                verifier_pb2.VerifierServiceGetInfoRequest()
            )
            drafter = await drafter_pb2_grpc.DrafterServiceStub(drafter_channel).GetInfo(
                drafter_pb2.DrafterServiceGetInfoRequest()
            )
        load = verifier.load
        return {
            "gateway_verifier_sequences": sum(member.num_sequences for member in model.verifiers),
            "gateway_drafter_sequences": sum(member.num_sequences for member in model.drafters),
            "verifier_running": load.num_running,
            "verifier_waiting": load.num_waiting,
            "verifier_kv_blocks": load.num_kv_blocks - load.num_free_kv_blocks,
            "drafter_sequences": drafter.num_sequences,
            "drafter_kv_blocks": drafter.num_kv_blocks - drafter.num_free_kv_blocks,
        }


def _problems(plan: Plan, result: dict[str, Any]) -> list[str]:
    overload, problems = result["overload"], []
    others = max(part["cores"]["all_else"] for part in (overload, *result["peaks"]))
    if others > plan.max_other_cores:
        problems.append(f"void: something else kept {others:.2f} cores of this machine busy")
    if result["goodput_ratio"] < plan.min_goodput_ratio:
        problems.append(f"goodput fell to {result['goodput_ratio']:.3f} of the peak")
    num_refused, num_sent = overload["num_refused"], overload["num_sent"]
    if num_refused + overload["num_served"] != num_sent or overload["other_statuses"]:
        problems.append(f"neither served nor refused: {overload['other_statuses']}")
    if num_refused < 0.5 * num_sent:
        problems.append(f"no overload: {num_refused} of {num_sent} requests were refused")
    elif overload["refusal_latency_ms"]["p99"] > plan.max_refusal_ms:
        problems.append(f"refusals took {overload['refusal_latency_ms']} ms")
    if num_refused and overload["retry_delay_ms"]["min"] <= 0:
        problems.append("a refusal named no time to come again")
    problems += [f"left over: {name} {value}" for name, value in overload["left"].items() if value]
    for name, before in overload["before"].items():
        after = overload["after"][name]
        if after["rss_mb"] - before["rss_mb"] > plan.max_growth_mb:
            problems.append(f"{name} grew from {before['rss_mb']:.1f} to {after['rss_mb']:.1f} MB")
        # A connection that ends may take its time.
        if after["num_fds"] > before["num_fds"] + 2 or after["num_threads"] > before["num_threads"] + 4:
            problems.append(f"{name} has {after['num_fds']} files and {after['num_threads']} threads open: {before}")
        if after["num_tasks"] > before["num_tasks"] + 2:
            problems.append(f"{name} had {before['num_tasks']:.0f} tasks and has {after['num_tasks']:.0f}")
    return problems


def _scrape(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as response:
        text: str = response.read().decode()
    return text


def _sample(text: str, name: str) -> float:
    """The value of a metric without labels of its own. Raises LookupError."""
    for line in text.splitlines():
        if line.split("{")[0].split(" ")[0] == name:
            return float(line.rpartition(" ")[2])
    raise LookupError(f"no metric {name}")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; the process's exit status."""
    plan = Plan()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=plan.seconds, help="how long the overload lasts")
    parser.add_argument("--times", type=float, default=plan.times, help="how many times the peak is asked for")
    parser.add_argument("--max-running", type=int, default=plan.max_running, help="the verifier's places")
    parser.add_argument("--output-tokens", type=int, default=plan.num_output_tokens, help="of each request")
    parser.add_argument("--out", type=Path, help="file for the JSON; default: standard output")
    options = parser.parse_args(arguments)
    plan = Plan(
        seconds=options.seconds,
        times=options.times,
        max_running=options.max_running,
        max_queued=2 * options.max_running,
        num_output_tokens=options.output_tokens,
    )
    result = asyncio.run(run(plan))
    text = json.dumps(result, indent=2)
    if options.out is not None:
        options.out.write_text(text + "\n")
    else:
        print(text)
    for problem in result["problems"]:
        print(f"overload: {problem}", file=sys.stderr)
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
