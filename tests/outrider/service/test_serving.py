"""The life of a service: bind, load, serve, drain, stop."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.service.health import LIVENESS
from outrider.service.serving import Phase, Registration, Server, channel_options, run
from outrider.service.settings import ServiceSettings
from outrider.v1 import generation_pb2, generation_pb2_grpc

NAME = "outrider.v1.GenerationService"


class Component(generation_pb2_grpc.GenerationServiceServicer):
    """Notes what happens; `busy` seconds of work keep it from draining."""

    def __init__(self, *, busy: float = 0.0, error: Exception | None = None) -> None:
        self.log: list[str] = []
        self._busy = busy
        self._error = error

    async def start(self) -> None:
        self.log.append("start")
        if self._error is not None:
            raise self._error

    async def drain(self) -> None:
        self.log.append("drain")
        await asyncio.sleep(self._busy)
        self.log.append("drained")

    async def stop(self) -> None:
        self.log.append("stop")

    async def GetModel(self, request: Any, context: Any) -> generation_pb2.GetModelResponse:
        raise NotImplementedError  # nobody asks

    def Generate(self, request: Any, context: Any) -> AsyncIterator[generation_pb2.GenerateResponse]:
        raise NotImplementedError


def make_server(component: Component, **fields: object) -> Server:
    settings = ServiceSettings(**fields)  # type: ignore[arg-type]
    registration = Registration(
        NAME, lambda server: generation_pb2_grpc.add_GenerationServiceServicer_to_server(component, server)
    )
    return Server(settings, component, [registration])


async def checks(address: str) -> dict[str, int]:
    """Status by name, of every name that a probe may ask for."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return {
            name: int((await stub.Check(health_pb2.HealthCheckRequest(service=name))).status)
            for name in ("", NAME, LIVENESS)
        }


async def health(address: str) -> set[int]:
    """Statuses of the names that say whether new work is welcome."""
    return {status for name, status in (await checks(address)).items() if name != LIVENESS}


async def test_start_and_stop_in_order() -> None:
    component = Component()
    server = make_server(component)
    await server.start()
    assert server.address.startswith("127.0.0.1:")
    assert not server.address.endswith(":0")
    assert await health(server.address) == {health_pb2.HealthCheckResponse.SERVING}
    await server.stop()
    assert component.log == ["start", "drain", "drained", "stop"]
    with pytest.raises(grpc.aio.AioRpcError):
        await health(server.address)


async def test_not_serving_while_draining_and_no_longer_than_allowed(caplog: pytest.LogCaptureFixture) -> None:
    """Catches a service that a stuck sequence keeps from ever ending."""
    component = Component(busy=60)
    server = make_server(component, drain_seconds=0.3)
    await server.start()
    stopping = asyncio.create_task(server.stop())
    await asyncio.sleep(0.1)
    assert await health(server.address) == {health_pb2.HealthCheckResponse.NOT_SERVING}
    async with asyncio.timeout(5):
        await stopping
    assert component.log == ["start", "drain", "stop"]
    assert "still busy" in caplog.text


async def test_the_port_for_probes_says_what_the_service_says() -> None:
    """Catches a liveness probe that would kill a service for loading or draining."""
    loaded = asyncio.Event()
    component = Component(busy=60)
    component.start = loaded.wait  # type: ignore[assignment]
    server = make_server(component, drain_seconds=0.3, health_listen="127.0.0.1:0")
    starting = asyncio.create_task(server.start())
    async with asyncio.timeout(5):
        while not server.address:
            await asyncio.sleep(0.01)
    assert server.health_address not in ("", server.address)

    async def states() -> list[dict[str, int]]:
        return [await checks(address) for address in (server.address, server.health_address)]

    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    seen = [await states()]
    loaded.set()
    await starting
    seen.append(await states())
    stopping = asyncio.create_task(server.stop())
    await asyncio.sleep(0.1)
    seen.append(await states())
    await stopping
    assert seen == [[{"": ready, NAME: ready, LIVENESS: serving}] * 2 for ready in (not_serving, serving, not_serving)]
    with pytest.raises(grpc.aio.AioRpcError):
        await checks(server.health_address)


async def test_the_port_for_probes_offers_nothing_else() -> None:
    server = make_server(Component(), health_listen="127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(server.health_address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generation_pb2_grpc.GenerationServiceStub(channel).GetModel(generation_pb2.GetModelRequest())
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert caught.value.details() == "Method not found!"
    with pytest.raises(OSError, match=f"^health_listen: cannot bind {server.health_address}"):
        await make_server(Component(), health_listen=server.health_address).start()
    await server.stop()


async def test_no_calls_before_it_has_loaded() -> None:
    component = Component(error=ValueError("no such model"))
    server = make_server(component)
    with pytest.raises(ValueError, match="no such model"):
        await server.start()
    async with grpc.aio.insecure_channel(server.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generation_pb2_grpc.GenerationServiceStub(channel).GetModel(generation_pb2.GetModelRequest())
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert await health(server.address) == {health_pb2.HealthCheckResponse.NOT_SERVING}
    await server.abandon()


async def test_an_address_that_is_taken() -> None:
    first = make_server(Component())
    await first.start()
    component = Component()
    with pytest.raises(OSError, match=f"^listen: cannot bind {first.address}"):
        await make_server(component, listen=first.address).start()
    assert component.log == []
    await first.stop()


def run_until_signal(component: Component, number: signal.Signals) -> int:
    """The exit status of a service that gets the signal soon after it has begun to serve."""
    server: Server

    def make() -> Server:
        nonlocal server
        server = make_server(component)
        asyncio.get_running_loop().create_task(send_signal())
        return server

    async def send_signal() -> None:
        while server.phase is Phase.LOADING:  # there is no event for it
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        os.kill(os.getpid(), number)

    return run(make)


@pytest.fixture(autouse=True)
def unfrozen() -> Iterator[None]:
    """`run` takes what exists out of garbage collections, which only the end of a process should outlast."""
    yield
    gc.unfreeze()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_process_in_order(number: signal.Signals) -> None:
    component = Component()
    assert run_until_signal(component, number) == 0
    assert component.log == ["start", "drain", "drained", "stop"]


def test_what_start_up_made_is_left_out_of_garbage_collections() -> None:
    """Catches collections that go through a whole loaded model while every sequence waits."""
    component = Component()
    found: list[int] = []

    async def drain() -> None:
        found.append(gc.get_freeze_count())

    component.drain = drain  # type: ignore[method-assign]
    assert run_until_signal(component, signal.SIGTERM) == 0
    assert found[0] > 1000


def test_a_signal_while_loading_ends_the_process_at_once() -> None:
    component = Component()

    async def load_for_ever() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(60)

    component.start = load_for_ever  # type: ignore[method-assign]
    assert run(lambda: make_server(component)) == 0
    assert component.log == []


def test_a_service_that_cannot_start_ends_with_1(caplog: pytest.LogCaptureFixture) -> None:
    assert run(lambda: make_server(Component(error=ValueError("no such model")))) == 1
    assert "no such model" in caplog.text


def test_both_ends_agree_on_pings() -> None:
    """Catches a client that pings more often than its server allows: such a connection is closed again and again."""
    client, server = dict(channel_options(1 << 20)), dict(channel_options(1 << 20, server=True))
    assert int(client["grpc.keepalive_time_ms"]) > int(server["grpc.http2.min_ping_interval_without_data_ms"])
    assert server["grpc.so_reuseport"] == 0
    assert client["grpc.max_receive_message_length"] == server["grpc.max_send_message_length"] == 1 << 20
