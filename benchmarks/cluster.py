"""The real services for a benchmark: gateway, verifier and drafter as processes over a pair."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.pair import PairDirectory
from benchmarks.records import progress
from kernels.limits import NUM_CANDIDATES
from outrider.client import AsyncClient
from outrider.local import LocalCluster, Options, Report, ServiceState

_BLOCK_SIZE = 16
_LINK_SECONDS = 10.0


@dataclass(frozen=True)
class Placement:
    """Where the services run and how large they are made."""

    device: str  # auto: a GPU each where there are two, else one for both; or cpu, or cuda:N for both
    max_batch_size: int
    max_tokens_per_sequence: int
    num_draft_tokens: int  # most of any request
    start_seconds: float  # most that the services may take until they serve
    num_candidates: int = NUM_CANDIDATES
    verifier_flags: tuple[str, ...] = ()
    drafter_flags: tuple[str, ...] = ()

    @property
    def device_type(self) -> str:
        """cpu or cuda."""
        if self.device == "auto":
            return "cuda" if torch.cuda.is_available() else "cpu"
        return torch.device(self.device).type


def make_cluster(pair: PairDirectory, placement: Placement, *, log_directory: Path | None) -> LocalCluster:
    """The services, not yet started.

    The KV caches are made for the largest batch with half as much again, and not from what memory is left: on one GPU
    two services that size themselves at the same time would count the same memory twice.
    """
    blocks_per_sequence = -(-placement.max_tokens_per_sequence // _BLOCK_SIZE) + 1
    num_blocks = 16 + placement.max_batch_size * blocks_per_sequence * 3 // 2
    common: tuple[str, ...] = ("--num-blocks", str(num_blocks), "--block-size", str(_BLOCK_SIZE))
    common = (*common, "--num-candidates", str(placement.num_candidates))
    running = ("--max-running", str(max(placement.max_batch_size, 2)))
    patience: tuple[str, ...] = ()
    if placement.device_type == "cpu":
        # Tiny models on a machine shared with others: threads cost more than they bring, a late draft says nothing.
        common = (*common, "--num-threads", "1")
        patience = ("--draft-timeout-seconds", "10")
    options = Options(
        target=pair.target,
        draft=pair.drafter,
        device=placement.device,
        start_seconds=placement.start_seconds,
        drain_seconds=2.0,
        log_level="WARNING" if placement.device_type == "cpu" else "INFO",
        log_directory=log_directory,
        max_draft_tokens=placement.num_draft_tokens,
        restart=False,
        verifier_flags=(*common, *running, *patience, *placement.verifier_flags),
        drafter_flags=(*common, *placement.drafter_flags),
    )
    return LocalCluster(options, _report)


def print_logs(cluster: LocalCluster) -> None:
    """Print how the services' logs end, after something went wrong."""
    for service in (cluster.gateway, cluster.verifier, cluster.drafter):
        state = "runs" if service.is_running else "has ended"
        progress(f"{service.name} {state}; its log ends:\n{service.log_tail(30)}")


async def wait_for_drafter(client: AsyncClient) -> None:
    """Return once the verifier has a working link to the drafter; after a while in any case.

    A drafter that was slow once, with its first compilation say, is dialled anew.
    """
    deadline = time.monotonic() + _LINK_SECONDS
    while time.monotonic() < deadline:
        if any(drafter.is_ready for drafter in (await client.model(timeout=5.0)).drafters):
            return
        await asyncio.sleep(0.1)
    progress("the verifier has no working link to the drafter")


class CpuClock:
    """CPU time of the services and of this process, which makes the load; `cores` says how many each kept busy."""

    def __init__(self, cluster: LocalCluster) -> None:
        services = {"gateway": cluster.gateway, "verifier": cluster.verifier, "drafter": cluster.drafter}
        self._pids = {name: service.pid for name, service in services.items()} | {"client": os.getpid()}
        self._start = self._seconds()

    def cores(self, wall_seconds: float) -> dict[str, float]:
        """Mean number of cores that each process kept busy since the clock was made."""
        now = self._seconds()
        return {name: round((now[name] - self._start[name]) / wall_seconds, 2) for name in now if name in self._start}

    def _seconds(self) -> dict[str, float]:
        ticks = os.sysconf("SC_CLK_TCK")
        seconds = {}
        for name, pid in self._pids.items():
            try:
                # Behind the name in parentheses: fields 14 and 15, user and system time.
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            seconds[name] = (int(fields[11]) + int(fields[12])) / ticks
        return seconds


def _report(report: Report) -> None:
    if report.state in (ServiceState.SERVING, ServiceState.LOST, ServiceState.STOPPED):
        progress(f"{report.service}: {report.state.name.lower()} {report.message}".rstrip())
