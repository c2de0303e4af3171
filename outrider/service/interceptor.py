"""The one place where errors become gRPC statuses, for every method of every service."""

from __future__ import annotations

import logging
import math
import random
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, NoReturn

import grpc
from google.protobuf import duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from outrider.protocol.errors import InvalidArgumentError, OutriderError, Reason, Violation, code_number

logger = logging.getLogger(__name__)

OUR_METHODS = "/outrider.v1."
# Whose the reasons in an ErrorInfo are.
ERROR_DOMAIN = "outrider"
# Clients take some 8 KiB of trailers, and a request has some twenty fields.
_MAX_DESCRIPTION = 160


class _Unparseable:
    """Stands in for a request whose bytes are no message, so that the wrapper can refuse it by name."""


class OurMethodsInterceptor(grpc.aio.ServerInterceptor, ABC):  # type: ignore[type-arg]  # generic in the stubs alone
    """Wraps the handlers of our own methods, and leaves health checks and reflection as they are."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler: Any = await continuation(handler_call_details)
        method: Any = handler_call_details.method
        return self.wrapped(handler) if handler is not None and method.startswith(OUR_METHODS) else handler

    @abstractmethod
    def wrapped(self, handler: Any) -> Any:
        """The handler to call in this one's place."""


class ErrorInterceptor(OurMethodsInterceptor):
    """Turns exceptions of our handlers into statuses and refuses calls for which `gate` raises, given their context.

    An OutriderError ends the call with its own status (with a RetryInfo and gRPC's pushback where it names a delay,
    with a BadRequest and an ErrorInfo where it names fields), a message that does not parse with INVALID_ARGUMENT,
    anything else with INTERNAL and a logged traceback.
    """

    def __init__(self, gate: Callable[[Any], None]) -> None:
        self._gate = gate

    def wrapped(self, handler: Any) -> Any:
        """The handler, whose errors become statuses."""
        deserializer = _lenient(handler.request_deserializer)
        serializer = handler.response_serializer
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(self._unary(handler.unary_unary), deserializer, serializer)
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(self._stream(handler.unary_stream), deserializer, serializer)
        if handler.stream_stream:
            return grpc.stream_stream_rpc_method_handler(self._stream(handler.stream_stream), deserializer, serializer)
        return handler

    def _unary(self, call: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
        async def wrapped(request: Any, context: Any) -> Any:
            try:
                self._gate(context)
                return await call(_parsed(request), context)
            except OutriderError as error:
                await _abort(context, error)
            except grpc.aio.AbortError:
                raise
            except Exception:
                await _abort_internal(context)

        return wrapped

    def _stream(self, call: Callable[[Any, Any], AsyncIterator[Any]]) -> Callable[[Any, Any], AsyncIterator[Any]]:
        async def wrapped(request: Any, context: Any) -> AsyncIterator[Any]:
            responses = None
            try:
                self._gate(context)
                # A stream of requests arrives as an iterator, a single request as a message.
                checked = _parsed_stream(request) if hasattr(request, "__aiter__") else _parsed(request)
                responses = call(checked, context)
                async for response in responses:
                    yield response
            except OutriderError as error:
                await _abort(context, error)
            except grpc.aio.AbortError:
                raise
            except Exception:
                await _abort_internal(context)
            finally:
                # A cancelled call leaves the inner generator suspended: close it so that its clean-up runs now.
                if responses is not None:
                    await responses.aclose()  # type: ignore[attr-defined]

        return wrapped


def _lenient(deserializer: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def parse(data: bytes) -> Any:
        try:
            return deserializer(data)
        except DecodeError:
            return _Unparseable()

    return parse


def _parsed(request: Any) -> Any:
    if isinstance(request, _Unparseable):
        raise InvalidArgumentError("request", "the bytes are not a message of this method's type", Reason.UNREADABLE)
    return request


async def _parsed_stream(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _parsed(request)


async def _abort(context: Any, error: OutriderError) -> NoReturn:
    status = status_pb2.Status(code=code_number(error.code), message=error.message)
    pushback: tuple[tuple[str, str], ...] = ()
    if error.retry_delay_seconds > 0:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(round(error.retry_delay_seconds * 1e9))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
        # The same for gRPC's own retries, which know no RetryInfo and wait exactly so long: the jitter spreads out
        # clients that were refused at the same moment.
        milliseconds = error.retry_delay_seconds * 1e3 * random.uniform(0.8, 1.2)
        pushback = (("grpc-retry-pushback-ms", str(math.ceil(milliseconds))),)
    if isinstance(error, InvalidArgumentError):
        info = error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN)
        status.details.add().Pack(info)
        status.details.add().Pack(_bad_request(error.violations))
    details = rpc_status.to_status(status)
    await context.abort(details.code, details.details, (*details.trailing_metadata, *pushback))
    raise AssertionError("abort always raises")


def _bad_request(violations: Sequence[Violation]) -> Any:
    return error_details_pb2.BadRequest(
        field_violations=[
            error_details_pb2.BadRequest.FieldViolation(
                field=violation.field, description=violation.problem[:_MAX_DESCRIPTION], reason=violation.reason
            )
            for violation in violations
        ]
    )


async def _abort_internal(context: Any) -> NoReturn:
    logger.exception("a call failed with an unexpected error")
    # The details stay in the log: an internal error's text may hold what the caller must not see.
    await context.abort(grpc.StatusCode.INTERNAL, "internal error, see the service's log")
    raise AssertionError("abort always raises")
