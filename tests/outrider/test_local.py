"""The life of a local cluster, with stand-ins for the services: start, death, restart, stop, and no child left."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider import local
from outrider.client import AsyncClient
from outrider.local import LocalCluster, Options, Report, ServiceState, StartError

FAKE = "tests.outrider.fake_service"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _fake_services(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_MODULES", dict.fromkeys(("gateway", "verifier", "drafter"), FAKE))
    monkeypatch.setattr(local, "_RESTART_DELAYS", (0.1,))
    monkeypatch.setattr(local, "_LINK_SECONDS", 0.2)


def options(tmp_path: Path, **fields: Any) -> Options:
    return Options(**{"target": tmp_path, "draft": tmp_path, "drain_seconds": 1.0, **fields})


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A zombie of a parent that has gone is nobody's child to wait for.
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


async def eventually(condition: Callable[[], bool], within_seconds: float = 10.0) -> None:
    deadline = time.monotonic() + within_seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.02)


async def test_starts_serves_and_leaves_nothing_behind(tmp_path: Path) -> None:
    reports: list[Report] = []
    async with LocalCluster(options(tmp_path), reports.append) as cluster:
        directory = cluster.log_directory
        pids = [process.pid for process in (cluster.gateway, cluster.verifier, cluster.drafter)]
        assert len(set(pids)) == 3
        async with AsyncClient(cluster.address) as client:
            assert (await client.model()).name == "fake"
        verifier_log = (directory / "verifier.log").read_text()
        assert f"--model {tmp_path}" in verifier_log
        assert f"--drafters {cluster.drafter.address}" in (directory / "gateway.log").read_text()
    assert not any(is_alive(pid) for pid in pids)
    assert not directory.exists()
    serving = [report.service for report in reports if report.state is ServiceState.SERVING]
    assert serving[-1] == "gateway"
    # The stand-in says of its only drafter that it is not ready.
    assert any("vocabulary differs" in report.message for report in reports)


async def test_both_services_are_made_for_the_same_number_of_draft_tokens(tmp_path: Path) -> None:
    """Catches a drafter whose CUDA graphs make fewer, which then are all that anybody gets."""
    async with LocalCluster(options(tmp_path, max_draft_tokens=7)) as cluster:
        assert "--max-draft-tokens 7" in (cluster.log_directory / "verifier.log").read_text()
        assert "--graph-draft-tokens 7" in (cluster.log_directory / "drafter.log").read_text()


async def test_a_cluster_without_a_drafter(tmp_path: Path) -> None:
    async with LocalCluster(options(tmp_path, drafter="none")) as cluster:
        assert "--drafters" not in (cluster.log_directory / "gateway.log").read_text()
        with pytest.raises(RuntimeError, match="no such service"):
            _ = cluster.drafter


@pytest.mark.parametrize(
    ("kind", "script", "flags"),
    [("ngram", "", "--kind ngram"), ("scripted", "a.json", "--kind scripted --script a.json")],
)
async def test_a_drafter_without_a_model(tmp_path: Path, kind: str, script: str, flags: str) -> None:
    async with LocalCluster(options(tmp_path, draft=None, drafter=kind, script=script)) as cluster:
        log = (cluster.log_directory / "drafter.log").read_text()
    assert flags in log
    assert "--model" not in log


async def test_a_service_that_dies_while_it_loads(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    cluster = LocalCluster(options(tmp_path, log_directory=logs, verifier_flags=("--behave", "die")))
    with pytest.raises(StartError, match=r"verifier ended with exit status 1(?s:.*)no such model"):
        await cluster.start()
    assert not cluster.drafter.is_running
    assert (logs / "verifier.log").exists()


async def test_a_service_that_never_serves(tmp_path: Path) -> None:
    cluster = LocalCluster(options(tmp_path, start_seconds=1.0, drafter_flags=("--behave", "hang")))
    with pytest.raises(StartError, match="did not serve within 1 s"):
        await cluster.start()
    assert not cluster.verifier.is_running


async def test_a_taken_port_is_found_before_anything_loads(tmp_path: Path) -> None:
    async with LocalCluster(options(tmp_path)) as cluster:
        port = int(cluster.address.rpartition(":")[2])
        with pytest.raises(StartError, match=f"cannot listen on 127.0.0.1:{port}"):
            await LocalCluster(options(tmp_path, port=port)).start()


@pytest.mark.parametrize("name", ["drafter", "verifier"])
async def test_what_dies_is_reported_and_started_again_at_its_address(tmp_path: Path, name: str) -> None:
    reports: list[Report] = []
    async with LocalCluster(options(tmp_path), reports.append) as cluster:
        process = getattr(cluster, name)
        first, address = process.pid, process.address
        reports.clear()
        process.kill()
        await eventually(lambda: ServiceState.SERVING in [report.state for report in reports])
        states = [report.state for report in reports if report.service == name]
        assert states == [ServiceState.LOST, ServiceState.RESTARTING, ServiceState.LOADING, ServiceState.SERVING]
        assert "SIGKILL" in reports[0].message
        assert process.pid != first
        assert process.address == address


async def test_a_drafter_that_stays_dead_until_it_is_wanted(tmp_path: Path) -> None:
    reports: list[Report] = []
    async with LocalCluster(options(tmp_path, restart=False), reports.append) as cluster:
        cluster.drafter.kill()
        await eventually(lambda: reports[-1].state is ServiceState.LOST)
        await asyncio.sleep(0.3)
        assert not cluster.drafter.is_running
        await cluster.restart_drafter()
        assert cluster.drafter.is_running


async def test_the_gateways_death_ends_the_wait(tmp_path: Path) -> None:
    async with LocalCluster(options(tmp_path)) as cluster:
        waiting = asyncio.create_task(cluster.wait())
        await asyncio.sleep(0.1)
        assert not waiting.done()
        cluster.gateway.kill()
        await asyncio.wait_for(waiting, 5)


async def test_a_service_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_STOP_SECONDS", 0.2)
    async with LocalCluster(options(tmp_path, drain_seconds=0.2, verifier_flags=("--behave", "stubborn"))) as cluster:
        pid = cluster.verifier.pid
    assert not is_alive(pid)


async def test_an_interrupted_start_leaves_nothing_behind(tmp_path: Path) -> None:
    cluster = LocalCluster(options(tmp_path, verifier_flags=("--behave", "hang")))
    starting = asyncio.create_task(cluster.start())
    await asyncio.sleep(1.0)
    pid = cluster.verifier.pid
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not is_alive(pid)


async def test_children_end_when_the_parent_is_killed(tmp_path: Path) -> None:
    """SIGKILL leaves the parent no time for anything: only the pipe tells the children."""
    program = f"""
