"""All three services on this machine, each in a process of its own: what `outrider up` and the tests run.

async with LocalCluster(Options(target=..., draft=...)) as cluster:
    async with AsyncClient(cluster.address) as client:
        ...
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from outrider import dashboard
from outrider.client import AsyncClient, ClientError
from outrider.front_door import FrontDoor
from outrider.process import ServiceDiedError, ServiceProcess

DrafterKind = Literal["model", "ngram", "scripted", "none"]

# Below the range that the kernel draws outgoing ports from: a service that restarts finds its port free, and a client
# that dials a dead one cannot be connected to itself.
_PORTS = range(20_000, 32_000)
_MODULES = {"gateway": "gateway", "verifier": "verifier_service", "drafter": "drafter_service"}
_RESTART_DELAYS = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_STABLE_SECONDS = 60.0
# Beyond draining: closing connections, freeing a GPU.
_STOP_SECONDS = 5.0
_LINK_SECONDS = 10.0


class StartError(Exception):
    """The services cannot be started; the message is for the user."""


class ServiceState(Enum):
    """What a report says about a service."""

    LOADING = auto()
    SERVING = auto()
    LOST = auto()
    RESTARTING = auto()
    STOPPING = auto()
    STOPPED = auto()


@dataclass(frozen=True)
class Report:
    """One change in the life of a service."""

    service: str
    state: ServiceState
    message: str = ""


@dataclass(frozen=True)
class Options:
    """What to run. Flags go to the services as they are, behind those that the cluster sets."""

    target: Path
    draft: Path | None = None
    drafter: DrafterKind = "model"
    script: str = ""
    host: str = "127.0.0.1"
    port: int = 0
    """The gateway's; 0 takes a free one."""
    http_port: int | None = None
    """The gateway's for HTTP, where it serves the dashboard as well; 0 takes a free one, None is no HTTP."""
    front_door: FrontDoor = field(default_factory=FrontDoor)
    """Of the gateway, gRPC and HTTP alike; verifier and drafter can be reached from this machine alone."""
    device: str = "auto"
    dtype: str = "auto"
    max_draft_tokens: int | None = None
    model_name: str | None = None
    drain_seconds: float = 10.0
    log_level: str = "INFO"
    log_format: str = "text"
    start_seconds: float = 900.0
    log_directory: Path | None = None
    """None: a temporary one, deleted after an orderly end."""
    restart: bool = True
    """Whether a drafter or verifier that dies is started again."""
    gateway_flags: tuple[str, ...] = ()
    verifier_flags: tuple[str, ...] = ()
    drafter_flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Devices:
    """What each model runs on; `is_shared`: on one GPU, whose memory they split."""

    verifier: str
    drafter: str
    is_shared: bool = False


