"""`outrider up` and `outrider generate` with the real services and the bundled models, as a user runs them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from outrider.bundled import bundled_model, heldout_prompt
from outrider.client import AsyncClient, Chunk, FallbackReason, Finished
from outrider.local import LocalCluster, Options, Report, ServiceState

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]


async def command(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "outrider.cli", *arguments, cwd=ROOT, stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


async def generate(address: str, *arguments: str) -> dict[str, Any]:
    process = await command("generate", "--address", address, "--json", "--temperature", "0", *arguments)
    out, err = await asyncio.wait_for(process.communicate(), 120)
    assert (process.returncode, err) == (0, b"")
    answer: dict[str, Any] = json.loads(out)
    return answer


async def test_up_serves_until_ctrl_c() -> None:
    up = await command("up", "--port", "20123", "--device", "cpu")
    assert up.stderr is not None
    log = b""
    while b"Ctrl-C" not in log:
        line = await asyncio.wait_for(up.stderr.readline(), 120)
        assert line, f"up ended: {log.decode()}"
        log += line
    address = re.search(rb"serving on (\S+),", log)
    assert address is not None
    assert address[1] == b"127.0.0.1:20123"
    prompt = heldout_prompt()
    drafted = await generate("localhost:20123", "--max-tokens", "48", prompt)
    plain = await generate("localhost:20123", "--max-tokens", "48", "--no-speculation", prompt)
    assert drafted["token_ids"] == plain["token_ids"]
    assert drafted["text"] == plain["text"]
    assert 0 < drafted["speculation"]["accepted"] < drafted["speculation"]["drafted"]
    assert drafted["speculation"]["steps"] < 48
    assert plain["speculation"]["drafted"] == 0
    assert plain["speculation"]["fallbacks"][0]["reason"] == "CLIENT_DISABLED"
    children = [int(pid) for pid in Path(f"/proc/{up.pid}/task/{up.pid}/children").read_text().split()]
    assert len(children) == 3
    up.send_signal(signal.SIGINT)
    await asyncio.wait_for(up.communicate(), 60)
    assert up.returncode == 0
    for pid in children:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_a_drafter_that_is_killed_costs_speed_and_comes_back() -> None:
    reports: list[Report] = []
    options = Options(bundled_model("target"), bundled_model("draft"), device="cpu", drain_seconds=1.0)
    prompt = heldout_prompt()
    async with LocalCluster(options, reports.append) as cluster, AsyncClient(cluster.address) as client:
        expected = await client.generate(prompt, max_tokens=200, temperature=0, ignore_eos=True, speculation=False)
        reports.clear()
        token_ids: list[int] = []
        async for event in client.stream(prompt, max_tokens=200, temperature=0, ignore_eos=True):
            if isinstance(event, Chunk):
                if not token_ids:
                    cluster.drafter.kill()
                token_ids += [token.id for token in event.tokens]
        assert isinstance(event, Finished)
        assert tuple(token_ids) == expected.token_ids
        assert [item.reason for item in event.speculation.fallbacks] == [FallbackReason.DRAFTER_LOST]
        while ServiceState.SERVING not in [report.state for report in reports]:
            await asyncio.sleep(0.1)
        while not (await client.model()).drafters[0].is_ready:
            await asyncio.sleep(0.1)
        again = await client.generate(prompt, max_tokens=32, temperature=0, ignore_eos=True)
        assert again.speculation.num_accepted_tokens > 0
        assert again.token_ids == expected.token_ids[:32]


async def test_prompt_lookup_needs_no_draft_model() -> None:
    options = Options(bundled_model("target"), drafter="ngram", device="cpu", drain_seconds=1.0)
    async with LocalCluster(options) as cluster, AsyncClient(cluster.address) as client:
        completion = await client.generate(heldout_prompt(), max_tokens=64, temperature=0, ignore_eos=True)
        assert completion.speculation.num_accepted_tokens > 0
        assert not completion.speculation.fallbacks
