"""Health, reflection and what the two programs say about bad settings."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

import drafter_service.__main__
import verifier_service.__main__
from drafter_service.drafter import Drafts
from drafter_service.ngram_drafter import NgramDrafter
from outrider.v1 import drafter_pb2, drafter_pb2_grpc, verifier_pb2
from tests.services.conftest import Pair
from tests.services.harness import (
    decode_client,
    drafter_settings,
    eventually,
    running_drafter,
    running_verifier,
    verifier_settings,
)
from tests.services.reference import prompts

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
VERIFIER, DRAFTER = "outrider.v1.VerifierService", "outrider.v1.DrafterService"


async def health(address: str, service: str = "") -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return int((await stub.Check(health_pb2.HealthCheckRequest(service=service), wait_for_ready=True)).status)


async def listed(address: str) -> set[str]:
    async def requests() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
        yield reflection_pb2.ServerReflectionRequest(list_services="")

    async with grpc.aio.insecure_channel(address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        async for response in stub.ServerReflectionInfo(requests()):
            return {service.name for service in response.list_services_response.service}
    raise AssertionError("no answer")


async def test_health_and_reflection_while_serving(pair: Pair) -> None:
    target, draft = pair
    async with (
        running_drafter(drafter_settings(model=draft)) as drafter,
        running_verifier(verifier_settings(target)) as (verifier, _),
    ):
        for address, name in ((drafter.address, DRAFTER), (verifier.address, VERIFIER)):
            assert await health(address) == await health(address, name) == SERVING
            assert {name, "grpc.health.v1.Health"} <= await listed(address)


async def test_not_serving_while_draining(pair: Pair) -> None:
    target, _ = pair
    async with (
        running_verifier(verifier_settings(target, drain_seconds=30)) as (verifier, _),
        decode_client(verifier.address) as client,
    ):
        _, result = client.open(prompts(2)[1], max_tokens=120)
        await eventually(lambda: len(result.token_ids) > 3)
        stopping = asyncio.create_task(verifier.stop())
        await asyncio.sleep(0.02)
        assert await health(verifier.address) == await health(verifier.address, VERIFIER) == NOT_SERVING
        # What is asked for, as long as it answers.
        info = await client.stub.GetInfo(verifier_pb2.VerifierServiceGetInfoRequest())
        assert info.load.num_running == 1
        await eventually(result.done.is_set)
        await stopping


class SlowToLoad(NgramDrafter):
    """Loads until it is told that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.may_load = threading.Event()

    def load(self) -> None:
        self.may_load.wait(20)

    def draft(self) -> Drafts:
        assert self.may_load.is_set()
        return super().draft()


async def test_not_serving_until_the_model_is_loaded() -> None:
    """Catches traffic that is sent to a service whose model is still on its way from the disk."""
    slow = SlowToLoad()
    settings = drafter_settings(kind="ngram", listen=f"127.0.0.1:{free_port()}")
    started = asyncio.Event()

    async def serve() -> None:
        async with running_drafter(settings, drafter=slow):
            started.set()
            await asyncio.sleep(60)

    serving = asyncio.create_task(serve())
    try:
        assert await health(settings.listen) == await health(settings.listen, DRAFTER) == NOT_SERVING
        async with grpc.aio.insecure_channel(settings.listen) as channel:
            stub = drafter_pb2_grpc.DrafterServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.GetInfo(drafter_pb2.DrafterServiceGetInfoRequest())
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
            slow.may_load.set()
            async with asyncio.timeout(10):
                await started.wait()
            assert await health(settings.listen) == await health(settings.listen, DRAFTER) == SERVING
            info = await stub.GetInfo(drafter_pb2.DrafterServiceGetInfoRequest())
            assert (info.kind, info.max_sequences) == ("ngram", 256)
    finally:
        slow.may_load.set()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def test_an_address_that_is_taken(pair: Pair) -> None:
    """Catches two services that share a port, and each other's traffic."""
    async with running_drafter(drafter_settings(kind="ngram")) as first:
        with pytest.raises(OSError, match="listen"):
            async with running_drafter(drafter_settings(kind="ngram", listen=first.address)):
                pass


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "model"),
        (("--kind", "scripted"), "script"),
        (("--kind", "scripted", "--script", "/nowhere"), "script"),
        (("--kind", "ngram", "--min-ngram", "5"), "--min-ngram"),
        (("--kind", "dice"), "kind"),
        (("--kind", "ngram", "--num-candidates", "1025"), "--num-candidates"),
        (("--model", "/nowhere"), "/nowhere"),
    ],
)
def test_bad_settings_end_the_drafter_with_2(
    arguments: tuple[str, ...], problem: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OUTRIDER_TEST_DEVICE", raising=False)
    assert drafter_service.__main__.main([*arguments, "--listen", "127.0.0.1:0"]) == 2
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "model"),
        (("--max-draft-tokens", "33"), "--max-draft-tokens"),
        (("--max-running", "100", "--max-num-batched-tokens", "64"), "--max-num-batched-tokens"),
        (("--draft-timeout-seconds", "0"), "--draft-timeout-seconds"),
    ],
)
def test_bad_settings_end_the_verifier_with_2(
    arguments: tuple[str, ...], problem: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OUTRIDER_TEST_DEVICE", raising=False)
    fixed = () if problem == "model" else ("--model", "/nowhere")
    assert verifier_service.__main__.main([*arguments, *fixed, "--listen", "127.0.0.1:0"]) == 2
    assert problem in capsys.readouterr().err


def test_a_model_that_is_not_there_ends_the_verifier_with_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a service that stays up, NOT_SERVING, for ever."""
    monkeypatch.delenv("OUTRIDER_TEST_DEVICE", raising=False)
    assert verifier_service.__main__.main(["--model", str(tmp_path), "--listen", "127.0.0.1:0"]) == 1
