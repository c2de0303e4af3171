"""The verifier's face to gateways: bad requests, closing, limits, failures of the model, draining."""

from __future__ import annotations

import asyncio
import math
import os
import random
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from outrider.protocol.errors import code_number
from outrider.protocol.wire import pack_tokens
from outrider.v1 import common_pb2, verifier_pb2
from tests.services.conftest import Pair
from tests.services.harness import (
    Result,
    decode_client,
    drafter_is_empty,
    drafter_settings,
    eventually,
    fail_once,
    runner_of,
    running_drafter,
    running_verifier,
    verifier_is_empty,
    verifier_settings,
)
from tests.services.reference import greedy, prompts

PROMPT = prompts(3)[2]
NAN = math.nan


def error_of(result: Result) -> tuple[str, str]:
    """Name of the status that a sequence ended with, and the message."""
    assert result.ended is not None
    assert result.ended.HasField("error"), result.ended
    names = {code_number(code): code.name for code in grpc.StatusCode}
    return names[result.ended.error.code], result.ended.error.message


BAD: list[tuple[str, dict[str, Any]]] = [
    ("token_ids", {"token_ids": b""}),
    ("token_ids", {"token_ids": b"\1\0\0"}),
    ("token_ids", {"token_ids": pack_tokens([1, 64])}),
    ("token_ids", {"token_ids": pack_tokens([2**32 - 1])}),
    ("token_ids", {"token_ids": pack_tokens([1] * 256), "num_prompt_tokens": 256}),
    ("token_ids", {"token_ids": pack_tokens([1] * 5), "num_prompt_tokens": 3, "max_tokens": 2}),
    ("num_prompt_tokens", {"num_prompt_tokens": 0}),
    ("num_prompt_tokens", {"num_prompt_tokens": 4}),
    ("max_draft_tokens", {"max_draft_tokens": 33}),
    ("logprobs", {"logprobs": 21}),
    ("verification", {"verification": 99}),
    ("verification", {"verification": common_pb2.VERIFICATION_GREEDY, "sampling__temperature": 0.5}),
    ("verification", {"verification": common_pb2.VERIFICATION_GREEDY, "sampling__temperature": 1.0, "is_seeded": True}),
    ("no_drafter_reason", {"no_drafter_reason": 99}),
    ("sampling.seed", {"sampling__seed": None}),
    ("sampling.temperature", {"sampling__temperature": -1.0}),
    ("sampling.temperature", {"sampling__temperature": NAN}),
    ("sampling.temperature", {"sampling__temperature": 101.0}),
    ("sampling.top_p", {"sampling__top_p": 0.0}),
    ("sampling.top_p", {"sampling__top_p": 1.5}),
    ("sampling.min_p", {"sampling__min_p": -0.1}),
    ("sampling.repetition_penalty", {"sampling__repetition_penalty": 0.0}),
    ("sampling.presence_penalty", {"sampling__presence_penalty": 2.5}),
    ("sampling.frequency_penalty", {"sampling__frequency_penalty": math.inf}),
    ("sampling.logit_bias", {"sampling__logit_bias": {64: 1.0}}),
    ("sampling.logit_bias", {"sampling__logit_bias": {1: NAN}}),
    ("sampling.logit_bias", {"sampling__logit_bias": {1: 101.0}}),
    ("sampling.logit_bias", {"sampling__logit_bias": dict.fromkeys(range(301), 1.0)}),
]


def opening(sequence_id: int, **fields: Any) -> verifier_pb2.OpenDecoding:
    """A good opening with some fields replaced; `sampling__x` names a field of the sampling parameters."""
    message = verifier_pb2.OpenDecoding(
        sequence_id=sequence_id,
        token_ids=pack_tokens([1, 2, 3]),
        num_prompt_tokens=3,
        max_tokens=5,
        sampling=common_pb2.SamplingParameters(temperature=0.0, seed=1),
    )
    for name, value in fields.items():
        owner = message.sampling if name.startswith("sampling__") else message
        field = name.removeprefix("sampling__")
        if isinstance(value, dict):
            message.sampling.logit_bias.update(value)
        elif value is None:
            owner.ClearField(field)
        else:
            setattr(owner, field, value)
    return message