import asyncio
from pathlib import Path
from outrider import local

local._MODULES = dict.fromkeys(("gateway", "verifier", "drafter"), {FAKE!r})
local._LINK_SECONDS = 0.0

async def main():
    async with local.LocalCluster(local.Options(target=Path("."), draft=Path("."))) as cluster:
        print(cluster.gateway.pid, cluster.verifier.pid, cluster.drafter.pid, flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", program, cwd=ROOT, stdout=subprocess.PIPE)
    try:
        assert parent.stdout is not None
        pids = [int(pid) for pid in (await parent.stdout.readline()).split()]
        assert len(pids) == 3
        assert all(is_alive(pid) for pid in pids)
    finally:
        parent.kill()
        await parent.wait()
    await eventually(lambda: not any(is_alive(pid) for pid in pids))


async def test_each_option_reaches_its_service(tmp_path: Path) -> None:
    """Catches a setting that can only be reached by starting each service by hand."""
    template = tmp_path / "chat.jinja"
    template.write_text("")
    asked = options(
        tmp_path,
        verification="coupled",
        num_candidates=32,
        max_running=5,
        max_model_len=300,
        chat_template=template,
        target_device="cuda:2",
        draft_device="cpu",
    )
    async with LocalCluster(asked) as cluster:
        verifier, drafter, gateway = (
            (cluster.log_directory / f"{name}.log").read_text() for name in ("verifier", "drafter", "gateway")
        )
    for flags in (
        "--verification coupled",
        "--num-candidates 32",
        "--max-running 5",
        "--max-model-len 300",
        "--device cuda:2",
    ):
        assert flags in verifier
    for flags in ("--num-candidates 32", "--max-model-len 300", "--device cpu"):
        assert flags in drafter
    assert f"--chat-template {template}" in gateway


async def test_several_drafters(tmp_path: Path) -> None:
    async with LocalCluster(options(tmp_path, num_drafters=3, http_port=0)) as cluster:
        logs = {path.stem: path.read_text() for path in cluster.log_directory.glob("*.log")}
        assert set(logs) == {"gateway", "verifier", "drafter", "drafter-2", "drafter-3"}
        listens = [logs[name].split("--listen ")[1].split()[0] for name in ("drafter", "drafter-2", "drafter-3")]
        assert f"--drafters {','.join(listens)}" in logs["gateway"]
        # Each tells its own figures at a place of its own.
        assert set(cluster.metrics_addresses) == set(logs) - {"gateway"}
        assert len(set(cluster.metrics_addresses.values())) == 4
        for name, address in cluster.metrics_addresses.items():
            assert f"--metrics-listen {address}" in logs[name]