class LocalCluster:
    """Gateway, verifier and drafter; `on_report` hears of each change. The children end when this process does."""

    def __init__(self, options: Options, on_report: Callable[[Report], None] = lambda report: None) -> None:
        self.options = options
        self._on_report = on_report
        self.devices = Devices("cpu", "cpu")
        self._directory = options.log_directory
        self._supervisors: list[asyncio.Task[None]] = []
        self._gateway_ended = asyncio.Event()
        self._leash: tuple[int, int] | None = None
        self._http_address = ""
        self._environment: dict[str, str] = {}
        self._health_ports: list[int] = []
        self._gateway: ServiceProcess | None = None
        self._verifier: ServiceProcess | None = None
        self._drafter: ServiceProcess | None = None

    @property
    def address(self) -> str:
        """Where clients find the gateway."""
        return self.gateway.address

    @property
    def http_address(self) -> str:
        """Where the gateway serves HTTP. Raises RuntimeError in a cluster without."""
        if not self._http_address:
            raise RuntimeError("the cluster serves no HTTP, or was not started")
        return self._http_address

    @property
    def gateway(self) -> ServiceProcess:
        """The gateway's process."""
        return _made(self._gateway)

    @property
    def verifier(self) -> ServiceProcess:
        """The verifier's process."""
        return _made(self._verifier)

    @property
    def drafter(self) -> ServiceProcess:
        """The drafter's process. Raises RuntimeError in a cluster without one."""
        return _made(self._drafter)

    @property
    def log_directory(self) -> Path:
        """Where each service's log lies, NAME.log."""
        if self._directory is None:
            raise RuntimeError("the cluster was not started")
        return self._directory

    async def start(self) -> None:
        """Start everything and return when the gateway serves.

        Raises StartError when logs cannot be written, a port is taken, a service dies before it serves, or one takes
        too long.
        """
        self._make_log_directory()
        self._leash = os.pipe()
        try:
            self.devices = await _devices(self.options.device)
            self._make_processes(self.devices)
            # Both load their models at the same time; the gateway asks them what they are.
            first = [process for process in (self._verifier, self._drafter) if process is not None]
            await self._bring_up(*first)
            await self._bring_up(self.gateway)
        except BaseException:
            await self.stop(drain=False)
            raise
        self._supervisors = [asyncio.create_task(self._supervise(process)) for process in (*first, self.gateway)]
        if self._drafter is not None:
            await self._wait_for_link()

    def _make_log_directory(self) -> None:
        if self.options.log_directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix="outrider-"))
            return
        try:
            self.options.log_directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StartError(f"cannot write logs to {self.options.log_directory}: {error.strerror}") from error

    async def wait(self) -> None:
        """Return when the gateway has ended without having been told to."""
        await self._gateway_ended.wait()

    async def stop(self, *, drain: bool = True) -> None:
        """End everything: the gateway first, so that its requests can finish, then the others.

        Without `drain`, for an end that was not wanted, requests are cut off and a temporary log directory is kept.
        """
        for supervisor in self._supervisors:
            supervisor.cancel()
        await asyncio.gather(*self._supervisors, return_exceptions=True)
        grace = self.options.drain_seconds + _STOP_SECONDS if drain else 1.0
        if self._gateway is not None:
            await self._stop_one(self._gateway, grace)
        rest = [process for process in (self._verifier, self._drafter) if process is not None]
        await asyncio.gather(*(self._stop_one(process, grace) for process in rest))
        if self._leash is not None:
            for fd in self._leash:
                os.close(fd)
            self._leash = None
        if self.options.log_directory is None and self._directory is not None:
            if drain:
                shutil.rmtree(self._directory, ignore_errors=True)
            else:
                with suppress(OSError):
                    # Only where nothing was logged.
                    self._directory.rmdir()

    def kill(self) -> None:
        """End everything at once; for a user who asks a second time."""
        for process in (self._gateway, self._verifier, self._drafter):
            if process is not None:
                process.kill()

    async def restart_drafter(self) -> None:
        """Start a drafter that died, where `Options.restart` is off. Returns when it serves."""
        await self._bring_up(self.drafter)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop(drain=kind is None)

    def _make_processes(self, devices: Devices) -> None:
        options = self.options
        common = ["--log-level", options.log_level, "--log-format", options.log_format]
        common += ["--drain-seconds", str(options.drain_seconds)]
        gateway_port, http_port, verifier_port, drafter_port, otlp_port, *self._health_ports = _free_ports(
            (options.host, options.port), (options.host, options.http_port or 0), *[("127.0.0.1", 0)] * 6
        )
        verifier_address, drafter_address = f"127.0.0.1:{verifier_port}", f"127.0.0.1:{drafter_port}"
        loaded = ["--dtype", options.dtype]
        verifier_flags = [*common, *loaded, "--model", str(options.target), "--device", devices.verifier]
        if options.max_draft_tokens is not None:
            verifier_flags += ["--max-draft-tokens", str(options.max_draft_tokens)]
        gateway_flags = [*common, "--verifiers", verifier_address, *options.front_door.flags()]
        if (options.target / "tokenizer.json").exists():
            gateway_flags += ["--tokenizer", str(options.target)]
        if options.model_name is not None:
            gateway_flags += ["--model-name", options.model_name]
        if options.http_port is not None:
            self._http_address = f"{options.host}:{http_port}"
            takes_traces = dashboard.wants_traces(os.environ)
            gateway_flags += ["--http-listen", self._http_address]
            gateway_flags += dashboard.gateway_flags(options.host, otlp_port if takes_traces else None)
            self._environment = dashboard.trace_environment(otlp_port) if takes_traces else {}
        if options.drafter != "none":
            gateway_flags += ["--drafters", drafter_address]
            drafter_flags = [*common, "--kind", options.drafter]
            if options.drafter == "model":
                drafter_flags += [*loaded, "--model", str(options.draft), "--device", devices.drafter]
                if devices.is_shared:
                    verifier_flags += ["--memory-fraction", "0.8"]
                    drafter_flags += ["--memory-fraction", "0.1"]
                if options.max_draft_tokens is not None:
                    drafter_flags += ["--graph-draft-tokens", str(options.max_draft_tokens)]
            if options.drafter == "scripted":
                drafter_flags += ["--script", options.script]
            drafter_flags += options.drafter_flags
            self._drafter = self._process("drafter", drafter_address, drafter_flags)
        verifier_flags += options.verifier_flags
        gateway_flags += options.gateway_flags
        self._verifier = self._process("verifier", verifier_address, verifier_flags)
        self._gateway = self._process("gateway", f"{options.host}:{gateway_port}", gateway_flags)

    def _process(self, name: str, address: str, flags: list[str]) -> ServiceProcess:
        log_path = self.log_directory / f"{name}.log"
        health_address = f"127.0.0.1:{self._health_ports.pop()}"
        return ServiceProcess(name, _MODULES[name], address, health_address, flags, log_path, self._environment)

    async def _bring_up(self, *processes: ServiceProcess) -> None:
        tasks = [asyncio.create_task(self._start_one(process)) for process in processes]
        try:
            await asyncio.gather(*tasks)
        except (ServiceDiedError, TimeoutError) as error:
            raise StartError(f"{error}\n(logs in {self.log_directory})") from error
        except OSError as error:
            raise StartError(f"cannot write logs to {self.log_directory}: {error.strerror}") from error
        finally:
            for task in tasks:
                task.cancel()

    async def _start_one(self, process: ServiceProcess) -> None:
        if self._leash is None:
            raise RuntimeError("the cluster was not started")
        start = time.monotonic()
        self._report(process, ServiceState.LOADING)
        await process.start(self._leash[0])
        await process.wait_until_serving(self.options.start_seconds)
        self._report(process, ServiceState.SERVING, f"{process.address}, ready in {time.monotonic() - start:.1f} s")

    async def _supervise(self, process: ServiceProcess) -> None:
        num_deaths = 0
        while True:
            start = time.monotonic()
            await process.wait()
            self._report(process, ServiceState.LOST, process.describe_end())
            if process is self._gateway:
                self._gateway_ended.set()
                return
            if not self.options.restart:
                return
            num_deaths = 1 if time.monotonic() - start > _STABLE_SECONDS else num_deaths + 1
            delay = _RESTART_DELAYS[min(num_deaths, len(_RESTART_DELAYS)) - 1]
            self._report(process, ServiceState.RESTARTING, f"in {delay:g} s")
            await asyncio.sleep(delay)
            try:
                await self._start_one(process)
            except ServiceDiedError:
                # The next turn of the loop sees the end of the process and reports it.
                continue
            except TimeoutError:
                process.kill()

    async def _stop_one(self, process: ServiceProcess, grace_seconds: float) -> None:
        if process.is_running:
            self._report(process, ServiceState.STOPPING)
            await process.stop(grace_seconds)
            self._report(process, ServiceState.STOPPED)

    async def _wait_for_link(self) -> None:
        if self.options.front_door != FrontDoor():
            # Nobody told us how to get in. The gateway itself has waited for a drafter, if not for long.
            return
        # The gateway serves before the verifier has shaken hands with the drafter; the first request should not
        # have to do without.
        deadline = time.monotonic() + _LINK_SECONDS
        detail = ""
        async with AsyncClient(self.address) as client:
            while time.monotonic() < deadline:
                try:
                    drafters = (await client.model(timeout=2.0)).drafters
                except ClientError:
                    # It asks for a key or a certificate, perhaps by a variable of its own.
                    return
                if any(drafter.is_ready for drafter in drafters):
                    return
                detail = next((drafter.detail for drafter in drafters), "")
                await asyncio.sleep(0.1)
        self._report(self.drafter, ServiceState.LOST, f"not used by the verifier: {detail or 'no connection yet'}")

    def _report(self, process: ServiceProcess, state: ServiceState, message: str = "") -> None:
        self._on_report(Report(process.name, state, message))


