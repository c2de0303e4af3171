"""Delay, stalls and resets between the services: what a client notices, and for how long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from outrider.service.serving import LINK_KEEPALIVE
from outrider.v1 import common_pb2, generation_pb2, verifier_pb2
from tests.gateway.fake_verifier import RunningGateway, complete, eventually, running_gateway, token_ids
from tests.network.conftest import Pair
from tests.network.tcp_proxy import TcpProxy, proxied
from tests.services.harness import replay, running_verifier, scripted_drafter, verifier_settings
from tests.services.reference import greedy
from verifier_service.service import VerifierService

PROMPT = [7, 1, 40, 3]
NUM_TOKENS = 400
# Until a peer that fell silent is missed, and what a busy machine adds.
NOTICE_SECONDS = LINK_KEEPALIVE.interval_seconds + LINK_KEEPALIVE.timeout_seconds
SLACK_SECONDS = 2.0
LOST = common_pb2.FALLBACK_REASON_DRAFTER_LOST


@dataclass
class Path:
    """A gateway, verifiers and a drafter, with a proxy in front of each verifier and of the drafter."""

    running: RunningGateway
    to_verifiers: Sequence[TcpProxy]
    to_drafter: TcpProxy
    services: Sequence[VerifierService]

    async def drafter_is_ready(self, is_ready: bool = True) -> None:
        """Return when the gateway may name the drafter, or may not."""
        address = self.to_drafter.address

        def is_so() -> bool:
            statuses = [link.drafters.get(address) for link in self.running.links if link.is_connected]
            return bool(statuses) and all(
                (status is not None and status.state == verifier_pb2.DRAFTER_STATE_READY) == is_ready
                for status in statuses
            )

        await eventually(is_so, 15)


@asynccontextmanager
async def path(pair: Pair, num_verifiers: int = 1, **settings: Any) -> AsyncIterator[Path]:
    """Everything up and linked."""
    target, _ = pair
    script = replay([*PROMPT, *greedy(target, PROMPT, NUM_TOKENS)])
    async with AsyncExitStack() as stack:
        drafter = await stack.enter_async_context(scripted_drafter(script))
        to_drafter = await stack.enter_async_context(proxied(drafter.address))
        to_verifiers, services = [], []
        for _ in range(num_verifiers):
            settings = {"draft_timeout_seconds": 0.5, **settings}
            server, service = await stack.enter_async_context(running_verifier(verifier_settings(target, **settings)))
            services.append(service)
            to_verifiers.append(await stack.enter_async_context(proxied(server.address)))
        running = await stack.enter_async_context(
            running_gateway(*(proxy.address for proxy in to_verifiers), drafters=(to_drafter.address,))
        )
        whole = Path(running, to_verifiers, to_drafter, services)
        await eventually(lambda: all(link.is_ready for link in running.links))
        await whole.drafter_is_ready()
        yield whole


@dataclass
class Stream:
    """One request: its tokens and when they came."""

    token_ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    finished: generation_pb2.Finished | None = None
    error: grpc.aio.AioRpcError | None = None

    @property
    def longest_gap(self) -> float:
        """Most seconds between two chunks."""
        return max(after - before for before, after in zip(self.times, self.times[1:], strict=False))

    @property
    def reasons(self) -> list[int]:
        """Why it fell back."""
        assert self.finished is not None
        return [fallback.reason for fallback in self.finished.speculation.fallbacks]

    async def has(self, num_tokens: int) -> None:
        """Return when so many tokens are there."""
        await eventually(lambda: len(self.token_ids) >= num_tokens, 20)

    async def run(self, running: RunningGateway, num_tokens: int = NUM_TOKENS) -> None:
        """Read it to its end."""
        request = generation_pb2.GenerateRequest(
            token_ids=token_ids(*PROMPT),
            sampling=common_pb2.SamplingParameters(temperature=0.0),
            stopping=generation_pb2.StoppingParameters(max_tokens=num_tokens, ignore_eos=True),
            speculation=generation_pb2.SpeculationParameters(max_draft_tokens=1),
        )
        try:
            async for response in running.stub.Generate(request, timeout=60):
                self.times.append(time.monotonic())
                self.token_ids += [token.id for token in response.chunk.tokens]
                if response.HasField("finished"):
                    self.finished = response.finished
        except grpc.aio.AioRpcError as error:
            self.error = error


def begin(running: RunningGateway, num_tokens: int = NUM_TOKENS) -> tuple[Stream, asyncio.Task[None]]:
    """A request that runs beside the test."""
    stream = Stream()
    return stream, asyncio.create_task(stream.run(running, num_tokens))


async def test_requests_complete_whatever_the_way_to_the_drafter_is_like(pair: Pair) -> None:
    """Delay on every way, stalls of both, resets towards the drafter: the same tokens, later."""
    expected = greedy(pair[0], PROMPT, NUM_TOKENS)
    # Reset, and not merely slow: the drafter is to be lost for one reason alone.
    async with path(pair, draft_timeout_seconds=10.0) as whole:
        for proxy in (whole.to_drafter, *whole.to_verifiers):
            proxy.delay = 0.01
        streams, tasks = zip(*(begin(whole.running, 120) for _ in range(4)), strict=True)
        await streams[0].has(20)
        whole.to_verifiers[0].stall()
        await asyncio.sleep(0.7)
        whole.to_verifiers[0].resume()
        await streams[0].has(40)
        whole.to_drafter.stall()
        await asyncio.sleep(0.2)
        whole.to_drafter.resume()
        await streams[0].has(60)
        assert whole.to_drafter.reset()
        await asyncio.gather(*tasks)
        for stream in streams:
            assert stream.error is None
            assert stream.token_ids == expected[:120]
            assert stream.finished is not None
            assert stream.finished.speculation.num_accepted_tokens > 0
        assert LOST in streams[0].reasons
        await whole.drafter_is_ready()
        stream, task = begin(whole.running, 30)
        await task
        assert (stream.token_ids, stream.reasons) == (expected[:30], [])


async def test_a_drafter_that_falls_silent_costs_less_than_a_second(pair: Pair) -> None:
    """Catches running sequences that wait for a drafter behind a network that drops everything, and one that is never
    found again."""
    expected = greedy(pair[0], PROMPT, NUM_TOKENS)
    async with path(pair) as whole:
        stream, task = begin(whole.running)
        await stream.has(40)
        whole.to_drafter.stall()
        await task
        assert stream.token_ids == expected
        assert stream.reasons == [LOST]
        print(f"longest gap between tokens: {stream.longest_gap:.3f} s")
        assert stream.longest_gap < 1.0
        await whole.drafter_is_ready(False)
        alone = await complete(whole.running, token_ids=token_ids(*PROMPT), stopping={"max_tokens": 5})
        reasons = [fallback.reason for fallback in alone.finished.speculation.fallbacks]
        assert reasons == [common_pb2.FALLBACK_REASON_NO_DRAFTER]
        healed = time.monotonic()
        whole.to_drafter.resume()
        await whole.drafter_is_ready()
        print(f"found again after {time.monotonic() - healed:.3f} s")
        again, task = begin(whole.running, 40)
        await task
        assert (again.token_ids, again.reasons) == (expected[:40], [])
        assert again.finished is not None
        assert again.finished.speculation.num_accepted_tokens > 0


async def test_a_verifier_that_falls_silent_is_missed_in_time(pair: Pair) -> None:
    """Requests that wait for their first token go on to the other verifier, those in mid-stream fail, both soon."""
    expected = greedy(pair[0], PROMPT, NUM_TOKENS)
    async with path(pair, 2) as whole:
        started, task = begin(whole.running)
        await started.has(20)
        [busy] = [link for link in whole.running.links if link.num_sequences]
        place = [proxy.address for proxy in whole.to_verifiers].index(busy.address)
        silent, service = whole.to_verifiers[place], whole.services[place]
        silent.stall()
        began = time.monotonic()
        waiting = [begin(whole.running, 30) for _ in range(4)]
        await task
        print(f"missed after {time.monotonic() - began:.3f} s")
        assert time.monotonic() - began < NOTICE_SECONDS + SLACK_SECONDS
        assert started.error is not None
        assert started.error.code() is grpc.StatusCode.UNAVAILABLE
        for stream, running in waiting:
            await running
            assert stream.error is None
            assert stream.token_ids == expected[:30]
        assert time.monotonic() - began < NOTICE_SECONDS + SLACK_SECONDS
        # The verifier misses the gateway as well, and holds nothing for it.
        await eventually(lambda: not service._sessions and not service._engine.is_busy)
        assert time.monotonic() - began < NOTICE_SECONDS + SLACK_SECONDS
        # From now on nobody waits for it.
        stream, task = begin(whole.running, 30)
        await asyncio.wait_for(task, SLACK_SECONDS)
        assert stream.token_ids == expected[:30]
        silent.resume()
        healed = time.monotonic()
        await eventually(lambda: all(link.is_ready for link in whole.running.links), 15)
        print(f"found again after {time.monotonic() - healed:.3f} s")


async def test_a_reset_verifier_link_fails_what_runs_and_nothing_else(pair: Pair) -> None:
    expected = greedy(pair[0], PROMPT, NUM_TOKENS)
    async with path(pair, 2) as whole:
        started = [begin(whole.running) for _ in range(2)]
        for stream, _ in started:
            await stream.has(20)
        whole.to_verifiers[0].reset()
        for _, task in started:
            await task
        assert sorted(stream.error is None for stream, _ in started) == [False, True]
        await eventually(lambda: all(link.is_ready for link in whole.running.links))
        stream, task = begin(whole.running, 30)
        await task
        assert stream.token_ids == expected[:30]
