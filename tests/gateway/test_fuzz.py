"""Whatever clients and verifiers send: a status that says so, no crash, and other requests as if nothing had been."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from gateway.tokenizer import Tokenizer
from outrider.protocol.wire import pack_tokens
from outrider.v1 import common_pb2, generation_pb2, verifier_pb2
from tests.fuzz import Fuzzer
from tests.gateway.fake_verifier import FakeVerifier, RunningGateway, complete, eventually, running_gateway, token_ids
from tests.gateway.test_generate import steps_of

GENERATE = "/outrider.v1.GenerationService/Generate"
GET_MODEL = "/outrider.v1.GenerationService/GetModel"
MAX_MESSAGE_BYTES = 1 << 16
OUTPUT = list(range(10, 30))
LENGTH = generation_pb2.FINISH_REASON_LENGTH

Response, Update = verifier_pb2.DecodeResponse, verifier_pb2.SequenceUpdate

GOOD = [
    generation_pb2.GenerateRequest(
        prompt="a fox", stopping=generation_pb2.StoppingParameters(max_tokens=5, stop=["x"])
    ),
    generation_pb2.GenerateRequest(
        token_ids=token_ids(1, 2, 3),
        sampling=common_pb2.SamplingParameters(temperature=0.5, top_k=4, seed=1, logit_bias={1: 2.0}),
        speculation=generation_pb2.SpeculationParameters(max_draft_tokens=4),
        logprobs=2,
        token_texts=True,
    ),
]


@pytest.fixture(autouse=True)
def no_errors_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


@asynccontextmanager
async def bystanders(running: RunningGateway) -> AsyncIterator[None]:
    """Requests one after the other for as long as the context lasts, two at least."""
    is_over, num_done = False, 0

    async def run() -> None:
        nonlocal num_done
        while not is_over or num_done < 2:
            assert (await complete(running, token_ids=token_ids(7, 8, 9))).token_ids == OUTPUT
            num_done += 1
            await asyncio.sleep(0.005)

    task = asyncio.create_task(run())
    try:
        yield
        is_over = True
        await asyncio.wait_for(task, 10)
    finally:
        task.cancel()


async def status(channel: grpc.aio.Channel, method: str, request: bytes) -> str:
    make: Any = channel.unary_stream if method == GENERATE else channel.unary_unary
    call = make(method, None, None)(request, timeout=10)
    with contextlib.suppress(grpc.aio.AioRpcError):
        if method == GENERATE:
            async for _ in call:
                pass
        else:
            await call
    code: grpc.StatusCode = await call.code()
    return code.name


async def test_noise_from_clients(verifier: FakeVerifier, tokenizer: Tokenizer) -> None:
    """Catches requests that crash the gateway, end with INTERNAL, or reach a verifier that cannot take them."""
    fuzzer, codes = Fuzzer(4), Counter[str]()
    verifier.script = steps_of(OUTPUT, LENGTH)
    async with running_gateway(verifier, tokenizer=tokenizer, max_message_bytes=MAX_MESSAGE_BYTES) as running:
        async with bystanders(running):
            for number in range(400):
                code = await status(running.channel, GENERATE, fuzzer.wire(generation_pb2.GenerateRequest, GOOD))
                assert code in ("OK", "INVALID_ARGUMENT"), number
                codes[code] += 1
            for _ in range(40):
                assert await status(running.channel, GET_MODEL, fuzzer.noise()) in ("OK", "INVALID_ARGUMENT")
            for method in (GENERATE, GET_MODEL):
                too_long = b"\x12" + bytes(MAX_MESSAGE_BYTES + 1)
                assert await status(running.channel, method, too_long) == "RESOURCE_EXHAUSTED"
        await running.is_idle()
    assert min(codes["OK"], codes["INVALID_ARGUMENT"]) > 15


def bad_updates(fuzzer: Fuzzer, sequence_id: int) -> Iterator[verifier_pb2.SequenceUpdate]:
    """Updates of one sequence that no verifier of ours would send."""
    yield Update(sequence_id=sequence_id, token_ids=b"123", origins=b"1")
    yield Update(sequence_id=sequence_id, token_ids=pack_tokens([1]), origins=b"\x04\x04")
    yield Update(sequence_id=sequence_id, num_draft_tokens=2**32 - 1)
    yield Update(sequence_id=sequence_id, num_draft_tokens=2**32 - 1, num_accepted_tokens=2**32 - 1)
    yield Update(sequence_id=sequence_id, num_accepted_tokens=1)
    yield Update(sequence_id=sequence_id, token_ids=pack_tokens([2**32 - 1]), origins=b"\xff")
    yield Update(sequence_id=sequence_id, ended=verifier_pb2.Ended())
    yield Update(sequence_id=sequence_id, ended=verifier_pb2.Ended(finish_reason=99))  # type: ignore[arg-type]
    yield Update(sequence_id=sequence_id, ended=verifier_pb2.Ended(error=verifier_pb2.SequenceError(code=-7)))
    error = verifier_pb2.SequenceError(code=8, message="x" * 9000, retry_delay_seconds=float("nan"))
    yield Update(sequence_id=sequence_id, ended=verifier_pb2.Ended(error=error))
    error = verifier_pb2.SequenceError(code=14, message="\0", retry_delay_seconds=1e300)
    yield Update(sequence_id=sequence_id, ended=verifier_pb2.Ended(error=error))
    for _ in range(60):
        update = fuzzer.message(Update)
        update.sequence_id = sequence_id
        yield update


async def test_frames_of_a_verifier_that_contradict_themselves(verifier: FakeVerifier, tokenizer: Tokenizer) -> None:
    """Catches updates that cost more than the one request that they name, or for which memory is set aside unseen."""
    fuzzer = Fuzzer(5, ids=(1, 2, 3, 50, 2**63))
    victims: list[int] = []
    steps = steps_of(OUTPUT, LENGTH)

    def script(message: verifier_pb2.OpenDecoding) -> list[verifier_pb2.SequenceUpdate]:
        if message.token_ids == pack_tokens([1]):
            victims.append(message.sequence_id)
            return []
        return steps(message)

    verifier.script = script
    async with running_gateway(verifier, tokenizer=tokenizer) as running, bystanders(running):
        updates = bad_updates(fuzzer, 0)
        for bad in updates:
            call = running.stub.Generate(generation_pb2.GenerateRequest(token_ids=token_ids(1)), timeout=10)
            known = len(victims)
            await eventually(lambda known=known: len(victims) > known)  # type: ignore[misc]
            bad.sequence_id = victims[-1]
            # Never opened, or long over; and loads and drafters of any kind.
            alien = fuzzer.message(Response)
            for update in alien.updates:
                update.sequence_id = 2**40 + update.sequence_id % 2**32
            alien.ClearField("is_draining")
            assert verifier._outgoing is not None
            verifier._outgoing.put_nowait(alien)
            verifier.send(bad, Update(sequence_id=bad.sequence_id, ended=verifier_pb2.Ended(finish_reason=LENGTH)))
            with contextlib.suppress(grpc.aio.AioRpcError):
                async for _ in call:
                    pass
            assert (await call.code()) is not grpc.StatusCode.DEADLINE_EXCEEDED, bad
        assert verifier.num_streams == 1


async def test_bytes_of_a_verifier_that_are_no_message(verifier: FakeVerifier) -> None:
    """Catches a link that does not survive them, or that takes the other verifier's requests with it."""
    verifier.script = steps_of(OUTPUT, LENGTH)
    fuzzer, num_streams, num_handshakes = Fuzzer(6), 0, 0

    async def get_info(request: bytes, context: Any) -> bytes:
        nonlocal num_handshakes
        num_handshakes += 1
        if num_handshakes % 2:
            return b"\xff" + fuzzer.noise()
        return verifier_pb2.VerifierServiceGetInfoResponse(identity=verifier.identity).SerializeToString()

    async def decode(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        nonlocal num_streams
        num_streams += 1
        yield Response().SerializeToString()
        await asyncio.sleep(0.05)
        yield b"\xff" + fuzzer.noise()
        await asyncio.sleep(5)

    handlers = {
        "GetInfo": grpc.unary_unary_rpc_method_handler(get_info),
        "Decode": grpc.stream_stream_rpc_method_handler(decode),
    }
    server = grpc.aio.server()
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("outrider.v1.VerifierService", handlers)])
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        async with running_gateway(verifier, address) as running:
            codes = Counter[str]()
            async with asyncio.timeout(15):
                while num_streams < 2:
                    request = generation_pb2.GenerateRequest(token_ids=token_ids(7))
                    codes[await status(running.channel, GENERATE, request.SerializeToString())] += 1
                    await asyncio.sleep(0.01)
            # Those that had gone to the bad one had not begun, and went on to the other.
            assert set(codes) == {"OK"}
            await running.is_idle()
    finally:
        await server.stop(None)
