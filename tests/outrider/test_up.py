"""`outrider up` and `outrider generate` with the real services and the bundled models, as a user runs them.

What becomes of a drafter that is killed, and drafters without a model, are in tests/end_to_end.
"""

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

from outrider.bundled import heldout_prompt

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
    assert b'try it: outrider generate --address 127.0.0.1:20123 --show-speculation "def main():"' in log
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
