"""Requests to a gateway from a process of its own, as a closed or an open loop; prints what came of them as JSON.

    python -m benchmarks.load_generator HOST:PORT --seconds 60 --rate 400
    python -m benchmarks.load_generator HOST:PORT --seconds 10 --concurrency 16

A closed loop sends a request when another one ends, so it asks for as much as it gets. An open loop sends at random
moments, so many a second in the mean, whatever comes back. Responses stay bytes but for the last one: the generator
shares the machine with the services, and what it spends on parsing they lack.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from outrider.v1 import common_pb2, generation_pb2

_METHOD = "/outrider.v1.GenerationService/Generate"
_REQUEST_SECONDS = 120.0


@dataclass
class Tally:
    """What came of the requests; times in seconds from `start`, latencies in seconds."""

    start: float
    num_sent: int = 0
    served: list[tuple[float, float, int]] = field(default_factory=list)  # (first response, last one, output tokens)
    latencies: list[float] = field(default_factory=list)
    queue_seconds: list[float] = field(default_factory=list)
    refusal_latencies: list[float] = field(default_factory=list)
    retry_delays: list[float] = field(default_factory=list)
    other_statuses: Counter[str] = field(default_factory=Counter)
    lags: list[float] = field(default_factory=list)  # how late requests of an open loop were sent

    def report(self, after: float, until: float) -> dict[str, Any]:
        """Everything, as JSON; goodput is what was generated in the window of requests that were completed at last.

        A request's tokens are spread evenly over its time: what runs in step ends in step, and a window that counted
        ends would hold one such wave more or less.
        """
        seconds = until - after
        num_requests = num_tokens = 0.0
        for first, last, count in self.served:
            share = max(0.0, min(last, until) - max(first, after)) / max(last - first, 1e-9)
            num_requests += share
            num_tokens += share * count
        return {
            "num_sent": self.num_sent,
            "num_served": len(self.served),
            "num_refused": len(self.refusal_latencies),
            "other_statuses": dict(self.other_statuses),
            "window_seconds": seconds,
            "cpu_seconds": time.process_time(),
            "goodput_requests_per_second": num_requests / seconds,
            "goodput_tokens_per_second": num_tokens / seconds,
            "served_latency_ms": _quantiles(self.latencies),
            "served_queue_ms": _quantiles(self.queue_seconds),
            "refusal_latency_ms": _quantiles(self.refusal_latencies),
            "retry_delay_ms": _quantiles(self.retry_delays),
            "send_lag_ms": _quantiles(self.lags),
        }


class LoadGenerator:
    """Sends one prompt, with outputs of varied length.

    One prompt, as others would differ in how much of their drafts is accepted, and two loads of different requests in
    what a token costs.
    """

    def __init__(self, channel: grpc.aio.Channel, *, num_output_tokens: int, vocabulary_size: int, seed: int) -> None:
        self._call = channel.unary_stream(_METHOD, None, None)
        self._num_output_tokens = num_output_tokens
        self._random = random.Random(seed)
        self._prompt = [self._random.randrange(vocabulary_size) for _ in range(16)]
        self._tasks: set[asyncio.Task[None]] = set()
        self.tally = Tally(time.perf_counter())

    async def closed(self, concurrency: int, seconds: float) -> None:
        """So many requests at any time; returns when the last one has ended."""
        end = time.perf_counter() + seconds

        async def one_after_another() -> None:
            while time.perf_counter() < end:
                await self._send(self._request())

        await asyncio.gather(*(one_after_another() for _ in range(concurrency)))

    async def open(self, rate: float, seconds: float) -> None:
        """So many requests a second in the mean, at random moments; returns when the last one has ended."""
        start = time.perf_counter()
        due = start
        while (due := due + self._random.expovariate(rate)) < start + seconds:
            if (wait := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            self.tally.lags.append(max(0.0, time.perf_counter() - due))
            task = asyncio.create_task(self._send(self._request()))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        await asyncio.gather(*self._tasks)

    def _request(self) -> bytes:
        # Of different lengths, so that they do not all begin and end together, which no real load does.
        num_tokens = self._random.randint(self._num_output_tokens // 2, self._num_output_tokens * 3 // 2)
        return generation_pb2.GenerateRequest(
            token_ids=generation_pb2.TokenIds(ids=self._prompt),
            sampling=common_pb2.SamplingParameters(temperature=0.0),
            stopping=generation_pb2.StoppingParameters(max_tokens=num_tokens, ignore_eos=True),
        ).SerializeToString()

    async def _send(self, request: bytes) -> None:
        tally = self.tally
        tally.num_sent += 1
        began = time.perf_counter()
        first, last = 0.0, b""
        call = self._call(request, timeout=_REQUEST_SECONDS)
        try:
            async for response in call:
                first, last = first or time.perf_counter(), response
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                tally.refusal_latencies.append(time.perf_counter() - began)
                tally.retry_delays.append(_retry_delay(error))
            else:
                tally.other_statuses[error.code().name] += 1
            return
        ended = time.perf_counter()
        finished = generation_pb2.GenerateResponse.FromString(last).finished
        tally.served.append((first - tally.start, ended - tally.start, finished.usage.num_output_tokens))
        tally.latencies.append(ended - began)
        tally.queue_seconds.append(finished.timings.queue_seconds)


def _retry_delay(error: grpc.aio.AioRpcError) -> float:
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    info = error_details_pb2.RetryInfo()
    if status is None or not status.details or not status.details[0].Unpack(info):
        return 0.0
    return float(info.retry_delay.ToNanoseconds() / 1e9)


def _quantiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """Median, 99th percentile, least and most, in milliseconds."""
    if len(seconds) < 2:
        return None
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {
        name: round(1e3 * value, 2)
        for name, value in (("min", min(seconds)), ("p50", cuts[49]), ("p99", cuts[98]), ("max", max(seconds)))
    }


async def _main(arguments: argparse.Namespace) -> None:
    # A connection of its own: a channel of another process's generator must not be shared.
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
    async with grpc.aio.insecure_channel(arguments.address, options=options) as channel:
        await channel.channel_ready()
        generator = LoadGenerator(
            channel,
            num_output_tokens=arguments.output_tokens,
            vocabulary_size=arguments.vocabulary_size,
            seed=arguments.seed,
        )
        if arguments.rate is not None:
            await generator.open(arguments.rate, arguments.seconds)
        else:
            await generator.closed(arguments.concurrency, arguments.seconds)
        print(json.dumps(generator.tally.report(arguments.skip, arguments.seconds)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; the process's exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address")
    parser.add_argument("--seconds", type=float, required=True, help="how long requests are sent")
    parser.add_argument("--skip", type=float, default=0.0, help="seconds at the start that goodput leaves out")
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--rate", type=float, help="open loop: requests a second")
    kind.add_argument("--concurrency", type=int, help="closed loop: requests at a time")
    parser.add_argument("--output-tokens", type=int, default=64, help="of a request in the mean")
    parser.add_argument("--vocabulary-size", type=int, default=1000, help="prompts are of token ids below this")
    parser.add_argument("--seed", type=int, default=0)
    asyncio.run(_main(parser.parse_args(arguments)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
