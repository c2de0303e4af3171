"""The gateway's queue as clients meet it, over gRPC."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from gateway.auth import Caller
from gateway.request_trace import RequestTrace
from gateway.tokenizer import Tokenizer
from outrider.service.telemetry import Telemetry
from outrider.v1 import common_pb2, generation_pb2, verifier_pb2
from tests.gateway.fake_verifier import (
    FakeVerifier,
    GenerateCall,
    RunningGateway,
    complete,
    eventually,
    running_gateway,
    token_ids,
)
from tests.gateway.fake_verifier import update as step

LENGTH = generation_pb2.FINISH_REASON_LENGTH


def start(running: RunningGateway, prompt: int = 1, **options: Any) -> GenerateCall:
    return running.stub.Generate(generation_pb2.GenerateRequest(token_ids=token_ids(prompt)), **options)


async def outcome(call: GenerateCall) -> grpc.StatusCode:
    """How a call ends."""
    while True:
        try:
            if not isinstance(await call.read(), generation_pb2.GenerateResponse):
                break
        except (grpc.aio.AioRpcError, asyncio.CancelledError):
            break
    code: grpc.StatusCode = await call.code()
    return code


def retry_delay(error: grpc.aio.AioRpcError) -> float:
    retry = error_details_pb2.RetryInfo()
    assert rpc_status.from_call(error).details[0].Unpack(retry)  # type: ignore[arg-type]
    return float(retry.retry_delay.ToNanoseconds() / 1e9)


async def test_waiting_then_running_and_the_wait_is_told(verifier: FakeVerifier) -> None:
    """Catches a queue whose wait stays invisible, and a full one that says no late or without a time."""
    verifier.max_running = 1
    async with running_gateway(verifier, max_queued_requests=1) as running:
        admission = running.gateway._admission
        first = start(running, 1)
        opened = await verifier.next_open()
        waiting = asyncio.create_task(complete(running, token_ids=token_ids(2)))
        await eventually(lambda: admission.num_waiting == 1)
        began = time.monotonic()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await complete(running, token_ids=token_ids(3))
        assert time.monotonic() - began < 1.0
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert retry_delay(caught.value) > 0
        await asyncio.sleep(0.3)
        assert len(verifier.opened) == 1
        verifier.send(step(opened.sequence_id, [4], finish=LENGTH))
        assert await outcome(first) is grpc.StatusCode.OK
        opened = await verifier.next_open()
        verifier.send(step(opened.sequence_id, [5], finish=LENGTH))
        assert (await waiting).finished.timings.queue_seconds > 0.3
        await running.is_idle()


@pytest.mark.parametrize("how", ["cancelled", "out of time"])
async def test_a_call_that_ends_in_the_queue_leaves_nothing(verifier: FakeVerifier, how: str) -> None:
    """Catches a queued request that the verifier gets although nobody waits for its answer."""
    async with running_gateway(verifier, max_concurrent_sequences=1) as running:
        admission = running.gateway._admission
        first = start(running, 1)
        opened = await verifier.next_open()
        gone = start(running, 2, timeout=0.4 if how == "out of time" else None)
        await eventually(lambda: admission.num_waiting == 1)
        last = start(running, 3)
        await eventually(lambda: admission.num_waiting == 2)
        if how == "cancelled":
            gone.cancel()
        codes = {"cancelled": grpc.StatusCode.CANCELLED, "out of time": grpc.StatusCode.DEADLINE_EXCEEDED}
        assert await outcome(gone) is codes[how]
        await eventually(lambda: admission.num_waiting == 1)
        for call in (first, last):
            verifier.send(step(opened.sequence_id, [4], finish=LENGTH))
            assert await outcome(call) is grpc.StatusCode.OK
            if call is first:
                opened = await verifier.next_open()
        assert [list(message.token_ids[:1]) for message in verifier.opened.values()] == [[1], [3]]
        await running.is_idle()


async def test_a_deadline_that_the_queue_cannot_hold_is_refused_at_once(verifier: FakeVerifier) -> None:
    """Catches clients left waiting for what is known not to come."""
    async with running_gateway(verifier, max_concurrent_sequences=1) as running:
        first = start(running, 1)
        opened = await verifier.next_open()
        await asyncio.sleep(0.6)
        verifier.send(step(opened.sequence_id, [4], finish=LENGTH))
        assert await outcome(first) is grpc.StatusCode.OK
        running_now, waiting = start(running, 1), start(running, 2)
        await eventually(lambda: running.gateway._admission.num_waiting == 1)
        began = time.monotonic()
        hurried = start(running, 3, timeout=0.8)
        assert await outcome(hurried) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert time.monotonic() - began < 0.5
        for call in (running_now, waiting):
            call.cancel()
        await running.is_idle()


async def test_bad_requests_do_not_wait(verifier: FakeVerifier, tokenizer: Tokenizer) -> None:
    """Catches a client who hears after a long wait that a field is wrong."""
    bad = {
        "sampling.top_p": generation_pb2.GenerateRequest(prompt="x", sampling=common_pb2.SamplingParameters(top_p=2.0)),
        "token_ids": generation_pb2.GenerateRequest(token_ids=token_ids(*[1] * 5000)),
    }
    async with running_gateway(verifier, tokenizer=tokenizer, max_concurrent_sequences=1) as running:
        first = start(running, 1)
        await verifier.next_open()
        for field, request in bad.items():
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await running.stub.Generate(request).read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert field in (caught.value.details() or "")
        first.cancel()
        await running.is_idle()


async def test_huge_prompts_are_no_way_around_the_queue(
    verifier: FakeVerifier, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches tokenizing for requests without a place, and clients that leave their tokenizing behind."""
    num_encoding = most = 0

    async def slow(text: str, **_: object) -> list[int]:
        nonlocal num_encoding, most
        num_encoding += 1
        most = max(most, num_encoding)
        try:
            await asyncio.sleep(0.2)
        finally:
            num_encoding -= 1
        return [1]

    monkeypatch.setattr(tokenizer, "encode", slow)
    async with running_gateway(
        verifier, tokenizer=tokenizer, max_concurrent_sequences=2, max_queued_requests=4
    ) as running:
        calls = [running.stub.Generate(generation_pb2.GenerateRequest(prompt="x" * 10_000)) for _ in range(8)]
        # The two whose prompts are being tokenized leave: their places are not free before that is over.
        await eventually(lambda: num_encoding == 2)
        for call in calls:
            call.cancel()
        for _ in range(3):
            calls.append(running.stub.Generate(generation_pb2.GenerateRequest(prompt="x")))
            await asyncio.sleep(0.02)
            calls[-1].cancel()
        await running.is_idle()
    assert most == 2