async def _devices(wanted: str) -> Devices:
    if wanted != "auto":
        return Devices(wanted, wanted, is_shared=wanted.startswith("cuda"))
    match await _num_gpus():
        case 0:
            return Devices("cpu", "cpu")
        case 1:
            return Devices("cuda:0", "cuda:0", is_shared=True)
        case _:
            return Devices("cuda:0", "cuda:1")


async def _num_gpus() -> int:
    if not any(os.path.exists(node) for node in ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")):  # noqa: ASYNC240
        return 0
    # PyTorch is the one to ask, as it is what will use them; in another process, as this one needs no CUDA context.
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "import torch; print(torch.cuda.device_count())",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    output, _ = await process.communicate()
    return int(output) if process.returncode == 0 else 0


def _free_ports(*places: tuple[str, int]) -> list[int]:
    """The port of each (host, port), a free one for 0."""
    with ExitStack() as held:
        # All are held until all are drawn, so that they differ.
        return [held.enter_context(_bound(*place)).getsockname()[1] for place in places]


def _bound(host: str, port: int = 0) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    reason: str | None = None
    for candidate in [port] if port else random.sample(_PORTS, 200):
        try:
            return socket.create_server((host.strip("[]"), candidate), family=family)
        except OSError as error:
            reason = error.strerror
    raise StartError(f"cannot listen on {host}:{port}: {reason}" if port else f"no free port on {host}: {reason}")


def _made(process: ServiceProcess | None) -> ServiceProcess:
    if process is None:
        raise RuntimeError("the cluster has no such service, or was not started")
    return process
