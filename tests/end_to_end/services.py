"""More services beside those of the shared cluster: a gateway with other flags, another drafter."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

from outrider.bundled import bundled_model
from outrider.process import ServiceProcess
from tests.service_device import DRAFTER_FLAGS, SERVICE_DEVICE

START_SECONDS = 120.0
COMMON_FLAGS = ("--drain-seconds", "2")


def free_addresses(number: int) -> list[str]:
    """So many host:port of this machine that nobody listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    addresses = [f"127.0.0.1:{found.getsockname()[1]}" for found in sockets]
    for found in sockets:
        found.close()
    return addresses


@asynccontextmanager
async def running_service(name: str, module: str, flags: Sequence[str], logs: Path) -> AsyncIterator[ServiceProcess]:
    """A service as a process of its own, once it serves; drained and ended afterwards."""
    logs.mkdir(exist_ok=True)
    address, health = free_addresses(2)
    process = ServiceProcess(name, module, address, health, [*COMMON_FLAGS, *flags], logs / f"{name}.log")
    ours, theirs = os.pipe()
    try:
        await process.start(ours)
        await process.wait_until_serving(START_SECONDS)
        yield process
    finally:
        await asyncio.shield(process.stop(10.0))
        os.close(ours)
        os.close(theirs)


def running_gateway(
    verifier: str, logs: Path, *flags: str, drafter: str | None = None
) -> AbstractAsyncContextManager[ServiceProcess]:
    """A gateway of its own for a verifier and perhaps a drafter that others use as well."""
    # Before it serves, the verifier has shaken hands with the drafter.
    drafters = ("--drafters", drafter, "--drafter-wait-seconds", "60") if drafter else ()
    tokenizer = ("--tokenizer", str(bundled_model("target")))
    return running_service("gateway", "gateway", ["--verifiers", verifier, *drafters, *tokenizer, *flags], logs)


def running_drafter(logs: Path, *flags: str) -> AbstractAsyncContextManager[ServiceProcess]:
    """A drafter without a model."""
    return running_service("drafter", "drafter_service", flags, logs)


def running_model_drafter(logs: Path, model: Path) -> AbstractAsyncContextManager[ServiceProcess]:
    """A drafter with a model."""
    flags = ("--model", str(model), "--device", SERVICE_DEVICE, "--dtype", "float32", *DRAFTER_FLAGS)
    return running_drafter(logs, *flags)
