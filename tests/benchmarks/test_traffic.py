"""Traffic is the same for the same seed, its sender keeps to the plan, its figures hide neither failure nor delay."""

from __future__ import annotations

import asyncio
import itertools
import math
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from benchmarks.traffic import PlannedRequest, Traffic
from benchmarks.traffic_figures import Limits, figures_of
from benchmarks.traffic_sender import Outcome, Sender, SenderRun
from outrider.v1 import common_pb2, generation_pb2, generation_pb2_grpc

_VOCAB_SIZE = 50
# What the gateway below is told by a request's number of output tokens.
_REFUSED, _BROKEN, _ENDLESS = 101, 102, 103


class _Gateway(generation_pb2_grpc.GenerationServiceServicer):
    """Two tokens, then one each 20 ms; a few lengths mean something else."""

    def __init__(self) -> None:
        self.requests: list[generation_pb2.GenerateRequest] = []
        self.num_open = self.most_open = 0

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        self.requests.append(request)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            num_tokens = request.stopping.max_tokens
            yield generation_pb2.GenerateResponse(started=generation_pb2.Started())
            if num_tokens == _REFUSED:
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED)
            if num_tokens == _BROKEN:
                await context.abort(grpc.StatusCode.INTERNAL)
            tokens = [generation_pb2.Token(id=1)]
            yield generation_pb2.GenerateResponse(chunk=generation_pb2.Chunk(tokens=tokens * 2))
            for _ in range(1_000_000 if num_tokens == _ENDLESS else num_tokens - 2):
                await asyncio.sleep(0.02)
                yield generation_pb2.GenerateResponse(chunk=generation_pb2.Chunk(tokens=tokens))
            finished = generation_pb2.Finished()
            finished.speculation.num_steps = 3
            finished.speculation.num_draft_tokens = 8
            finished.speculation.num_accepted_tokens = 5
            finished.speculation.fallbacks.add(reason=common_pb2.FALLBACK_REASON_DRAFTER_LOST)
            yield generation_pb2.GenerateResponse(finished=finished)
        finally:
            self.num_open -= 1

    async def GetModel(
        self, request: generation_pb2.GetModelRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> generation_pb2.GetModelResponse:
        raise NotImplementedError  # nobody asks


@asynccontextmanager
async def _sender(gateway: _Gateway) -> AsyncIterator[Sender]:
    server = grpc.aio.server()
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(gateway, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield Sender(channel, _VOCAB_SIZE, timeout_seconds=30.0)
    await server.stop(None)


def _planned(num_output_tokens: int, number: int = 0) -> PlannedRequest:
    return PlannedRequest(number, 4, num_output_tokens, 0.7, "", 1)


def test_the_same_seed_gives_the_same_requests_at_the_same_moments() -> None:
    one, other = Traffic(seed=3), Traffic(seed=3)
    assert [one.request(i) for i in range(50)] == [other.request(i) for i in range(50)]
    assert one.request(7).message(_VOCAB_SIZE, 4) == other.request(7).message(_VOCAB_SIZE, 4)
    assert one.arrival_times(5, 20) == other.arrival_times(5, 20)
    assert one.arrival_times(5, 20) != Traffic(seed=4).arrival_times(5, 20)
    assert one.request(7) != Traffic(seed=4).request(7)


def test_lengths_temperatures_and_shares_are_as_described() -> None:
    requests = [Traffic().request(i) for i in range(4000)]
    for lengths, low, high in (
        ([one.num_prompt_tokens for one in requests], 32, 2048),
        ([one.num_output_tokens for one in requests], 16, 512),
    ):
        assert (min(lengths), max(lengths)) == pytest.approx((low, high), rel=0.02)
        # Log-uniform: half lie below the geometric mean of the limits.
        assert statistics.median(lengths) == pytest.approx(math.sqrt(low * high), rel=0.08)
    counts = Counter(one.temperature for one in requests)
    assert all(counts[temperature] == pytest.approx(4000 / 3, rel=0.1) for temperature in (0.0, 0.7, 1.0))
    special = Counter(one.special for one in requests)
    assert special["penalties"] == pytest.approx(200, rel=0.25)
    assert special["logprobs"] == pytest.approx(200, rel=0.25)


def test_uniform_traffic_differs_in_nothing_but_the_special_requests() -> None:
    mixed = [Traffic(special_share=0.5).request(i) for i in range(40)]
    uniform = [Traffic(special_share=0.5).uniform().request(i) for i in range(40)]
    assert {one.special for one in mixed} == {"", "penalties", "logprobs"}
    for one, other in zip(mixed, uniform, strict=True):
        assert other.special == ""
        assert {**one.__dict__, "special": ""} == other.__dict__


def test_arrivals_are_a_poisson_process() -> None:
    times = Traffic().arrival_times(40, 100)
    assert len(times) == pytest.approx(4000, rel=0.05)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    # Exponential: the standard deviation is the mean.
    assert statistics.stdev(gaps) == pytest.approx(1 / 40, rel=0.08)
    assert [time / 2 for time in times[:10]] == pytest.approx(Traffic().arrival_times(80, 10)[:10])


def test_messages_ask_for_what_was_planned() -> None:
    message = generation_pb2.GenerateRequest.FromString(
        PlannedRequest(0, 9, 33, 0.7, "penalties", 5).message(_VOCAB_SIZE, 4)
    )
    assert len(message.token_ids.ids) == 9
    assert max(message.token_ids.ids) < _VOCAB_SIZE
    assert message.stopping.max_tokens == 33
    assert message.stopping.ignore_eos
    assert message.sampling.repetition_penalty == pytest.approx(1.1)
    assert message.speculation.max_draft_tokens == 4
    assert not message.HasField("logprobs")
    message = generation_pb2.GenerateRequest.FromString(_planned(8).message(_VOCAB_SIZE, None))
    assert message.speculation.mode == generation_pb2.SPECULATION_MODE_OFF


async def test_open_loop_sends_on_time_and_says_what_became_of_each() -> None:
    gateway = _Gateway()
    lengths = [5, _REFUSED, _BROKEN, 2, _ENDLESS]
    requests = [(0.1 * number, _planned(length, number)) for number, length in enumerate(lengths)]
    async with _sender(gateway) as sender:
        run = await sender.open_loop(requests, 4, drain_seconds=3.0)
        async with asyncio.timeout(10):
            while gateway.num_open:  # until the gateway has heard that the last one was cut off
                await asyncio.sleep(0.01)
    assert [one.status for one in run.outcomes] == ["finished", "refused", "INTERNAL", "finished", "unfinished"]
    first = run.outcomes[0]
    assert first.num_tokens == 5
    assert (first.num_steps, first.num_drafted, first.num_accepted) == (3, 8, 5)
    assert first.fallbacks == ("DRAFTER_LOST",)
    assert first.token_seconds is not None
    assert first.token_seconds > 0.018
    # Two tokens at once leave nothing to time.
    assert run.outcomes[3].token_seconds is None
    assert all(one.sent >= one.due for one in run.outcomes)
    assert len(run.send_lags) == 5


async def test_closed_loop_keeps_so_many_requests_open() -> None:
    gateway = _Gateway()
    requests = (_planned(4 + number % 3, number) for number in range(10_000))
    async with _sender(gateway) as sender:
        run = await sender.closed_loop(requests, None, concurrency=3, seconds=1.0)
    assert gateway.most_open == 3
    assert run.statuses()["unfinished"] <= 3
    assert run.statuses()["finished"] == len(run.outcomes) - run.statuses()["unfinished"] > 3


async def test_a_sender_that_is_held_up_is_found_out() -> None:
    async def hold_up() -> None:
        await asyncio.sleep(0.15)
        time.sleep(0.3)

    async with _sender(_Gateway()) as sender:
        task = asyncio.create_task(hold_up())
        run = await sender.open_loop([(0.05 * i, _planned(2, i)) for i in range(8)], 4, drain_seconds=5.0)
        await task
    found = figures_of(run, start=0.0, end=1.0, num_draft_tokens=4, limits=Limits(lag_ms=100.0))
    assert found["void"].startswith("the generator was late: send_lag")
    # The delay is in the first tokens' times as well: they count from when the request was due.
    assert found["first_token_p99_ms"] > 150


def _outcome(due: float, times: list[tuple[float, int]], status: str = "finished") -> Outcome:
    planned = PlannedRequest(0, 4, 8, 0.0, "", 0)
    return Outcome(planned, due, due, times, status, num_steps=2, num_drafted=4, num_accepted=2)


def test_figures() -> None:
    run = SenderRun(
        [
            _outcome(0.5, [(0.6, 1)]),  # before the window
            _outcome(1.0, [(1.1, 1), (1.12, 2), (1.14, 1)]),  # good: 100 ms, 3 tokens in 40 ms
            _outcome(1.2, [(2.5, 1), (2.52, 2)]),  # its first token took 1.3 s
            _outcome(1.4, [(1.5, 1), (1.6, 1)]),  # a token took 100 ms
            _outcome(1.6, [(1.7, 1)], "unfinished"),
            _outcome(1.7, [], "refused"),
            _outcome(1.8, [], "INTERNAL"),
            _outcome(2.0, [(2.1, 1)]),  # behind the window
        ],
        send_lags=[0.001, 0.002],
        loop_lags=[0.001],
    )
    found = figures_of(run, start=1.0, end=2.0, num_draft_tokens=4, limits=Limits())
    counts = {name: found[f"num_{name}"] for name in ("offered", "finished", "refused", "failed", "unfinished")}
    assert counts == {"offered": 6, "finished": 3, "refused": 1, "failed": 1, "unfinished": 1}
    assert found["failures"] == {"INTERNAL": 1}
    assert found["goodput_per_second"] == 1.0
    assert found["tokens_per_second"] == 4 + 2 + 1  # those of 2.5 s came after the window
    assert found["first_token_p50_ms"] == pytest.approx(100)
    assert found["token_p50_ms"] == pytest.approx(40 / 3)
    assert found["acceptance_rate"] == 0.5
    assert found["void"] is None


@pytest.mark.parametrize(
    ("num_draft_tokens", "drafted", "reason"),
    [(4, 0, "nothing was drafted: no reason given"), (None, 4, "there were drafts in a plain run"), (None, 0, None)],
)
def test_a_run_that_did_not_do_what_it_says_is_void(
    num_draft_tokens: int | None, drafted: int, reason: str | None
) -> None:
    outcome = _outcome(0.0, [(0.1, 1)])
    outcome.num_drafted = drafted
    found = figures_of(SenderRun([outcome]), start=0.0, end=1.0, num_draft_tokens=num_draft_tokens, limits=Limits())
    assert found["void"] == reason
