"""Typed clients of the gateway, for asyncio (`AsyncClient`) and for plain code (`Client`).

    with Client("localhost:50051") as client:
        print(client.generate("def main():", max_tokens=64, temperature=0).text)

Both speak `outrider.v1.GenerationService`, send the current OpenTelemetry trace context along, raise the errors of
`outrider.errors`, and let gRPC retry a call that nothing has come back for.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Iterable
from types import TracebackType
from typing import Self, Unpack

import grpc
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from outrider.completion import (
    Adjustment,
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
from outrider.connection import Tls, authorization, channel_options
from outrider.errors import (
    ClientError,
    DeadlineExceededError,
    FieldViolation,
    InvalidRequestError,
    OverloadedError,
    UnauthenticatedError,
    UnavailableError,
    from_rpc_error,
)
from outrider.protocol.verification import Verification
from outrider.request import GenerateOptions, build_request
from outrider.retry import RetryPolicy
from outrider.v1 import generation_pb2, generation_pb2_grpc

__all__ = [
    "Adjustment",
    "AsyncClient",
    "Chunk",
    "Client",
    "ClientError",
    "Completion",
    "DeadlineExceededError",
    "Event",
    "Fallback",
    "FallbackReason",
    "FieldViolation",
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
    "Tls",
    "Token",
    "TokenLogprob",
    "TokenOrigin",
    "UnauthenticatedError",
    "UnavailableError",
    "Usage",
    "Verification",
]

_PROPAGATOR = TraceContextTextMapPropagator()


class AsyncClient:
    """A client for asyncio. It belongs to the event loop that it was made on; use it as `async with`."""

    def __init__(
        self,
        address: str = "localhost:50051",
        *,
        api_key: str | None = None,
        tls: Tls | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        """`api_key`: None takes OUTRIDER_API_KEY, an empty one none. `tls`: None is a connection without.

        Raises ValueError for a key that cannot be one, OSError for files that cannot be read.
        """
        self._authorization = authorization(api_key)
        options = channel_options(tls, retry or RetryPolicy())
        if tls is None:
            self._channel = grpc.aio.insecure_channel(address, options=options)
        else:
            self._channel = grpc.aio.secure_channel(address, tls.credentials(), options=options)
        self._stub = generation_pb2_grpc.GenerationServiceStub(self._channel)

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
        call = self._stub.Generate(request, timeout=timeout, metadata=self._metadata())
        try:
            async for response in call:
                if (event := event_from_proto(response)) is not None:
                    yield event
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        finally:
            call.cancel()

    async def model(self, *, timeout: float | None = None) -> ModelInfo:  # noqa: ASYNC109
        """The served model and its pools. Raises ClientError."""
        request = generation_pb2.GetModelRequest()
        try:
            return model_from_proto(await self._stub.GetModel(request, timeout=timeout, metadata=self._metadata()))
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return _trace_metadata() + self._authorization

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
    """A client for code without an event loop, usable from several threads; use it as `with`.

    Ctrl-C may reach gRPC's blocking calls while they hold a lock, and end in a RuntimeError or a crash in place of a
    KeyboardInterrupt; a program that must end cleanly then takes `AsyncClient`, as the command line does.
    """

    def __init__(
        self,
        address: str = "localhost:50051",
        *,
        api_key: str | None = None,
        tls: Tls | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        """`api_key`: None takes OUTRIDER_API_KEY, an empty one none. `tls`: None is a connection without.

        Raises ValueError for a key that cannot be one, OSError for files that cannot be read.
        """
        self._authorization = authorization(api_key)
        options = channel_options(tls, retry or RetryPolicy())
        if tls is None:
            self._channel = grpc.insecure_channel(address, options=options)
        else:
            self._channel = grpc.secure_channel(address, tls.credentials(), options=options)
        self._stub = generation_pb2_grpc.GenerationServiceStub(self._channel)

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
        call = self._stub.Generate(request, timeout=timeout, metadata=self._metadata())
        try:
            for response in call:
                if (event := event_from_proto(response)) is not None:
                    yield event
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        finally:
            call.cancel()  # type: ignore[no-untyped-call]

    def model(self, *, timeout: float | None = None) -> ModelInfo:
        """The served model and its pools. Raises ClientError."""
        request = generation_pb2.GetModelRequest()
        try:
            return model_from_proto(self._stub.GetModel(request, timeout=timeout, metadata=self._metadata()))
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return _trace_metadata() + self._authorization

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