async def test_draining_refuses_the_queue_with_unavailable(verifier: FakeVerifier) -> None:
    """Catches requests that wait in a gateway that ends instead of going on to another one."""
    async with running_gateway(verifier, max_concurrent_sequences=1) as running:
        first = start(running, 1)
        opened = await verifier.next_open()
        waiting = start(running, 2)
        await eventually(lambda: running.gateway._admission.num_waiting == 1)
        stopping = asyncio.create_task(running.stop())
        assert await outcome(waiting) is grpc.StatusCode.UNAVAILABLE
        assert not stopping.done()
        verifier.send(step(opened.sequence_id, [4], finish=LENGTH))
        assert await outcome(first) is grpc.StatusCode.OK
        await asyncio.wait_for(stopping, 5)


async def test_no_verifier_is_told_at_once(verifier: FakeVerifier) -> None:
    """Catches a queue in front of a door that is shut."""
    verifier.max_running = 1
    async with running_gateway(verifier) as running:
        calls = [start(running, 1)]
        await verifier.next_open()
        calls += [start(running, 2), start(running, 3)]
        await eventually(lambda: running.gateway._admission.num_waiting == 2)
        await verifier.stop()
        assert [await outcome(call) for call in calls] == [grpc.StatusCode.UNAVAILABLE] * 3
        assert await outcome(start(running, 4)) is grpc.StatusCode.UNAVAILABLE
        await running.is_idle()


async def test_callers_share_the_places(verifier: FakeVerifier) -> None:
    """Catches a front whose callers never reach the queue."""
    async with running_gateway(verifier, max_concurrent_sequences=1) as running:
        generator = running.gateway.service._generator

        async def run(caller: Caller, prompt: int) -> None:
            request = generation_pb2.GenerateRequest(token_ids=token_ids(prompt))
            async for _ in generator.generate(request, RequestTrace(Telemetry()), caller=caller):
                pass

        prompts = [(Caller("alice"), 1), (Caller("alice"), 2), (Caller("alice"), 3), (Caller("bob"), 4)]
        tasks = []
        for caller, prompt in prompts:
            tasks.append(asyncio.create_task(run(caller, prompt)))
            await asyncio.sleep(0)
        order = []
        for _ in prompts:
            opened = await verifier.next_open()
            order.append(opened.token_ids[0])
            verifier.send(step(opened.sequence_id, [4], finish=LENGTH))
        await asyncio.gather(*tasks)
        assert order == [1, 4, 2, 3]
        await running.is_idle()


async def test_a_request_that_goes_on_to_another_verifier_keeps_its_place(
    verifier: FakeVerifier, other_verifier: FakeVerifier
) -> None:
    """Catches a place that is given to the next one when a verifier refuses, while its request runs elsewhere."""
    error = verifier_pb2.SequenceError(code=grpc.StatusCode.UNAVAILABLE.value[0], message="draining")
    verifier.script = lambda message: [step(message.sequence_id, error=error)]
    async with running_gateway(verifier, other_verifier, max_concurrent_sequences=1) as running:
        admission = running.gateway._admission
        calls = [start(running, 1)]
        opened = await other_verifier.next_open()
        calls.append(start(running, 2))
        await eventually(lambda: admission.num_waiting == 1)
        assert admission.num_running == 1
        assert len(verifier.opened) <= 1
        other_verifier.send(step(opened.sequence_id, [4], finish=LENGTH))
        assert await outcome(calls[0]) is grpc.StatusCode.OK
        opened = await other_verifier.next_open()
        other_verifier.send(step(opened.sequence_id, [4], finish=LENGTH))
        assert await outcome(calls[1]) is grpc.StatusCode.OK
        await running.is_idle()
