"""Typed clients of the gateway, for asyncio (`AsyncClient`) and for plain code (`Client`).

    with Client("localhost:50051") as client:
        print(client.generate("def main():", max_tokens=64, temperature=0).text)

Both speak `outrider.v1.GenerationService`, send the current OpenTelemetry trace context along, retry a call that no
message has come back for, and raise the errors of `outrider.errors`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Generator, Iterable
from types import TracebackType
from typing import Self, Unpack

import grpc
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from outrider.completion import (
    Chunk,
    Completion,
    CompletionBuilder,
    Event,
    Fallback,
    FallbackReason,
    Finished,
    FinishReason,
    ModelInfo,
    PoolMember,
    SpeculationStatistics,
    Started,
    Timings,
    Token,
    TokenLogprob,
    TokenOrigin,
    Usage,
    event_from_proto,
    model_from_proto,
)
from outrider.errors import (
    ClientError,
    DeadlineExceededError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
    from_rpc_error,
)
from outrider.request import GenerateOptions, Verification, build_request
from outrider.retry import Attempts, RetryPolicy
from outrider.v1 import generation_pb2, generation_pb2_grpc

__all__ = [
    "AsyncClient",
    "Chunk",
    "Client",
    "ClientError",
    "Completion",
    "DeadlineExceededError",
    "Event",
    "Fallback",
    "FallbackReason",
    "FinishReason",
    "Finished",
    "GenerateOptions",
    "InvalidRequestError",
    "ModelInfo",
    "OverloadedError",
    "PoolMember",
    "RetryPolicy",
    "SpeculationStatistics",
    "Started",
    "Timings",
    "Token",
    "TokenLogprob",
    "TokenOrigin",
    "UnavailableError",
    "Usage",
    "Verification",
]

# The keepalive finds out about a gateway that vanished without a word; servers of ours allow a ping every 15 s.
_CHANNEL_OPTIONS = [
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.max_receive_message_length", 64 << 20),
]
_PROPAGATOR = TraceContextTextMapPropagator()


class AsyncClient:
    """A client for asyncio. It belongs to the event loop that it was made on; use it as `async with`."""

    def __init__(self, address: str = "localhost:50051", *, retry: RetryPolicy | None = None) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
        self._stub = generation_pb2_grpc.GenerationServiceStub(self._channel)
        self._retry = retry or RetryPolicy()

    async def generate(
        self,
        prompt: str | None = None,
        *,
        token_ids: Iterable[int] | None = None,
        timeout: float | None = None,  # noqa: ASYNC109  # it travels to the gateway, which ends the request
        **options: Unpack[GenerateOptions],
    ) -> Completion:
        """One whole completion of `prompt` or `token_ids`, within `timeout` seconds. Raises ClientError."""
        builder = CompletionBuilder()
        async for event in self.stream(prompt, token_ids=token_ids, timeout=timeout, **options):
            builder.add(event)
        return builder.build()

    async def stream(
        self,
        prompt: str | None = None,
        *,
        token_ids: Iterable[int] | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
        **options: Unpack[GenerateOptions],
    ) -> AsyncGenerator[Event, None]:
        """The same as events while they come. Leaving the iterator early cancels the request. Raises ClientError."""
        request = build_request(prompt, token_ids, **options)
        attempts = Attempts(self._retry, timeout)
        while True:
            call = self._stub.Generate(request, timeout=attempts.remaining_seconds, metadata=_trace_metadata())
            has_answer = False
            try:
                async for response in call:
                    has_answer = True
                    if (event := event_from_proto(response)) is not None:
                        yield event
                return
            except grpc.aio.AioRpcError as error:
                failure = from_rpc_error(error)
                delay = None if has_answer else attempts.delay_after(failure)
                if delay is None:
                    raise failure from error
            finally:
                call.cancel()
            await asyncio.sleep(delay)

    async def model(self, *, timeout: float | None = None) -> ModelInfo:  # noqa: ASYNC109
        """The served model and its pools. Raises ClientError."""
        attempts = Attempts(self._retry, timeout)
        while True:
            try:
                request = generation_pb2.GetModelRequest()
                return model_from_proto(await self._stub.GetModel(request, timeout=attempts.remaining_seconds))
            except grpc.aio.AioRpcError as error:
                failure = from_rpc_error(error)
                delay = attempts.delay_after(failure)
                if delay is None:
                    raise failure from error
            await asyncio.sleep(delay)

    async def close(self) -> None:
        """Close the connection; calls that still run are cancelled."""
        await self._channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class Client:
    """A client for code without an event loop, usable from several threads; use it as `with`."""

    def __init__(self, address: str = "localhost:50051", *, retry: RetryPolicy | None = None) -> None:
        self._channel = grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)
        self._stub = generation_pb2_grpc.GenerationServiceStub(self._channel)
        self._retry = retry or RetryPolicy()

    def generate(
        self,
        prompt: str | None = None,
        *,
        token_ids: Iterable[int] | None = None,
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Completion:
        """One whole completion of `prompt` or `token_ids`, within `timeout` seconds. Raises ClientError."""
        builder = CompletionBuilder()
        for event in self.stream(prompt, token_ids=token_ids, timeout=timeout, **options):
            builder.add(event)
        return builder.build()

    def stream(
        self,
        prompt: str | None = None,
        *,
        token_ids: Iterable[int] | None = None,
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Generator[Event, None, None]:
        """The same as events while they come. Leaving the iterator early cancels the request. Raises ClientError."""
        request = build_request(prompt, token_ids, **options)
        attempts = Attempts(self._retry, timeout)
        while True:
            call = self._stub.Generate(request, timeout=attempts.remaining_seconds, metadata=_trace_metadata())
            has_answer = False
            try:
                for response in call:
                    has_answer = True
                    if (event := event_from_proto(response)) is not None:
                        yield event
                return
            except grpc.RpcError as error:
                failure = from_rpc_error(error)
                delay = None if has_answer else attempts.delay_after(failure)
                if delay is None:
                    raise failure from error
            finally:
                call.cancel()  # type: ignore[no-untyped-call]
            time.sleep(delay)

    def model(self, *, timeout: float | None = None) -> ModelInfo:
        """The served model and its pools. Raises ClientError."""
        attempts = Attempts(self._retry, timeout)
        while True:
            try:
                request = generation_pb2.GetModelRequest()
                return model_from_proto(self._stub.GetModel(request, timeout=attempts.remaining_seconds))
            except grpc.RpcError as error:
                failure = from_rpc_error(error)
                delay = attempts.delay_after(failure)
                if delay is None:
                    raise failure from error
            time.sleep(delay)

    def close(self) -> None:
        """Close the connection; calls that still run are cancelled."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _trace_metadata() -> tuple[tuple[str, str], ...]:
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier)
    return tuple(carrier.items())
