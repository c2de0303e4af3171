"""Counts the bytes of gRPC messages where they are made and read, which costs no serializing of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import grpc

from outrider.service.instruments import Counter
from outrider.service.interceptor import OurMethodsInterceptor


class WireInterceptor(OurMethodsInterceptor):
    """Counts what a server receives from `peer` and sends to it, by our own methods."""

    def __init__(self, wire_bytes: Counter, peer: str) -> None:
        self._wire_bytes = wire_bytes
        self._peer = peer

    def wrapped(self, handler: Any) -> Any:
        """The handler, whose messages are counted."""
        make, call = next(
            (make, call)
            for make, call in (
                (grpc.unary_unary_rpc_method_handler, handler.unary_unary),
                (grpc.unary_stream_rpc_method_handler, handler.unary_stream),
                (grpc.stream_unary_rpc_method_handler, handler.stream_unary),
                (grpc.stream_stream_rpc_method_handler, handler.stream_stream),
            )
            if call is not None
        )
        return make(
            call,
            _received(handler.request_deserializer, self._wire_bytes, self._peer),
            _sent(handler.response_serializer, self._wire_bytes, self._peer),
        )


def counted(channel: grpc.aio.Channel, wire_bytes: Counter | None, peer: str) -> grpc.aio.Channel:
    """The channel for a generated stub, which counts what it sends to `peer` and receives, where there is a counter."""
    return channel if wire_bytes is None else cast(grpc.aio.Channel, _CountedChannel(channel, wire_bytes, peer))


class _CountedChannel:
    def __init__(self, channel: grpc.aio.Channel, wire_bytes: Counter, peer: str) -> None:
        self._channel = channel
        self._wire_bytes = wire_bytes
        self._peer = peer

    def __getattr__(self, kind: str) -> Callable[..., Any]:
        """`unary_unary` and its like."""
        make = getattr(self._channel, kind)

        def counted(
            method: str,
            request_serializer: Callable[[Any], bytes],
            response_deserializer: Callable[[bytes], Any],
            **options: Any,
        ) -> Any:
            return make(
                method,
                request_serializer=_sent(request_serializer, self._wire_bytes, self._peer),
                response_deserializer=_received(response_deserializer, self._wire_bytes, self._peer),
                **options,
            )

        return counted


def _sent(serialize: Callable[[Any], bytes], wire_bytes: Counter, peer: str) -> Callable[[Any], bytes]:
    """A serializer that counts."""

    def counting(message: Any) -> bytes:
        data = serialize(message)
        wire_bytes.add(len(data), peer, "sent")
        return data

    return counting


def _received(parse: Callable[[bytes], Any], wire_bytes: Counter, peer: str) -> Callable[[bytes], Any]:
    """A parser that counts."""

    def counting(data: bytes) -> Any:
        wire_bytes.add(len(data), peer, "received")
        return parse(data)

    return counting
