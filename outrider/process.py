"""One service of ours as a child process: start, wait until it serves, stop, read its log."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.connection import API_KEY_VARIABLE

_POLL_SECONDS = 0.1
_ROOT = Path(__file__).resolve().parent.parent


class ServiceDiedError(Exception):
    """A service ended before it served; the message holds the last lines of its log."""


class ServiceProcess:
    """One service. `start` may be called again after it ended: same address, same log file."""

    def __init__(
        self,
        name: str,
        module: str,
        address: str,
        health_address: str,
        flags: Sequence[str],
        log_path: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.address = address
        self.log_path = log_path
        self._module = module
        # Health has a port of its own, which asks nobody for a certificate.
        self._health_address = health_address
        self._arguments = ["--listen", address, "--health-listen", health_address, *flags]
        self._more_environment = dict(environment or {})
        self._process: asyncio.subprocess.Process | None = None
        self._log_start = 0

    @property
    def pid(self) -> int:
        """The process's id. Raises RuntimeError before the first start."""
        return self._started().pid

    @property
    def is_running(self) -> bool:
        """Whether the process exists."""
        return self._process is not None and self._process.returncode is None

    async def start(self, leash: int) -> None:
        """Start the process. It ends by itself when the other end of the pipe `leash` is closed."""
        command = [sys.executable, "-P", "-m", "outrider.leash", str(leash), self._module, *self._arguments]
        self._log_start = self.log_path.stat().st_size if self.log_path.exists() else 0
        with self.log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**_environment(), **self._more_environment},
                pass_fds=[leash],
                # A Ctrl-C in the terminal goes to the parent alone, which stops its children in order.
                start_new_session=True,
            )

    async def wait_until_serving(self, within_seconds: float) -> None:
        """Return once the health service says SERVING.

        Raises ServiceDiedError when the process ends first and TimeoutError when it takes too long.
        """
        deadline = time.monotonic() + within_seconds
        async with grpc.aio.insecure_channel(
            self._health_address,
            options=[
                ("grpc.initial_reconnect_backoff_ms", 100),
                ("grpc.max_reconnect_backoff_ms", 100),
                ("grpc.enable_http_proxy", 0),
            ],
        ) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            while True:
                if not self.is_running:
                    raise ServiceDiedError(self.describe_end())
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"{self.name} did not serve within {within_seconds:.0f} s; its log ends:\n{self.log_tail()}"
                    )
                with contextlib.suppress(grpc.aio.AioRpcError):
                    answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=2.0)
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return
                await asyncio.sleep(_POLL_SECONDS)

    async def wait(self) -> int:
        """The exit status, once it has ended; minus the signal's number where one ended it."""
        return await self._started().wait()

    def terminate(self) -> None:
        """Ask it to drain and end."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once, as a crash would."""
        self._signal(signal.SIGKILL)

    async def stop(self, grace_seconds: float) -> None:
        """Ask it to end; after the grace, end it. Returns when it is gone."""
        if not self.is_running:
            return
        self.terminate()
        try:
            await asyncio.wait_for(self.wait(), grace_seconds)
        except TimeoutError:
            self.kill()
            await self.wait()

    def log_tail(self, num_lines: int = 12) -> str:
        """The last lines that the process wrote since its last start."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(self._log_start, log.seek(0, os.SEEK_END) - 16_384))
                lines = log.read().decode(errors="replace").splitlines()
        except FileNotFoundError:
            return ""
        return "\n".join(lines[-num_lines:])

    def describe_end(self) -> str:
        """How it ended, with the end of its log."""
        status = self._started().returncode or 0
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"
        tail = self.log_tail()
        return f"{self.name} {how}" + (f"; its log ends:\n{tail}" if tail else " and logged nothing")

    def _started(self) -> asyncio.subprocess.Process:
        if self._process is None:
            raise RuntimeError(f"{self.name} was never started")
        return self._process

    def _signal(self, number: signal.Signals) -> None:
        if self.is_running:
            with contextlib.suppress(ProcessLookupError):
                self._started().send_signal(number)


def _environment() -> dict[str, str]:
    environment = dict(os.environ)
    # For clients alone.
    environment.pop(API_KEY_VARIABLE, None)
    if _ROOT.name not in ("site-packages", "dist-packages"):
        # A checkout that is not installed: the children find the packages where this one was found.
        path = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{_ROOT}{os.pathsep}{path}" if path else str(_ROOT)
    return environment
