"""How requests end early: cancelled, late, drained, or with the verifier gone. Nothing may be left behind."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from gateway.request_trace import RequestTrace
from gateway.tokenizer import Tokenizer
from outrider.service.telemetry import Telemetry
from outrider.v1 import generation_pb2, verifier_pb2
from tests.gateway.fake_verifier import (
    FakeVerifier,
    RunningGateway,
    complete,
    eventually,
    next_of,
    rest_of,
    running_gateway,
    token_ids,
    update,
)

LENGTH = generation_pb2.FINISH_REASON_LENGTH
REQUEST = generation_pb2.GenerateRequest(token_ids=token_ids(1))


def one_token(message: verifier_pb2.OpenDecoding) -> list[verifier_pb2.SequenceUpdate]:
    return [update(message.sequence_id, [5], finish=LENGTH)]


async def fill_buffers(running: RunningGateway, verifier: FakeVerifier, sequence_id: int) -> None:
    """Send until gRPC's buffers towards a client that does not read are full, and what arrives stays where it is."""
    updates = running.links[0]._updates[sequence_id]
    async with asyncio.timeout(10):
        while len(updates._updates) < 20:
            verifier.send(update(sequence_id, [9] * 4000))
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("has_answer", [False, True])
async def test_cancelled_request_is_closed_at_the_verifier(verifier: FakeVerifier, has_answer: bool) -> None:
    async with running_gateway(verifier) as running:
        call = running.stub.Generate(REQUEST)
        sequence_id = (await verifier.next_open()).sequence_id
        if has_answer:
            verifier.send(update(sequence_id, [4]))
            assert (await next_of(call)).HasField("started")
            assert (await next_of(call)).HasField("chunk")
        call.cancel()
        await eventually(lambda: verifier.closed == [sequence_id], 1.0)
        await running.is_idle()
        # What was on its way for the sequence is dropped, and the stream goes on.
        verifier.send(update(sequence_id, [4]))
        verifier.script = one_token
        assert (await complete(running, token_ids=token_ids(1))).token_ids == [5]
    assert verifier.num_streams == 1


async def test_client_that_never_reads_is_closed_when_it_cancels(verifier: FakeVerifier, tokenizer: Tokenizer) -> None:
    """The handler then hangs in sending and not in waiting for the verifier; its clean-up must run all the same."""
    async with running_gateway(verifier, tokenizer=tokenizer) as running:
        call = running.stub.Generate(REQUEST)
        sequence_id = (await verifier.next_open()).sequence_id
        await fill_buffers(running, verifier, sequence_id)
        # The link is not held up by it.
        other = asyncio.create_task(complete(running, token_ids=token_ids(1)))
        other_id = (await verifier.next_open()).sequence_id
        verifier.send(update(other_id, [5], finish=LENGTH))
        assert (await other).token_ids == [5]
        call.cancel()
        await eventually(lambda: verifier.closed == [sequence_id], 2.0)
        await running.is_idle()


async def test_expired_deadline_closes_the_sequence(verifier: FakeVerifier) -> None:
    async with running_gateway(verifier) as running:
        call = running.stub.Generate(REQUEST, timeout=0.2)
        sequence_id = (await verifier.next_open()).sequence_id
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await eventually(lambda: verifier.closed == [sequence_id], 1.0)
        await running.is_idle()


async def test_cancelled_before_the_opening_was_sent_leaves_no_trace(verifier: FakeVerifier) -> None:
    async with running_gateway(verifier) as running:
        link = running.links[0]
        updates = link.open(verifier_pb2.OpenDecoding(sequence_id=77, token_ids=b"1234", num_prompt_tokens=1))
        updates.close()
        updates.close()
        verifier.script = one_token
        await complete(running, token_ids=token_ids(1))
    assert 77 not in verifier.opened
    assert verifier.closed == []


