"""A GenerationService in this process whose answers a test writes down."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Self, TypeAlias

import grpc
from google.protobuf import duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2_grpc
from grpc_status import rpc_status

from outrider.v1 import common_pb2, generation_pb2, generation_pb2_grpc

ACCEPTED = common_pb2.TOKEN_ORIGIN_ACCEPTED
RECOVERED = common_pb2.TOKEN_ORIGIN_RECOVERED
BONUS = common_pb2.TOKEN_ORIGIN_BONUS
PLAIN = common_pb2.TOKEN_ORIGIN_PLAIN

# Only the stubs know that it is generic.
Context: TypeAlias = "grpc.aio.ServicerContext[Message, Message]"


def started(request: generation_pb2.GenerateRequest) -> generation_pb2.GenerateResponse:
    message = generation_pb2.Started(
        request_id=request.request_id or "drawn", model="fake", num_prompt_tokens=3, seed=7
    )
    return generation_pb2.GenerateResponse(started=message)


def chunk(text: str, *tokens: tuple[int, common_pb2.TokenOrigin, str]) -> generation_pb2.GenerateResponse:
    items = [generation_pb2.Token(id=token_id, origin=origin, text=part) for token_id, origin, part in tokens]
    return generation_pb2.GenerateResponse(chunk=generation_pb2.Chunk(text=text, tokens=items))


def finished() -> generation_pb2.GenerateResponse:
    return generation_pb2.GenerateResponse(
        finished=generation_pb2.Finished(
            finish_reason=generation_pb2.FINISH_REASON_LENGTH,
            usage=generation_pb2.Usage(num_prompt_tokens=3, num_output_tokens=5),
            speculation=generation_pb2.SpeculationStatistics(
                num_steps=2,
                num_draft_tokens=6,
                num_accepted_tokens=3,
                num_accepted_per_position=[2, 1, 0],
                verification=common_pb2.VERIFICATION_COUPLED,
                fallbacks=[
                    common_pb2.Fallback(reason=common_pb2.FALLBACK_REASON_DRAFTER_MAX_LENGTH, position=6),
                ],
            ),
            timings=generation_pb2.Timings(
                queue_seconds=0.1, prefill_seconds=0.2, time_to_first_token_seconds=1.0, total_seconds=3.0
            ),
        )
    )


SMILE = "\N{SLIGHTLY SMILING FACE}"
# Two steps; the smile is one character of two tokens, so the first of them completes no text.
STORY = (
    chunk("Once ", (1, ACCEPTED, "Once"), (2, RECOVERED, " ")),
    chunk(
        SMILE + "upon",
        (3, ACCEPTED, ""),
        (4, ACCEPTED, SMILE),
        (5, BONUS, "upon"),
    ),
)


class FakeGateway(generation_pb2_grpc.GenerationServiceServicer):
    """Serves STORY; the prompt asks for something else: `fail NAME [DELAY]`, `hang`, `endless`, `cut`, `late NAME`."""

    def __init__(self) -> None:
        self.address = ""
        self.requests: list[generation_pb2.GenerateRequest] = []
        self.metadata: list[dict[str, str]] = []
        self.num_failures_to_come = 0
        # What those failures tell gRPC's retries to wait; None: nothing.
        self.pushback_ms: int | None = None
        self.was_cancelled = asyncio.Event()
        self._server = grpc.aio.server(options=[("grpc.max_receive_message_length", 64 << 20)])

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata() or ()))
        word, _, rest = request.prompt.partition(" ")
        try:
            await self._fail_as_told(context)
            if word == "fail":
                await self._fail(context, *rest.split(" ", 1))
            if word == "hang":
                await asyncio.sleep(60)
            yield started(request)
            while word == "endless":
                yield chunk("x", (1, PLAIN, "x"))
                await asyncio.sleep(0.01)
            for response in STORY:
                yield response
            if word == "late":
                await context.abort(grpc.StatusCode[rest], "too late to try again")
            if word != "cut":
                yield finished()
        except (asyncio.CancelledError, GeneratorExit):
            self.was_cancelled.set()
            raise

    async def GetModel(
        self, request: generation_pb2.GetModelRequest, context: Context
    ) -> generation_pb2.GetModelResponse:
        await self._fail_as_told(context)
        return generation_pb2.GetModelResponse(
            name="fake",
            revision="abc",
            context_length=128,
            vocabulary_size=64,
            has_tokenizer=True,
            verifiers=[generation_pb2.VerifierMember(address="v:1", is_ready=True, num_sequences=2)],
            drafters=[generation_pb2.DrafterMember(address="d:1", is_ready=False, detail="vocabulary differs")],
        )

    async def _fail_as_told(self, context: Context) -> None:
        if self.num_failures_to_come:
            self.num_failures_to_come -= 1
            metadata = () if self.pushback_ms is None else (("grpc-retry-pushback-ms", str(self.pushback_ms)),)
            await context.abort(grpc.StatusCode.UNAVAILABLE, "draining", metadata)

    async def _fail(self, context: Context, name: str, message: str = "no") -> None:
        code = grpc.StatusCode[name]
        status = status_pb2.Status(code=code.value[0], message=message)
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            delay = duration_pb2.Duration()
            delay.FromNanoseconds(1_500_000_000)
            status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
        await context.abort_with_status(rpc_status.to_status(status))  # type: ignore[attr-defined]  # not in the stubs

    async def __aenter__(self) -> Self:
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(self, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), self._server)  # type: ignore[attr-defined]
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._server.stop(grace=None)
