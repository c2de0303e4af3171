"""Bad input gets a clear status over the running services, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterable

import grpc
import pytest

from outrider.local import LocalCluster
from outrider.v1 import common_pb2, generation_pb2, generation_pb2_grpc, verifier_pb2, verifier_pb2_grpc

pytestmark = pytest.mark.asyncio(loop_scope="session")


def request(**fields: object) -> generation_pb2.GenerateRequest:
    """A good request with some fields replaced."""
    good: dict[str, object] = {
        "prompt": "import os\n",
        "sampling": common_pb2.SamplingParameters(temperature=0.0),
        "stopping": generation_pb2.StoppingParameters(max_tokens=4),
    }
    merged = {**good, **fields}
    return generation_pb2.GenerateRequest(**{name: value for name, value in merged.items() if value is not None})  # type: ignore[arg-type]


def sampling(**fields: float) -> common_pb2.SamplingParameters:
    return common_pb2.SamplingParameters(**fields)  # type: ignore[arg-type]


def stopping(**fields: object) -> generation_pb2.StoppingParameters:
    return generation_pb2.StoppingParameters(**fields)  # type: ignore[arg-type]


BAD = {
    "empty prompt": (request(prompt=""), "prompt"),
    "prompt over the context": (request(prompt="x = 1\n" * 2000), "prompt"),
    "max_tokens 0": (request(stopping=stopping(max_tokens=0)), "stopping.max_tokens"),
    "temperature -1": (request(sampling=sampling(temperature=-1.0)), "sampling.temperature"),
    "temperature NaN": (request(sampling=sampling(temperature=math.nan)), "sampling.temperature"),
    "top_p 1.5": (request(sampling=sampling(top_p=1.5)), "sampling.top_p"),
    "unknown token id": (request(prompt=None, token_ids=generation_pb2.TokenIds(ids=[1, 4096])), "token_ids"),
    "33 draft tokens": (
        request(speculation=generation_pb2.SpeculationParameters(max_draft_tokens=33)),
        "speculation.max_draft_tokens",
    ),
    "10,000 stop strings": (request(stopping=stopping(stop=["x"] * 10_000)), "stopping.stop"),
    "neither prompt nor token_ids": (request(prompt=None), "prompt"),
}


async def serves(cluster: LocalCluster) -> None:
    """Fails unless a good request still works."""
    async with grpc.aio.insecure_channel(cluster.address) as channel:
        responses = [
            response async for response in generation_pb2_grpc.GenerationServiceStub(channel).Generate(request())
        ]
    assert responses[-1].finished.usage.num_output_tokens == 4


@pytest.mark.parametrize("name", BAD)
async def test_bad_requests_are_refused_by_name(cluster: LocalCluster, name: str) -> None:
    """Catches input that crashes a service, is corrected in silence, or is refused without saying why."""
    bad, field = BAD[name]
    async with grpc.aio.insecure_channel(cluster.address) as channel:
        call = generation_pb2_grpc.GenerationServiceStub(channel).Generate(bad)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field in (caught.value.details() or "")
    await serves(cluster)


async def test_a_prompt_over_the_context_is_told_both_numbers(cluster: LocalCluster) -> None:
    bad = request(prompt=None, token_ids=generation_pb2.TokenIds(ids=[7] * 2500))
    async with grpc.aio.insecure_channel(cluster.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generation_pb2_grpc.GenerationServiceStub(channel).Generate(bad).read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "2500" in (caught.value.details() or "").replace(",", "")
    assert "2048" in (caught.value.details() or "").replace(",", "")


async def test_bytes_that_are_no_message_are_refused(cluster: LocalCluster) -> None:
    """Catches a parser's error that ends a stream without a status, or a service with it."""
    places = {
        (cluster.address, "/outrider.v1.GenerationService/Generate"): False,
        (cluster.verifier.address, "/outrider.v1.VerifierService/Decode"): True,
        (cluster.drafter.address, "/outrider.v1.DrafterService/Draft"): True,
    }
    for (address, method), is_stream in places.items():
        async with grpc.aio.insecure_channel(address) as channel:
            responses: AsyncIterable[bytes]
            if is_stream:
                responses = channel.stream_stream(method, None, None)(iter([b"\xff\xff\xff"]))
            else:
                responses = channel.unary_stream(method, None, None)(b"\xff\xff\xff")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                _ = [response async for response in responses]
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, method
    await serves(cluster)


async def free_blocks(cluster: LocalCluster) -> tuple[int, int, int]:
    """KV blocks (free, in all) and sequences of the verifier."""
    async with grpc.aio.insecure_channel(cluster.verifier.address) as channel:
        info = await verifier_pb2_grpc.VerifierServiceStub(channel).GetInfo(
            verifier_pb2.VerifierServiceGetInfoRequest()
        )
    return info.load.num_free_kv_blocks, info.load.num_kv_blocks, info.load.num_running + info.load.num_waiting


async def everything_is_free(cluster: LocalCluster) -> None:
    async with asyncio.timeout(10):
        while True:
            free, total, num_sequences = await free_blocks(cluster)
            if free == total and num_sequences == 0:
                return
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("how", ["cancelled", "out of time"])
async def test_a_request_that_is_given_up_frees_its_blocks(cluster: LocalCluster, how: str) -> None:
    """Catches a sequence that goes on for a client who has left."""
    endless = request(stopping=stopping(max_tokens=1900, ignore_eos=True))
    async with grpc.aio.insecure_channel(cluster.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        call = stub.Generate(endless, timeout=4.0 if how == "out of time" else None)
        for _ in range(3):
            await call.read()
        free, total, num_sequences = await free_blocks(cluster)
        assert free < total
        assert num_sequences == 1
        if how == "cancelled":
            call.cancel()
            assert await call.code() is grpc.StatusCode.CANCELLED
        else:
            assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await everything_is_free(cluster)
    await serves(cluster)


async def test_no_service_logged_a_traceback(cluster: LocalCluster) -> None:
    """Runs last: everything above was the clients' doing, and none of it is an error of ours."""
    for name in ("gateway", "verifier", "drafter"):
        assert "Traceback" not in (cluster.log_directory / f"{name}.log").read_text(), name