@pytest.mark.parametrize("is_polite", [False, True])
async def test_lost_verifier_ends_its_sequences_and_is_found_again(verifier: FakeVerifier, is_polite: bool) -> None:
    async with running_gateway(verifier) as running:
        call = running.stub.Generate(REQUEST)
        sequence_id = (await verifier.next_open()).sequence_id
        verifier.send(update(sequence_id, [4, 5]))
        assert (await next_of(call)).HasField("started")
        assert [token.id for token in (await next_of(call)).chunk.tokens] == [4, 5]
        if is_polite:
            verifier.break_stream()
        else:
            await verifier.stop()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert verifier.address in (caught.value.details() or "")
        await running.is_idle()
        if not is_polite:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await complete(running, token_ids=token_ids(1))
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            await verifier.start()
        await eventually(lambda: running.links[0].is_ready)
        verifier.script = one_token
        assert (await complete(running, token_ids=token_ids(1))).token_ids == [5]
    assert verifier.num_streams == 2


async def test_tokens_that_arrived_before_the_loss_reach_the_client(verifier: FakeVerifier) -> None:
    async with running_gateway(verifier) as running:
        call = running.stub.Generate(REQUEST)
        sequence_id = (await verifier.next_open()).sequence_id
        verifier.send(update(sequence_id, [4]))
        verifier.send(update(sequence_id, [5]))
        verifier.break_stream()
        seen: list[int] = []

        async def read_all() -> None:
            async for response in call:
                seen.extend(token.id for token in response.chunk.tokens)

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert seen == [4, 5]


async def test_draining_finishes_what_runs_and_refuses_what_is_new(verifier: FakeVerifier) -> None:
    async with running_gateway(verifier) as running:
        call = running.stub.Generate(REQUEST)
        sequence_id = (await verifier.next_open()).sequence_id
        verifier.send(update(sequence_id, [4]))
        assert (await next_of(call)).HasField("started")
        stopping = asyncio.create_task(running.stop())
        await eventually(lambda: running.gateway._admission.is_draining)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await complete(running, token_ids=token_ids(1))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "draining" in (caught.value.details() or "")
        assert not stopping.done()
        verifier.send(update(sequence_id, [5], finish=LENGTH))
        responses = await rest_of(call)
        assert responses[-1].finished.usage.num_output_tokens == 2
        await asyncio.wait_for(stopping, 5)


async def test_draining_that_takes_too_long_ends_with_unavailable(verifier: FakeVerifier) -> None:
    async with running_gateway(verifier, drain_seconds=0.1) as running:
        call = running.stub.Generate(REQUEST)
        await verifier.next_open()
        stopping = asyncio.create_task(running.stop())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await asyncio.wait_for(stopping, 5)


async def test_client_that_never_reads_does_not_hold_up_the_end(verifier: FakeVerifier) -> None:
    async with running_gateway(verifier, drain_seconds=0.1) as running:
        call = running.stub.Generate(REQUEST)
        await fill_buffers(running, verifier, (await verifier.next_open()).sequence_id)
        await asyncio.wait_for(running.stop(), 5)
        await running.is_idle()
        assert call.cancel(), "the call had ended, and held nothing up"


async def test_stop_string_closes_the_sequence_before_the_client_has_read(
    verifier: FakeVerifier, tokenizer: Tokenizer
) -> None:
    async with running_gateway(verifier, tokenizer=tokenizer) as running:
        request = generation_pb2.GenerateRequest(prompt="x", stopping=generation_pb2.StoppingParameters(stop=["fox"]))
        events = running.gateway.service._generator.generate(request, RequestTrace(Telemetry()))
        starting = asyncio.ensure_future(anext(events))
        sequence_id = (await verifier.next_open()).sequence_id
        verifier.send(update(sequence_id, tokenizer._encode("a fox runs")))
        assert isinstance(await starting, generation_pb2.Started)
        await eventually(lambda: verifier.closed == [sequence_id])
        await events.aclose()
        await running.is_idle()
