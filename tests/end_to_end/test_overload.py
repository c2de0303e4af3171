"""Ten times what the services can bear, with all three of them in this process, where everything can be counted."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.process_stats import ProcessStats
from gateway.gateway import Gateway, make_server
from gateway.settings import GatewaySettings
from outrider.service.telemetry import Telemetry
from tests.services.harness import (
    decode_client,
    drafter_is_empty,
    drafter_settings,
    eventually,
    running_drafter,
    running_verifier,
    verifier_is_empty,
    verifier_settings,
)

ROOT = Path(__file__).resolve().parents[2]
MAX_RUNNING = 8


async def load(address: str, seconds: float, *flags: str) -> dict[str, Any]:
    """What the load generator reports, run as a process of its own, and what this process served for its CPU time."""
    before = ProcessStats.of_this().cpu_seconds
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.load_generator", address, "--seconds", str(seconds), "--skip", "1"),
        *("--output-tokens", "48", "--vocabulary-size", "16", *flags),
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    report: dict[str, Any] = json.loads(output)
    return {**report, "served_per_cpu_second": report["num_served"] / (ProcessStats.of_this().cpu_seconds - before)}


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """Threads hand over as they do in the services' own processes."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.0002)
    yield
    sys.setswitchinterval(before)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_switches")
async def test_ten_times_the_load_that_can_be_borne(tiny_pair: tuple[Path, Path]) -> None:
    """Catches refusals that cost what the served ones need, or that come late, and whatever is not given back."""
    target, draft = tiny_pair
    async with (
        running_drafter(drafter_settings(model=draft, num_threads=1)) as drafter,
        running_verifier(verifier_settings(target, max_running=MAX_RUNNING, num_threads=1)) as (verifier, _),
        decode_client(verifier.address) as probe,
    ):
        settings = GatewaySettings(
            listen="127.0.0.1:0",
            verifiers=(verifier.address,),
            drafters=(drafter.address,),
            max_queued_requests=MAX_RUNNING,
        )
        server = make_server(settings, None, Telemetry())
        await server.start()
        gateway = server._component
        assert isinstance(gateway, Gateway)
        admission = gateway._admission

        async def is_empty() -> bool:
            nothing = admission.num_open == admission.num_running == admission.num_waiting == 0
            return nothing and await verifier_is_empty(probe) and await drafter_is_empty(drafter.address)

        try:
            peak = await load(server.address, 3, "--concurrency", str(MAX_RUNNING))
            await eventually(is_empty)
            gc.collect()
            num_tasks, num_objects, stats = len(asyncio.all_tasks()), len(gc.get_objects()), ProcessStats.of_this()
            rate = 10 * peak["goodput_requests_per_second"]
            report = await load(server.address, 6, "--rate", f"{rate:.3f}")
            await eventually(is_empty)
            # What a handler leaves behind it does in the next turns of the loop.
            await eventually(lambda: len(asyncio.all_tasks()) <= num_tasks)
            gc.collect()
            after = ProcessStats.of_this()
            grown = len(gc.get_objects()) - num_objects
        finally:
            await server.stop()
    assert report["other_statuses"] == {}
    assert report["num_served"] + report["num_refused"] == report["num_sent"]
    assert report["num_refused"] > 0.6 * report["num_sent"]
    # Of CPU time, and with room to spare: this machine may be busy, and the benchmark has the limit for an idle one.
    # With nine refusals for each request that is served, refusing at half the price of serving would come to a fifth.
    assert report["served_per_cpu_second"] > 0.4 * peak["served_per_cpu_second"]
    assert report["refusal_latency_ms"]["p50"] < 100
    assert report["retry_delay_ms"]["min"] > 0
    # Less than an object for every second request, or than 2 KB for each.
    assert grown < report["num_sent"] / 2
    assert after.rss_mb - stats.rss_mb < 10 + report["num_sent"] * 2 / 1024
    assert after.num_fds <= stats.num_fds + 2
    assert after.num_threads <= stats.num_threads + 4