async def test_a_bad_opening_ends_one_sequence_and_names_the_field(pair: Pair) -> None:
    """Catches what reaches the kernels although nobody can compute with it, and a stream that ends for one request."""
    target, _ = pair
    async with running_verifier(verifier_settings(target)) as (verifier, _), decode_client(verifier.address) as client:
        openings = [opening(100 + index, **fields) for index, (_, fields) in enumerate(BAD)]
        results = {
            message.sequence_id: client.results.setdefault(message.sequence_id, Result()) for message in openings
        }
        good, result = client.open(PROMPT, max_tokens=10)
        client.send(verifier_pb2.DecodeRequest(opens=openings))
        await eventually(lambda: all(result.done.is_set() for result in [*results.values(), result]))
        for (field, fields), result_of_bad in zip(BAD, results.values(), strict=True):
            code, message = error_of(result_of_bad)
            assert (code, message.split(":")[0]) == ("INVALID_ARGUMENT", field), fields
        assert client.results[good].token_ids == greedy(target, PROMPT, 10)
        assert await verifier_is_empty(client)


async def test_both_numbers_of_a_prompt_that_is_too_long(pair: Pair) -> None:
    target, _ = pair
    async with running_verifier(verifier_settings(target)) as (verifier, _), decode_client(verifier.address) as client:
        _, message = error_of(await client.decode([1] * 300))
        assert "300" in message
        assert "256" in message


async def test_ids_that_are_used_twice_and_ids_that_nobody_opened(pair: Pair) -> None:
    target, _ = pair
    async with running_verifier(verifier_settings(target)) as (verifier, _), decode_client(verifier.address) as client:
        twice, result = client.open(PROMPT)
        await eventually(lambda: len(result.token_ids) > 3)
        client.send(verifier_pb2.DecodeRequest(opens=[opening(twice)], closes=[7777, 2**64 - 1]))
        await eventually(result.done.is_set)
        assert error_of(result) == ("INVALID_ARGUMENT", "sequence_id: is open already")
        # An id in use whose second opening is bad: the client here insists that nothing follows the end.
        for _ in range(5):
            twice, result = client.open(PROMPT)
            await eventually(lambda: len(client.results[client.last_id].token_ids) > 3)
            client.send(verifier_pb2.DecodeRequest(opens=[opening(twice, logprobs=99)]))
            await eventually(result.done.is_set)
            assert error_of(result)[0] == "INVALID_ARGUMENT"
            await eventually(lambda: verifier_is_empty(client))
        assert (await client.decode(PROMPT, max_tokens=5)).token_ids == greedy(target, PROMPT, 5)


async def test_a_frame_that_does_not_parse_ends_its_stream_only(pair: Pair) -> None:
    target, _ = pair
    async with (
        running_verifier(verifier_settings(target)) as (verifier, _),
        decode_client(verifier.address) as client,
        grpc.aio.insecure_channel(verifier.address) as channel,
    ):
        call = channel.stream_stream("/outrider.v1.VerifierService/Decode", None, None)(iter([b"\xff\xff\xff"]))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/outrider.v1.VerifierService/GetInfo", None, None)(b"\xff")
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert (await client.decode(PROMPT, max_tokens=5)).token_ids == greedy(target, PROMPT, 5)


async def test_random_frames(pair: Pair) -> None:
    """Catches a frame that kills the engine; the fields are random, many of them nearly right."""
    target, _ = pair
    chance = random.Random(5)
    async with running_verifier(verifier_settings(target)) as (verifier, _), decode_client(verifier.address) as client:
        client.reuses_ids = True
        for number in range(300):
            _, bad = chance.choice(BAD)
            message = opening(1000 + number - chance.choice([0, 0, 1]), **(bad if chance.random() < 0.5 else {}))
            message.drafter_address = chance.choice(["", "127.0.0.1:1", "?"])
            message.traceparent = chance.choice(["", "00-zz-yy-01", "\U0001f642"])
            message.stop_token_ids.extend(chance.choices([0, 63, 2**32 - 1], k=chance.randint(0, 3)))
            closes = [1000 + number - chance.randint(0, 9) for _ in range(chance.randint(0, 2))]
            for sequence_id in (message.sequence_id, *closes):
                client.results[sequence_id] = Result()
            client.send(verifier_pb2.DecodeRequest(opens=[message], closes=closes))
            if number % 10 == 0:
                await asyncio.sleep(0.01)
        await eventually(lambda: verifier_is_empty(client))
        assert client.error is None
        assert (await client.decode(PROMPT, max_tokens=5)).token_ids == greedy(target, PROMPT, 5)


