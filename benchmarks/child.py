"""A benchmark as a child process: within its time, and with all that it started gone when it is over."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO


def run_child(
    command: Sequence[str],
    seconds: float,
    *,
    directory: Path | None = None,
    environment: Mapping[str, str] | None = None,
    output: IO[bytes] | None = None,
) -> int | None:
    """Run a command in a process group of its own and wait; its exit status, None where it ran out of its time.

    `output` takes what it prints; without one it goes where this process's own output goes.
    """
    process = subprocess.Popen(
        command, start_new_session=True, cwd=directory, env=environment, stdout=output, stderr=output
    )
    try:
        return process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        _end(process)
        return None
    except BaseException:
        _end(process)
        raise


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a child; services that it started end by themselves when it is gone."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        os.killpg(process.pid, number)
        try:
            process.wait(timeout=5)
            return
        except subprocess.TimeoutExpired:
            continue
