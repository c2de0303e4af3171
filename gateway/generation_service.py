"""GenerationService over gRPC: parse, call, translate."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc

from gateway.auth import Authenticate, Caller, admit_anyone
from gateway.generator import Generator
from gateway.request_trace import RequestTrace
from gateway.verifier_pool import VerifierPool
from gateway.watcher import Event
from outrider.protocol.errors import OutriderError
from outrider.service.telemetry import Telemetry
from outrider.v1 import generation_pb2, generation_pb2_grpc

GENERATE = "outrider.v1.GenerationService/Generate"
# A client whose deadline has passed cancels, which may arrive this long before the deadline as counted here.
LATE_SECONDS = 0.1


class GenerationService(generation_pb2_grpc.GenerationServiceServicer):
    """What clients speak to."""

    def __init__(
        self,
        generator: Generator,
        pool: VerifierPool,
        *,
        telemetry: Telemetry,
        has_tokenizer: bool,
        trace_prompts: bool = False,
        authenticate: Authenticate = admit_anyone,
    ) -> None:
        self._generator = generator
        self._pool = pool
        self._telemetry = telemetry
        self._has_tokenizer = has_tokenizer
        self._trace_prompts = trace_prompts
        self._authenticate = authenticate

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        """Stream one completion."""
        request_trace = self._start_trace(context)
        code, message = grpc.StatusCode.OK, ""
        try:
            async with aclosing(
                self._generator.generate(
                    request, request_trace, caller=self._caller(context), seconds_left=context.time_remaining()
                )
            ) as events:
                async for event in events:
                    yield _response(event)
        except OutriderError as error:
            code, message = error.code, error.message
            raise
        except (asyncio.CancelledError, GeneratorExit):
            # gRPC cancels the handler for both; only the clock tells them apart.
            time_left = context.time_remaining()
            is_late = time_left is not None and time_left < LATE_SECONDS
            code = grpc.StatusCode.DEADLINE_EXCEEDED if is_late else grpc.StatusCode.CANCELLED
            raise
        except Exception:
            code = grpc.StatusCode.INTERNAL
            raise
        finally:
            request_trace.end(code, message)

    async def GetModel(
        self, request: generation_pb2.GetModelRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> generation_pb2.GetModelResponse:
        """Describe the model and the pools."""
        self._caller(context)
        model = self._pool.model
        return generation_pb2.GetModelResponse(
            name=self._generator.model_name,
            revision=model.revision,
            context_length=model.context_length,
            vocabulary_size=model.vocabulary_size,
            has_tokenizer=self._has_tokenizer,
            verifiers=self._pool.verifier_members(),
            drafters=self._pool.drafter_members(),
        )

    def _caller(self, context: grpc.aio.ServicerContext[Any, Any]) -> Caller:
        return self._authenticate(_metadata(context).get("authorization"))

    def _start_trace(self, context: grpc.aio.ServicerContext[Any, Any]) -> RequestTrace:
        if not self._telemetry.is_enabled:
            return RequestTrace(self._telemetry)
        return RequestTrace.start(
            self._telemetry,
            model=self._generator.model_name,
            parent=_metadata(context).get("traceparent", ""),
            attributes={"rpc.system.name": "grpc", "rpc.method": GENERATE},
            has_prompts=self._trace_prompts,
        )


def _metadata(context: grpc.aio.ServicerContext[Any, Any]) -> dict[str, str]:
    return {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}


def _response(event: Event) -> generation_pb2.GenerateResponse:
    match event:
        case generation_pb2.Started():
            return generation_pb2.GenerateResponse(started=event)
        case generation_pb2.Chunk():
            return generation_pb2.GenerateResponse(chunk=event)
        case _:
            return generation_pb2.GenerateResponse(finished=event)
