"""Runs the generations of one HTTP request side by side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field

import grpc

from gateway.auth import Caller
from gateway.generator import Event, Generator
from gateway.request_trace import RequestTrace
from outrider.protocol.errors import OutriderError
from outrider.service.telemetry import Telemetry
from outrider.v1 import generation_pb2


@dataclass(frozen=True)
class ChoiceRunner:
    """Generates with one caller's rights, below one trace."""

    generator: Generator
    telemetry: Telemetry
    caller: Caller
    route: str
    operation: str
    # The client's trace context, or empty.
    parent: str
    trace_prompts: bool
    # What the span says beside that.
    attributes: Mapping[str, str | bool] = field(default_factory=dict)

    async def run(self, requests: Sequence[generation_pb2.GenerateRequest]) -> AsyncGenerator[tuple[int, Event], None]:
        """The events of all generations as they come, each with its request's index.

        The first error ends all of them, and so does closing the generator.
        """
        if len(requests) == 1:
            async with aclosing(self._generate(requests[0], self.parent)) as events:
                async for event in events:
                    yield 0, event
            return
        with self._traced(self.parent) as whole:
            parent = whole.traceparent or self.parent
            async with aclosing(_merged([self._generate(request, parent) for request in requests])) as merged:
                async for indexed in merged:
                    yield indexed

    async def _generate(self, request: generation_pb2.GenerateRequest, parent: str) -> AsyncGenerator[Event, None]:
        with self._traced(parent) as request_trace:
            async with aclosing(self.generator.generate(request, request_trace, caller=self.caller)) as events:
                async for event in events:
                    yield event

    @contextmanager
    def _traced(self, parent: str) -> Iterator[RequestTrace]:
        """A span that ends as the context does."""
        request_trace = self._start_trace(parent)
        code, message = grpc.StatusCode.OK, ""
        try:
            yield request_trace
        except OutriderError as error:
            code, message = error.code, error.message
            raise
        except (asyncio.CancelledError, GeneratorExit):
            code = grpc.StatusCode.CANCELLED
            raise
        except Exception:
            code = grpc.StatusCode.INTERNAL
            raise
        finally:
            request_trace.end(code, message)

    def _start_trace(self, parent: str) -> RequestTrace:
        if not self.telemetry.is_enabled:
            return RequestTrace(self.telemetry, operation=self.operation)
        return RequestTrace.start(
            self.telemetry,
            model=self.generator.model_name,
            parent=parent,
            attributes={
                "gen_ai.operation.name": self.operation,
                "http.request.method": "POST",
                "http.route": self.route,
                **self.attributes,
            },
            has_prompts=self.trace_prompts,
        )


async def _merged(streams: Sequence[AsyncGenerator[Event, None]]) -> AsyncGenerator[tuple[int, Event], None]:
    """The events of all streams as they come. An error of one ends all."""
    # Short, so that a client who reads slowly holds back all streams alike.
    queue: asyncio.Queue[tuple[int, Event | Exception | None]] = asyncio.Queue(len(streams))

    async def pump(index: int, stream: AsyncGenerator[Event, None]) -> None:
        try:
            async with aclosing(stream):
                async for event in stream:
                    await queue.put((index, event))
            await queue.put((index, None))
        except Exception as error:
            await queue.put((index, error))

    tasks = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        num_open = len(tasks)
        while num_open:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        # Every sequence is closed at its verifier before the request counts as over.
        await asyncio.gather(*tasks, return_exceptions=True)