@pytest.mark.parametrize("moment", ["prefill", "decoding", "waiting"])
@pytest.mark.parametrize("way", ["close", "cancel", "half-close"])
async def test_closing_frees_all_blocks_in_both_services(pair: Pair, moment: str, way: str) -> None:
    """Catches blocks that outlive their sequence, wherever it was."""
    target, draft = pair
    # Chunks of 64: a prompt of 223 tokens takes four steps. With one place, the second sequence waits.
    settings = verifier_settings(target, max_num_batched_tokens=64, max_running=1, cuda_graphs=False)
    async with (
        running_drafter(drafter_settings(model=draft, max_num_batched_tokens=64)) as drafter,
        running_verifier(settings) as (verifier, service),
        decode_client(verifier.address) as observer,
    ):
        async with decode_client(verifier.address) as client:
            await client.use_drafters(drafter.address)
            prompt = prompts(12, step=20)[11] if moment == "prefill" else PROMPT
            sequence_id, result = client.open(prompt, drafter=drafter.address)
            waiting_id, _ = client.open(PROMPT, drafter=drafter.address)
            if moment != "prefill":
                await eventually(lambda: len(result.token_ids) > 10)
            if way == "close":
                sequence_ids = [waiting_id, sequence_id] if moment == "waiting" else [sequence_id, waiting_id]
                client.send(verifier_pb2.DecodeRequest(closes=sequence_ids))
                await eventually(lambda: verifier_is_empty(observer))
                await eventually(lambda: drafter_is_empty(drafter.address))
                num_tokens = len(result.token_ids)
                await asyncio.sleep(0.1)
                assert len(result.token_ids) == num_tokens
                assert result.ended is None, "the gateway ended it: there is nobody to tell"
            elif way == "half-close":
                client.finish()
        await eventually(lambda: verifier_is_empty(observer))
        await eventually(lambda: drafter_is_empty(drafter.address))
        await eventually(lambda: len(service._sessions) == 1)
        assert not len(service._engine._sequences)
        assert not service._engine._sequences._at_drafters


async def test_more_than_may_wait_are_refused(pair: Pair) -> None:
    target, _ = pair
    settings = verifier_settings(target, max_running=2, max_waiting=3)
    async with running_verifier(settings) as (verifier, _), decode_client(verifier.address) as client:
        # All in one frame: places that are free do not count as waiting.
        openings = [opening(100 + number, max_tokens=30) for number in range(8)]
        results = [client.results.setdefault(message.sequence_id, Result()) for message in openings]
        client.send(verifier_pb2.DecodeRequest(opens=openings))
        await eventually(lambda: all(result.done.is_set() for result in results))
        refused = [result for result in results if result.ended and result.ended.HasField("error")]
        assert [error_of(result)[0] for result in refused] == ["RESOURCE_EXHAUSTED"] * 3
        assert refused == results[5:]
        assert all(result.ended.error.retry_delay_seconds > 0 for result in refused if result.ended)
        assert await verifier_is_empty(client)


async def test_an_exception_in_one_step(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an engine that dies of one bad step, and sequences that are never told."""
    target, draft = pair
    async with (
        running_drafter(drafter_settings(model=draft)) as drafter,
        running_verifier(verifier_settings(target, cuda_graphs=False)) as (verifier, service),
        decode_client(verifier.address) as client,
    ):
        await client.use_drafters(drafter.address)
        for _ in range(2):
            with monkeypatch.context() as patch:
                fail_once(patch, runner_of(service), at_call=5)
                results = await asyncio.gather(
                    *(client.decode(prompt, drafter=drafter.address, max_tokens=40) for prompt in prompts(3))
                )
            failed = [result for result in results if result.ended and result.ended.HasField("error")]
            assert failed
            for result in failed:
                code, message = error_of(result)
                assert code == "INTERNAL"
                assert "planted" not in message, "what an exception says may be nobody's business"
            assert await verifier_is_empty(client)
            await eventually(lambda: drafter_is_empty(drafter.address))
            result = await client.decode(PROMPT, drafter=drafter.address, max_tokens=20)
            assert result.token_ids == greedy(target, PROMPT, 20)
            assert result.reasons == []


async def test_a_device_that_fails_for_good(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a process that stays up without an engine: its gateways would wait until their deadlines."""
    target, _ = pair
    signals: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: signals.append(number))
    settings = verifier_settings(target, max_running=1, drain_seconds=20)
    async with running_verifier(settings) as (verifier, service), decode_client(verifier.address) as client:
        fail_once(monkeypatch, runner_of(service), at_call=1, times=1000)
        opened = [client.open(PROMPT, max_tokens=40) for _ in range(4)]
        await eventually(lambda: client.error is not None)
        assert isinstance(client.error, grpc.aio.AioRpcError)
        assert client.error.code() == grpc.StatusCode.UNAVAILABLE
        assert len([1 for _, result in opened if result.ended]) == 2
        assert signals == [15]
        # What the signal would have brought about does not wait for sequences that nobody computes.
        async with asyncio.timeout(5):
            await verifier.stop()


