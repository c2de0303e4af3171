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
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from outrider import dashboard
from outrider.client import AsyncClient, ClientError
from outrider.devices import Devices, find_devices
from outrider.front_door import FrontDoor
from outrider.process import ServiceDiedError, ServiceProcess
from outrider.service_flags import drafter_flags, gateway_flags, verifier_flags

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
    """Of both models, where the next two do not say otherwise."""
    target_device: str | None = None
    draft_device: str | None = None
    dtype: str = "auto"
    num_drafters: int = 1
    """All alike, each in a process of its own."""
    max_draft_tokens: int | None = None
    """Like all that follow: None takes what the services take by themselves."""
    verification: Literal["rejection", "coupled"] | None = None
    num_candidates: int | None = None
    max_running: int | None = None
    max_model_len: int | None = None
    chat_template: Path | None = None
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


class LocalCluster:
    """Gateway, verifier and drafter; `on_report` hears of each change. The children end when this process does."""

    def __init__(self, options: Options, on_report: Callable[[Report], None] = lambda report: None) -> None:
        self.options = options
        self._on_report = on_report
        self.devices = Devices("cpu")
        self._directory = options.log_directory
        self._supervisors: list[asyncio.Task[None]] = []
        self._gateway_ended = asyncio.Event()
        self._leash: tuple[int, int] | None = None
        self._http_address = ""
        self._environment: dict[str, str] = {}
        self._ports: Iterator[int] = iter(())
        self._gateway: ServiceProcess | None = None
        self._verifier: ServiceProcess | None = None
        self._drafters: list[ServiceProcess] = []
        self.metrics_addresses: dict[str, str] = {}
        """host:port of the metrics of verifier and drafters, by name; none in a cluster without HTTP."""

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
        """The first drafter's process. Raises RuntimeError in a cluster without one."""
        return _made(self._drafters[0] if self._drafters else None)

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
            options = self.options
            self.devices = await find_devices(
                options.target_device or options.device,
                options.draft_device or options.device,
                options.num_drafters if options.drafter == "model" else 0,
            )
            self._make_processes()
            # All load their models at the same time; the gateway asks them what they are.
            first = [self.verifier, *self._drafters]
            await self._bring_up(*first)
            await self._bring_up(self.gateway)
        except BaseException:
            await self.stop(drain=False)
            raise
        self._supervisors = [asyncio.create_task(self._supervise(process)) for process in (*first, self.gateway)]
        if self._drafters:
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
        rest = [process for process in (self._verifier, *self._drafters) if process is not None]
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
        for process in (self._gateway, self._verifier, *self._drafters):
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

    def _make_processes(self) -> None:
        options = self.options
        num_drafters = options.num_drafters if options.drafter != "none" else 0
        # For each service its own, one for health and one for metrics; and one that takes traces.
        num_ports = 3 * (2 + num_drafters) + 1
        gateway_port, http_port, *ports = _free_ports(
            (options.host, options.port), (options.host, options.http_port or 0), *[("127.0.0.1", 0)] * num_ports
        )
        self._ports = iter(ports)
        gateway_front = self._http_flags(http_port) if options.http_port is not None else []
        self._verifier = self._model_process("verifier", verifier_flags(options, self.devices), options.verifier_flags)
        self._drafters = [
            self._model_process(
                "drafter" if number == 0 else f"drafter-{number + 1}",
                drafter_flags(options, self.devices, number),
                options.drafter_flags,
            )
            for number in range(num_drafters)
        ]
        flags = gateway_flags(options, self._verifier.address, [drafter.address for drafter in self._drafters])
        flags += [*gateway_front, *options.gateway_flags]
        self._gateway = self._process("gateway", f"{options.host}:{gateway_port}", flags)

    def _http_flags(self, http_port: int) -> list[str]:
        self._http_address = f"{self.options.host}:{http_port}"
        otlp_port = next(self._ports) if dashboard.wants_traces(os.environ) else None
        if otlp_port is not None:
            self._environment = dashboard.trace_environment(otlp_port)
        return ["--http-listen", self._http_address, *dashboard.gateway_flags(self.options.host, otlp_port)]

    def _model_process(self, name: str, flags: Sequence[str], more_flags: Sequence[str]) -> ServiceProcess:
        metrics: list[str] = []
        if self.options.http_port is not None:
            # As the gateway has its own beside the HTTP.
            self.metrics_addresses[name] = f"127.0.0.1:{next(self._ports)}"
            metrics = ["--metrics-listen", self.metrics_addresses[name]]
        return self._process(name, f"127.0.0.1:{next(self._ports)}", [*flags, *metrics, *more_flags])

    def _process(self, name: str, address: str, flags: Sequence[str]) -> ServiceProcess:
        log_path = self.log_directory / f"{name}.log"
        health_address = f"127.0.0.1:{next(self._ports)}"
        module = _MODULES[name.partition("-")[0]]
        return ServiceProcess(name, module, address, health_address, flags, log_path, self._environment)

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
