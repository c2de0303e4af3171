"""Where sequences go: verifiers, drafters, second tries, and which verifiers are let in."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import grpc
import pytest

from gateway import verifier_link
from gateway.tokenizer import Tokenizer
from outrider.protocol.wire import unpack_tokens
from outrider.v1 import common_pb2, generation_pb2, verifier_pb2
from tests.gateway.fake_verifier import (
    CONNECTING,
    INCOMPATIBLE,
    READY,
    FakeVerifier,
    complete,
    eventually,
    next_of,
    prompt_of,
    rest_of,
    running_gateway,
    statuses,
    token_ids,
    update,
)

LENGTH = generation_pb2.FINISH_REASON_LENGTH
REQUEST = generation_pb2.GenerateRequest(token_ids=token_ids(1))
OFF = generation_pb2.SpeculationParameters(mode=generation_pb2.SPECULATION_MODE_OFF)


def one_token(message: verifier_pb2.OpenDecoding) -> list[verifier_pb2.SequenceUpdate]:
    return [update(message.sequence_id, [5], finish=LENGTH)]


def refusal(code: grpc.StatusCode):  # type: ignore[no-untyped-def]
    error = verifier_pb2.SequenceError(code=code.value[0], message="not here")
    return lambda message: [update(message.sequence_id, error=error)]


async def test_sequences_go_to_the_least_loaded_verifier(verifier: FakeVerifier, other_verifier: FakeVerifier) -> None:
    async with running_gateway(verifier, other_verifier) as running:
        await eventually(lambda: all(link.is_ready for link in running.links))
        calls = [running.stub.Generate(REQUEST) for _ in range(4)]
        await eventually(lambda: len(verifier.opened) == len(other_verifier.opened) == 2)
        for sequence_id in other_verifier.opened:
            other_verifier.send(update(sequence_id, [5], finish=LENGTH))
        await eventually(lambda: running.num_sequences == 2)
        calls += [running.stub.Generate(REQUEST) for _ in range(2)]
        await eventually(lambda: len(other_verifier.opened) == 4)
        assert len(verifier.opened) == 2
        for call in calls:
            call.cancel()
        await running.is_idle()


async def test_lost_verifier_is_left_out(verifier: FakeVerifier, other_verifier: FakeVerifier) -> None:
    other_verifier.script = one_token
    async with running_gateway(verifier, other_verifier) as running:
        await eventually(lambda: all(link.is_ready for link in running.links))
        await verifier.stop()
        await eventually(lambda: not running.links[0].is_ready)
        for _ in range(3):
            completion = await complete(running, token_ids=token_ids(1))
            assert completion.finished.usage.num_output_tokens == 1


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED])
async def test_refused_sequence_goes_to_the_other_verifier(
    verifier: FakeVerifier, other_verifier: FakeVerifier, code: grpc.StatusCode
) -> None:
    verifier.script, other_verifier.script = refusal(code), one_token
    async with running_gateway(verifier, other_verifier) as running:
        await eventually(lambda: all(link.is_ready for link in running.links))
        completion = await complete(running, token_ids=token_ids(1, 2), sampling={"seed": 3})
        assert completion.token_ids == [5]
        opened = [await verifier.next_open(), await other_verifier.next_open()]
        assert [prompt_of(message) for message in opened] == [[1, 2], [1, 2]]
        # A verifier that refuses is passed over for a moment.
        await complete(running, token_ids=token_ids(1))
        assert len(verifier.opened) == 1
        await running.is_idle()


async def test_verifier_lost_before_its_first_answer_is_replaced(
    verifier: FakeVerifier, other_verifier: FakeVerifier
) -> None:
    other_verifier.script = one_token
    async with running_gateway(verifier, other_verifier) as running:
        await eventually(lambda: all(link.is_ready for link in running.links))
        completing = asyncio.create_task(complete(running, token_ids=token_ids(1)))
        await verifier.next_open()
        verifier.break_stream()
        assert (await completing).token_ids == [5]


async def test_second_refusal_and_errors_of_the_request_are_final(
    verifier: FakeVerifier, other_verifier: FakeVerifier
) -> None:
    verifier.script = other_verifier.script = refusal(grpc.StatusCode.RESOURCE_EXHAUSTED)
    async with running_gateway(verifier, other_verifier) as running:
        await eventually(lambda: all(link.is_ready for link in running.links))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await complete(running, token_ids=token_ids(1))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (len(verifier.opened), len(other_verifier.opened)) == (1, 1)
        verifier.script = other_verifier.script = refusal(grpc.StatusCode.INVALID_ARGUMENT)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await complete(running, token_ids=token_ids(1))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert len(verifier.opened) + len(other_verifier.opened) == 3


async def test_started_request_is_not_tried_again(verifier: FakeVerifier, other_verifier: FakeVerifier) -> None:
    async with running_gateway(verifier, other_verifier) as running:
        await eventually(lambda: all(link.is_ready for link in running.links))
        call = running.stub.Generate(REQUEST)
        sequence_id = (await verifier.next_open()).sequence_id
        verifier.send(update(sequence_id, [4]))
        assert (await next_of(call)).HasField("started")
        verifier.break_stream()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rest_of(call)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert other_verifier.opened == {}


async def test_drafters_are_told_first_and_chosen_by_load(verifier: FakeVerifier) -> None:
    verifier.drafters = statuses(d1=READY, d2=READY, d3=CONNECTING)
    async with running_gateway(verifier, drafters=("d1:1", "d2:1", "d3:1")) as running:
        assert list(verifier.frames[0].drafters.addresses) == ["d1:1", "d2:1", "d3:1"]
        calls = [running.stub.Generate(REQUEST) for _ in range(4)]
        opened = [await verifier.next_open() for _ in calls]
        assert sorted(message.drafter_address for message in opened) == ["d1:1", "d1:1", "d2:1", "d2:1"]
        assert all(message.no_drafter_reason == 0 for message in opened)
        model = await running.stub.GetModel(generation_pb2.GetModelRequest())
        members = [(m.address, m.is_ready, m.num_sequences, m.detail) for m in model.drafters]
        assert members == [("d1:1", True, 2, ""), ("d2:1", True, 2, ""), ("d3:1", False, 0, "d3 is off")]
        verifier.report(d1=CONNECTING)
        await eventually(lambda: running.links[0].drafters["d1:1"].state == CONNECTING)
        calls.append(running.stub.Generate(REQUEST))
        assert (await verifier.next_open()).drafter_address == "d2:1"
        for call in calls:
            call.cancel()
        await running.is_idle()
    assert all(not frame.HasField("drafters") for frame in verifier.frames[1:])


@pytest.mark.parametrize(
    ("states", "speculation", "reason"),
    [
        ({}, None, common_pb2.FALLBACK_REASON_NO_DRAFTER),
        ({"d1": CONNECTING}, None, common_pb2.FALLBACK_REASON_NO_DRAFTER),
        ({"d1": INCOMPATIBLE, "d2": CONNECTING}, None, common_pb2.FALLBACK_REASON_NO_DRAFTER),
        ({"d1": INCOMPATIBLE, "d2": INCOMPATIBLE}, None, common_pb2.FALLBACK_REASON_INCOMPATIBLE_DRAFTER),
        ({"d1": READY}, OFF, common_pb2.FALLBACK_REASON_CLIENT_DISABLED),
        ({}, OFF, common_pb2.FALLBACK_REASON_CLIENT_DISABLED),
    ],
)
async def test_reason_for_no_drafter(
    verifier: FakeVerifier,
    states: dict[str, verifier_pb2.DrafterState],
    speculation: generation_pb2.SpeculationParameters | None,
    reason: common_pb2.FallbackReason,
) -> None:
    verifier.drafters = statuses(**states)
    verifier.script = one_token
    addresses = tuple(f"{name}:1" for name in states)
    async with running_gateway(verifier, drafters=addresses, drafter_wait_seconds=0) as running:
        await eventually(lambda: len(running.links[0].drafters) == len(states))
        await complete(running, token_ids=token_ids(1), speculation=speculation)
        message = await verifier.next_open()
    assert message.drafter_address == ""
    assert message.no_drafter_reason == reason


async def test_start_waits_for_a_drafter_but_not_for_ever(verifier: FakeVerifier) -> None:
    async def report_soon() -> None:
        await eventually(lambda: verifier.num_streams == 1)
        await asyncio.sleep(0.2)
        verifier.report(d1=READY)

    reporting = asyncio.create_task(report_soon())
    async with running_gateway(verifier, drafters=("d1:1",)) as running:
        assert running.links[0].drafters["d1:1"].state == READY
    await reporting
    verifier.drafters = statuses(d1=CONNECTING)
    async with running_gateway(verifier, drafters=("d1:1",), drafter_wait_seconds=0.1) as running:
        assert running.links[0].is_ready


async def test_opens_of_one_tick_travel_in_one_frame_and_large_ones_in_several(
    verifier: FakeVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_gateway(verifier) as running:
        link = running.links[0]

        def open_all(first: int, size: int) -> None:
            for number in range(first, first + 6):
                link.open(verifier_pb2.OpenDecoding(sequence_id=number, token_ids=b"1234" * size))

        open_all(100, 1)
        await eventually(lambda: len(verifier.opened) == 6)
        assert [len(frame.opens) for frame in verifier.frames[1:]] == [6]
        monkeypatch.setattr(verifier_link, "FRAME_BYTES", 4000)
        open_all(200, 500)
        await eventually(lambda: len(verifier.opened) == 12)
        assert [len(frame.opens) for frame in verifier.frames[2:]] == [2, 2, 2]
        assert len(unpack_tokens(verifier.opened[205].token_ids)) == 500


@pytest.mark.parametrize(
    ("field", "word"),
    [("vocabulary_size",) * 2, ("max_length", "context_length"), ("tokenizer_fingerprint",) * 2],
)
async def test_verifier_with_another_model_is_refused(
    verifier: FakeVerifier,
    other_verifier: FakeVerifier,
    field: str,
    word: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(verifier_link, "TIMINGS", replace(verifier_link.TIMINGS, refused_backoff_seconds=0.1))
    setattr(other_verifier.identity, field, "abc" if field == "tokenizer_fingerprint" else 999)
    other_verifier.identity.revision = "r2"
    address = other_verifier.address
    await other_verifier.stop()
    async with running_gateway(verifier, other_verifier) as running:
        await other_verifier.start()
        assert other_verifier.address == address
        await eventually(lambda: f"{word}: " in caplog.text)
        assert [link.is_ready for link in running.links] == [True, False]
        # Mended, it is let in; that its revision differs does not matter.
        other_verifier.identity.CopyFrom(verifier.identity)
        other_verifier.identity.revision = "r2"
        await eventually(lambda: running.links[1].is_ready)


async def test_only_verifier_may_come_back_with_another_model(verifier: FakeVerifier) -> None:
    verifier.script = one_token
    async with running_gateway(verifier) as running:
        await verifier.stop()
        verifier.identity.vocabulary_size = 50
        await verifier.start()
        await eventually(lambda: verifier.num_streams == 2 and running.links[0].is_ready)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await complete(running, token_ids=token_ids(50))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_verifier_whose_model_does_not_fit_the_tokenizer_is_refused(
    verifier: FakeVerifier, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    verifier.identity.vocabulary_size = 100
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5), running_gateway(verifier, tokenizer=tokenizer):
            pass
    assert "vocabulary_size: the gateway's tokenizer has" in caplog.text
    caplog.clear()
    verifier.identity.vocabulary_size = 1000
    verifier.identity.tokenizer_fingerprint = "theirs"
    tokenizer._fingerprint = "ours"
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5), running_gateway(verifier, tokenizer=tokenizer):
            pass
    assert "tokenizer_fingerprint: the gateway's tokenizer has ours, the verifier's theirs" in caplog.text


async def test_start_waits_for_a_verifier() -> None:
    late = FakeVerifier(script=one_token)
    await late.start()
    await late.stop()

    async def start_soon() -> None:
        await asyncio.sleep(0.3)
        await late.start()

    starting = asyncio.create_task(start_soon())
    try:
        async with running_gateway(late) as running:
            assert starting.done()
            await complete(running, token_ids=token_ids(1))
    finally:
        await late.stop()


async def test_a_verifier_without_a_first_frame_is_not_ready(
    verifier: FakeVerifier,
    other_verifier: FakeVerifier,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Catches sequences that go to a verifier which answers the handshake and then nothing."""
    monkeypatch.setattr(verifier_link, "TIMINGS", replace(verifier_link.TIMINGS, handshake_seconds=0.2))
    verifier.script = other_verifier.script = one_token
    verifier.is_mute = True
    async with running_gateway(verifier, other_verifier) as running:
        await eventually(lambda: verifier.num_streams >= 2)
        assert [link.is_ready for link in running.links] == [False, True]
        assert "the verifier does not answer on its stream" in caplog.text
        await complete(running, token_ids=token_ids(1))
        assert not verifier.opened
        verifier.is_mute = False
        await eventually(lambda: all(link.is_ready for link in running.links))


async def test_a_verifier_that_is_ready_has_named_its_drafters(verifier: FakeVerifier) -> None:
    """Catches first sequences that decode plainly because the drafters were not known yet."""
    verifier.drafters = statuses(d1=READY)
    verifier.script = one_token
    async with running_gateway(verifier, drafters=("d1:1",), drafter_wait_seconds=0) as running:
        await complete(running, token_ids=token_ids(1))
    (opened,) = verifier.opened.values()
    assert opened.drafter_address == "d1:1"


async def test_lost_verifier_takes_its_view_of_the_drafters_with_it(verifier: FakeVerifier) -> None:
    verifier.drafters = statuses(d1=READY)
    async with running_gateway(verifier, drafters=("d1:1",)) as running:
        await verifier.stop()
        await eventually(lambda: not running.links[0].is_ready)
        (member,) = (await running.stub.GetModel(generation_pb2.GetModelRequest())).drafters
        assert not member.is_ready
        assert member.detail
