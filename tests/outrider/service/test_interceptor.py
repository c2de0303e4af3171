"""Errors of handlers become statuses, in one place, for every kind of method."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from outrider.protocol.errors import (
    InvalidArgumentError,
    NotFoundError,
    OutriderError,
    Reason,
    ResourceExhaustedError,
    UnavailableError,
    Violation,
)
from outrider.service.interceptor import ErrorInterceptor
from outrider.v1 import generation_pb2, generation_pb2_grpc, verifier_pb2, verifier_pb2_grpc

Fail = Callable[[], None]


class Generation(generation_pb2_grpc.GenerationServiceServicer):
    """One response, then `fail`."""

    def __init__(self, fail: Fail) -> None:
        self._fail = fail
        self.num_cleaned_up = 0

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[generation_pb2.GenerateResponse]:
        try:
            yield generation_pb2.GenerateResponse()
            self._fail()
            yield generation_pb2.GenerateResponse()
        finally:
            self.num_cleaned_up += 1

    async def GetModel(self, request: Any, context: Any) -> generation_pb2.GetModelResponse:
        self._fail()
        return generation_pb2.GetModelResponse(name="a model")


class Verifier(verifier_pb2_grpc.VerifierServiceServicer):
    """Answers every frame, and `fail`s at the first."""

    def __init__(self, fail: Fail) -> None:
        self._fail = fail

    async def GetInfo(self, request: Any, context: Any) -> verifier_pb2.VerifierServiceGetInfoResponse:
        raise NotImplementedError  # nobody asks

    async def Decode(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[verifier_pb2.DecodeResponse]:
        async for _ in requests:
            self._fail()
            yield verifier_pb2.DecodeResponse()


def nothing() -> None:
    pass


@asynccontextmanager
async def channel_to(fail: Fail, gate: Fail = nothing) -> AsyncIterator[tuple[grpc.aio.Channel, Generation]]:
    server = grpc.aio.server(interceptors=[ErrorInterceptor(lambda context: gate())])
    generation = Generation(fail)
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(generation, server)
    verifier_pb2_grpc.add_VerifierServiceServicer_to_server(Verifier(fail), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel, generation
    await server.stop(grace=None)


async def call_all(channel: grpc.aio.Channel) -> list[grpc.aio.AioRpcError]:
    """What a unary call, a stream of responses and a stream both ways end with."""
    generation = generation_pb2_grpc.GenerationServiceStub(channel)
    verifier = verifier_pb2_grpc.VerifierServiceStub(channel)
    errors = []
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generation.GetModel(generation_pb2.GetModelRequest())
    errors.append(caught.value)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in generation.Generate(generation_pb2.GenerateRequest()):
            pass
    errors.append(caught.value)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in verifier.Decode(iter([verifier_pb2.DecodeRequest()])):
            pass
    errors.append(caught.value)
    return errors


def trailers(error: grpc.aio.AioRpcError) -> dict[str, Any]:
    return dict(error.trailing_metadata())  # type: ignore[arg-type]  # pairs, which the stubs do not know


def raising(error: Exception) -> Fail:
    def fail() -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    "error",
    [NotFoundError("gone"), UnavailableError("later"), ResourceExhaustedError("full")],
    ids=lambda error: type(error).__name__,
)
async def test_our_errors_keep_their_status_and_message(error: OutriderError) -> None:
    async with channel_to(raising(error)) as (channel, generation):
        for found in await call_all(channel):
            assert (found.code(), found.details()) == (error.code, error.message)
            status = rpc_status.from_call(found)  # type: ignore[arg-type]
            assert status is None or not status.details
            assert "grpc-retry-pushback-ms" not in trailers(found)
        assert generation.num_cleaned_up == 1


async def test_a_retry_delay_travels_as_retry_info_and_for_grpcs_own_retries() -> None:
    async with channel_to(raising(ResourceExhaustedError("full", retry_delay_seconds=1.25))) as (channel, _):
        pushbacks = []
        for found in await call_all(channel):
            (detail,) = rpc_status.from_call(found).details  # type: ignore[arg-type]
            info = error_details_pb2.RetryInfo()
            assert detail.Unpack(info)
            assert info.retry_delay.ToTimedelta().total_seconds() == 1.25
            pushbacks.append(int(trailers(found)["grpc-retry-pushback-ms"]))
        assert all(1000 <= pushback <= 1501 for pushback in pushbacks)
        assert len(set(pushbacks)) > 1, "clients that were refused at once would all come back at once"


async def test_bad_fields_travel_as_a_bad_request_with_a_reason() -> None:
    """Catches a client that has to read sentences to learn what was wrong."""
    violations = [Violation("top_p", "is 7"), Violation("tools", "x" * 900, Reason.NOT_SUPPORTED)]
    async with channel_to(raising(InvalidArgumentError.of(violations))) as (channel, _):
        for found in await call_all(channel):
            assert found.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert str(found.details()).startswith("top_p: is 7; tools: xxx")
            details = rpc_status.from_call(found).details  # type: ignore[arg-type]
            info, bad_request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
            assert details[0].Unpack(info)
            assert details[1].Unpack(bad_request)
            assert (info.reason, info.domain) == ("INVALID_VALUE", "outrider")
            first, second = bad_request.field_violations
            assert (first.field, first.description, first.reason) == ("top_p", "is 7", "INVALID_VALUE")
            assert (second.field, second.reason) == ("tools", "NOT_SUPPORTED")
            # What quotes a client's own words must not outgrow the trailers.
            assert 100 < len(second.description) < 200


async def test_anything_else_is_a_bug_whose_text_stays_here(caplog: pytest.LogCaptureFixture) -> None:
    async with channel_to(raising(KeyError("the secret"))) as (channel, _):
        for found in await call_all(channel):
            assert found.code() == grpc.StatusCode.INTERNAL
            assert "secret" not in str(found.details())
    assert "the secret" in caplog.text


@pytest.mark.parametrize(
    "method", ["GenerationService/GetModel", "GenerationService/Generate", "VerifierService/Decode"]
)
async def test_bytes_that_are_no_message(method: str) -> None:
    """Catches gRPC's own answer to such bytes, which is INTERNAL, or none at all on a stream."""
    async with channel_to(nothing) as (channel, _):
        path = f"/outrider.v1.{method}"

        async def call() -> None:
            if method.endswith("GetModel"):
                await channel.unary_unary(path, None, None)(b"\xff\xff")
            elif method.endswith("Generate"):
                async for _ in channel.unary_stream(path, None, None)(b"\xff\xff"):
                    pass
            else:
                async for _ in channel.stream_stream(path, None, None)(iter([b"", b"\xff\xff"])):
                    pass

        with pytest.raises(grpc.aio.AioRpcError, match="not a message") as caught:
            await call()
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        # The service has not noticed.
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        assert (await stub.GetModel(generation_pb2.GetModelRequest())).name == "a model"


async def test_a_gate_refuses_every_call() -> None:
    async with channel_to(nothing, gate=raising(UnavailableError("loading"))) as (channel, generation):
        assert {error.details() for error in await call_all(channel)} == {"loading"}
        assert generation.num_cleaned_up == 0


async def test_a_cancelled_stream_cleans_up_at_once() -> None:
    """Catches a sequence that goes on until the garbage collector finds its generator."""
    async with channel_to(nothing) as (channel, generation):
        call = generation_pb2_grpc.GenerationServiceStub(channel).Generate(generation_pb2.GenerateRequest())
        await call.read()
        call.cancel()
        await channel.close(None)
    assert generation.num_cleaned_up == 1
