"""Sends traffic to a gateway, as an open or a closed loop, and notes what came back and how late the sender itself was.

Messages are read as they come: when which tokens came is what is measured. The open loop sends at the moments that were
drawn, whatever comes back; the closed loop sends a request when another one ends.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc

from benchmarks.traffic import PlannedRequest
from outrider.v1 import common_pb2, generation_pb2

FINISHED, REFUSED, UNFINISHED = "finished", "refused", "unfinished"

_METHOD = "/outrider.v1.GenerationService/Generate"
_HEARTBEAT_SECONDS = 0.01
# A closed loop that is refused does not come back at once.
_PAUSE_SECONDS = 0.1


@dataclass
class Outcome:
    """One request; times in seconds from the start of its run."""

    planned: PlannedRequest
    due: float  # when it was to be sent
    sent: float = 0.0
    token_times: list[tuple[float, int]] = field(default_factory=list)  # when tokens came, and how many
    # finished, refused, unfinished (cut off at the end of the run), or the name of another gRPC status.
    status: str = UNFINISHED
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    fallbacks: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Output tokens that came."""
        return sum(count for _, count in self.token_times)

    @property
    def first_token_seconds(self) -> float | None:
        """From the moment at which it was to be sent to its first token; None where none came."""
        return self.token_times[0][0] - self.due if self.token_times else None

    @property
    def token_seconds(self) -> float | None:
        """Time per output token behind the first message's; None where nothing came behind it."""
        num_later = sum(count for _, count in self.token_times[1:])
        return (self.token_times[-1][0] - self.token_times[0][0]) / num_later if num_later else None


@dataclass
class SenderRun:
    """One run of a loop: its requests, and how late the sender was, seconds."""

    outcomes: list[Outcome] = field(default_factory=list)
    send_lags: list[float] = field(default_factory=list)  # of an open loop's requests, behind their time
    loop_lags: list[float] = field(default_factory=list)  # of a heartbeat: how long the event loop was busy elsewhere

    def tokens_between(self, start: float, end: float) -> int:
        """Output tokens of all requests that came in this time."""
        return sum(count for one in self.outcomes for when, count in one.token_times if start <= when < end)

    def statuses(self) -> Counter[str]:
        """How many requests ended how."""
        return Counter(one.status for one in self.outcomes)


class Sender:
    """Sends requests over one channel; `timeout_seconds` is each request's deadline."""

    def __init__(self, channel: grpc.aio.Channel, vocab_size: int, *, timeout_seconds: float) -> None:
        self._call = channel.unary_stream(_METHOD, None, generation_pb2.GenerateResponse.FromString)
        self._vocab_size = vocab_size
        self._timeout_seconds = timeout_seconds

    async def open_loop(
        self,
        requests: Sequence[tuple[float, PlannedRequest]],  # when each is due, seconds from the start, ascending
        num_draft_tokens: int | None,
        *,
        drain_seconds: float,
    ) -> SenderRun:
        """Send each request when it is due; what has not ended `drain_seconds` after the last one is cut off."""
        # Before the clock starts: a long prompt takes a millisecond to draw.
        messages = [planned.message(self._vocab_size, num_draft_tokens) for _, planned in requests]
        run = SenderRun()
        tasks: list[asyncio.Task[None]] = []
        async with _heartbeat(run):
            start = time.perf_counter()
            for (due, planned), message in zip(requests, messages, strict=True):
                if (wait := start + due - time.perf_counter()) > 0:
                    await asyncio.sleep(wait)
                outcome = Outcome(planned, due)
                run.outcomes.append(outcome)
                run.send_lags.append(max(0.0, time.perf_counter() - start - due))
                tasks.append(asyncio.create_task(self._send(message, outcome, start)))
            if tasks:
                await asyncio.wait(tasks, timeout=drain_seconds)
            await _cancel(tasks)
        return run

    async def closed_loop(
        self, requests: Iterator[PlannedRequest], num_draft_tokens: int | None, *, concurrency: int, seconds: float
    ) -> SenderRun:
        """Keep `concurrency` requests open for so long; those that are open at the end are cut off."""
        run = SenderRun()
        start = time.perf_counter()

        async def one_after_another() -> None:
            while True:
                planned = next(requests)
                outcome = Outcome(planned, time.perf_counter() - start)
                run.outcomes.append(outcome)
                await self._send(planned.message(self._vocab_size, num_draft_tokens), outcome, start)
                if outcome.status != FINISHED:
                    await asyncio.sleep(_PAUSE_SECONDS)

        async with _heartbeat(run):
            tasks = [asyncio.create_task(one_after_another()) for _ in range(concurrency)]
            # None of them ends before, unless by an error.
            await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            await _cancel(tasks)
        return run

    async def _send(self, message: bytes, outcome: Outcome, start: float) -> None:
        outcome.sent = time.perf_counter() - start
        call = self._call(message, timeout=self._timeout_seconds)
        try:
            async for response in call:
                match response.WhichOneof("event"):
                    case "chunk" if response.chunk.tokens:
                        outcome.token_times.append((time.perf_counter() - start, len(response.chunk.tokens)))
                    case "finished":
                        _take_end(outcome, response.finished)
        except grpc.aio.AioRpcError as error:
            is_refusal = error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            outcome.status = REFUSED if is_refusal else error.code().name
        finally:
            call.cancel()


def _take_end(outcome: Outcome, finished: generation_pb2.Finished) -> None:
    speculation = finished.speculation
    outcome.status = FINISHED
    outcome.num_steps = speculation.num_steps
    outcome.num_drafted = speculation.num_draft_tokens
    outcome.num_accepted = speculation.num_accepted_tokens
    outcome.fallbacks = tuple(
        common_pb2.FallbackReason.Name(item.reason).removeprefix("FALLBACK_REASON_") for item in speculation.fallbacks
    )


@asynccontextmanager
async def _heartbeat(run: SenderRun) -> AsyncIterator[None]:
    """Note all the while how much later than asked for the event loop comes back."""

    async def beat() -> None:
        while True:
            asked = time.perf_counter() + _HEARTBEAT_SECONDS
            await asyncio.sleep(_HEARTBEAT_SECONDS)
            run.loop_lags.append(max(0.0, time.perf_counter() - asked))

    task = asyncio.create_task(beat())
    try:
        yield
    finally:
        await _cancel([task])


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    """End tasks and wait for them. Raises what one of them had failed with."""
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            raise result