async def test_draining_lets_what_runs_end_and_takes_nothing_new(pair: Pair) -> None:
    target, draft = pair
    async with (
        running_drafter(drafter_settings(model=draft)) as drafter,
        running_verifier(verifier_settings(target, drain_seconds=30)) as (verifier, _),
        decode_client(verifier.address) as client,
    ):
        await client.use_drafters(drafter.address)
        _, running = client.open(PROMPT, drafter=drafter.address, max_tokens=100)
        await eventually(lambda: len(running.token_ids) > 5)
        stopping = asyncio.create_task(verifier.stop())
        await asyncio.sleep(0.05)
        refused = await client.decode(PROMPT, max_tokens=5)
        assert error_of(refused)[0] == "UNAVAILABLE"
        await eventually(running.done.is_set)
        assert running.token_ids == greedy(target, PROMPT, 100)
        assert running.reasons == []
        async with asyncio.timeout(5):
            await stopping


async def test_draining_waits_until_the_last_end_is_on_its_way(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches last tokens that are lost, because the stream is closed between a sequence's end and its report."""
    target, _ = pair
    async with (
        running_verifier(verifier_settings(target, drain_seconds=30)) as (verifier, service),
        decode_client(verifier.address) as client,
    ):
        reporter = service._engine._reporter
        report = reporter.report

        def slow(*arguments: Any) -> None:
            time.sleep(0.12)
            report(*arguments)

        monkeypatch.setattr(reporter, "report", slow)
        _, result = client.open(PROMPT, max_tokens=4)
        await eventually(lambda: len(result.token_ids) > 0)
        await verifier.stop()
        await eventually(result.done.is_set)
        assert result.finish == "LENGTH"
        assert result.token_ids == greedy(target, PROMPT, 4)


async def test_a_draining_drafter_keeps_its_sequences_and_refuses_new_ones(pair: Pair) -> None:
    """Catches a drafter that never gets to its end, because new sequences keep coming."""
    target, draft = pair
    async with (
        running_drafter(drafter_settings(model=draft, drain_seconds=30, cuda_graphs=False)) as drafter,
        running_verifier(verifier_settings(target, cuda_graphs=False)) as (verifier, _),
        decode_client(verifier.address) as client,
    ):
        await client.use_drafters(drafter.address)
        _, running = client.open(PROMPT, drafter=drafter.address, max_tokens=150)
        await eventually(lambda: len(running.token_ids) > 5)
        stopping = asyncio.create_task(drafter.stop())
        await client.drafters_become(verifier_pb2.DRAFTER_STATE_DRAINING, drafter.address)
        late = await client.decode(PROMPT, drafter=drafter.address, max_tokens=5)
        assert late.reasons == ["NO_DRAFTER"]
        # A verifier that dials now is not told that the drafter is ready.
        async with (
            running_verifier(verifier_settings(target)) as (other, _),
            decode_client(other.address) as newcomer,
        ):
            await newcomer.use_drafters(drafter.address, state=verifier_pb2.DRAFTER_STATE_CONNECTING)
            await eventually(lambda: "UNAVAILABLE" in newcomer.drafters[drafter.address].detail)
        await eventually(running.done.is_set)
        assert running.reasons == []
        assert running.token_ids == greedy(target, PROMPT, 150)
        async with asyncio.timeout(5):
            await stopping


async def test_the_first_frame_tells_the_state_of_everything(pair: Pair) -> None:
    target, draft = pair
    async with (
        running_drafter(drafter_settings(model=draft)) as drafter,
        running_verifier(verifier_settings(target)) as (verifier, _),
        decode_client(verifier.address) as client,
        grpc.aio.insecure_channel(verifier.address) as channel,
    ):
        await client.use_drafters(drafter.address)

        async def nothing() -> AsyncIterator[bytes]:
            await asyncio.sleep(60)
            yield b""

        call = channel.stream_stream(
            "/outrider.v1.VerifierService/Decode", None, verifier_pb2.DecodeResponse.FromString
        )(nothing())
        async for frame in call:
            assert [status.address for status in frame.drafters] == [drafter.address]
            assert frame.load.num_free_kv_blocks == frame.load.num_kv_blocks > 0
            break
        call.cancel()
        info = await client.stub.GetInfo(verifier_pb2.VerifierServiceGetInfoRequest())
        assert info.identity.name == "target"
        assert (info.identity.vocabulary_size, info.identity.max_length) == (64, 256)
        assert info.drafters[0].state == verifier_pb2.DRAFTER_STATE_READY
