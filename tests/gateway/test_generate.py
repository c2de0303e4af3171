"""Generate over real gRPC, in front of a scripted verifier."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from gateway.tokenizer import Tokenizer
from outrider.v1 import common_pb2, generation_pb2, verifier_pb2
from tests.gateway import tokenizers_for_tests
from tests.gateway.fake_verifier import (
    CONTEXT_LENGTH,
    FakeVerifier,
    complete,
    eventually,
    next_of,
    prompt_of,
    running_gateway,
    token_ids,
    update,
)

EOS = generation_pb2.FINISH_REASON_EOS
LENGTH = generation_pb2.FINISH_REASON_LENGTH
STOP_TOKEN = generation_pb2.FINISH_REASON_STOP_TOKEN
STOP_STRING = generation_pb2.FINISH_REASON_STOP_STRING
EOS_ID = 1

Script = Callable[[verifier_pb2.OpenDecoding], list[verifier_pb2.SequenceUpdate]]


def steps_of(ids: list[int], finish: generation_pb2.FinishReason, size: int = 3) -> Script:
    """A script that commits these tokens, so many a step."""

    def script(message: verifier_pb2.OpenDecoding) -> list[verifier_pb2.SequenceUpdate]:
        starts = range(0, len(ids), size)
        return [
            update(
                message.sequence_id,
                ids[start : start + size],
                drafted=min(size, 32),
                accepted=min(len(ids[start : start + size]) - 1, 32),
                finish=finish if start == starts[-1] else None,
            )
            for start in starts
        ]

    return script


async def test_text_in_text_out(verifier: FakeVerifier) -> None:
    tokenizer = Tokenizer(tokenizers_for_tests.with_template())
    ids = tokenizers_for_tests.byte_level().encode("naïve 👩‍👩‍👧 中文").ids
    verifier.script = steps_of([*ids, EOS_ID], EOS)
    async with running_gateway(verifier, tokenizer=tokenizer) as running:
        completion = await complete(running, prompt="The fox", request_id="mine")
        message = await verifier.next_open()
        await running.is_idle()
    assert completion.text == "naïve 👩‍👩‍👧 中文"
    assert completion.token_ids == [*ids, EOS_ID]
    assert completion.started.request_id == message.request_id == "mine"
    assert completion.started.model == "fake"
    # The template's <s> is part of the prompt.
    assert prompt_of(message) == [0, *tokenizers_for_tests.byte_level().encode("The fox").ids]
    assert completion.started.num_prompt_tokens == message.num_prompt_tokens == len(prompt_of(message))
    assert completion.finished.finish_reason == EOS
    assert completion.finished.usage.num_output_tokens == len(ids) + 1
    assert completion.finished.usage.num_prompt_tokens == message.num_prompt_tokens
    # What ended by itself is not closed again.
    assert verifier.closed == []


async def test_everything_of_the_request_reaches_the_verifier(verifier: FakeVerifier, tokenizer: Tokenizer) -> None:
    def script(message: verifier_pb2.OpenDecoding) -> list[verifier_pb2.SequenceUpdate]:
        rule = common_pb2.VERIFICATION_REJECTION
        return [update(message.sequence_id, [4], verification=rule), update(message.sequence_id, [5], finish=LENGTH)]

    verifier.script = script
    async with running_gateway(verifier, tokenizer=tokenizer) as running:
        sampling = common_pb2.SamplingParameters(temperature=0.5, top_k=7, logit_bias={3: -1.0}, seed=0)
        completion = await complete(
            running,
            token_ids=token_ids(7, 8, 9),
            sampling=sampling,
            stopping=generation_pb2.StoppingParameters(max_tokens=11, stop_token_ids=[4, 5], ignore_eos=True),
            speculation=generation_pb2.SpeculationParameters(
                max_draft_tokens=6, verification=common_pb2.VERIFICATION_REJECTION
            ),
            logprobs=0,
        )
        message = await verifier.next_open()
    assert message.sampling == sampling  # a seed of 0 is a seed
    assert message.is_seeded
    assert completion.started.seed == 0
    assert prompt_of(message) == [7, 8, 9]
    assert (message.max_tokens, list(message.stop_token_ids), message.ignore_eos) == (11, [4, 5], True)
    assert (message.max_draft_tokens, message.verification) == (6, common_pb2.VERIFICATION_REJECTION)
    assert message.HasField("logprobs")
    assert completion.finished.speculation.verification == common_pb2.VERIFICATION_REJECTION


async def test_defaults_draw_a_seed_and_an_id(verifier: FakeVerifier) -> None:
    verifier.script = steps_of([5], LENGTH)
    async with running_gateway(verifier) as running:
        first = await complete(running, token_ids=token_ids(1))
        second = await complete(running, token_ids=token_ids(1))
        opened = [await verifier.next_open(), await verifier.next_open()]
    assert first.started.seed != second.started.seed
    assert [message.sampling.seed for message in opened] == [first.started.seed, second.started.seed]
    # Which rule holds then is the verifier's to say.
    assert {(message.is_seeded, message.verification) for message in opened} == {(False, 0)}
    assert len(first.started.request_id) == 32
    assert first.started.request_id != second.started.request_id
    assert not opened[0].HasField("logprobs")
    assert opened[0].max_tokens == opened[0].max_draft_tokens == 0
    assert opened[0].sequence_id != opened[1].sequence_id


@pytest.mark.parametrize(("finish", "last"), [(EOS, EOS_ID), (STOP_TOKEN, 70)])
async def test_text_of_the_ending_token_is_left_out(
    verifier: FakeVerifier, tokenizer: Tokenizer, finish: generation_pb2.FinishReason, last: int
) -> None:
    ids = tokenizer._encode("fox")
    verifier.script = steps_of([*ids, last], finish, size=9)
    async with running_gateway(verifier, tokenizer=tokenizer) as running:
        completion = await complete(running, prompt="x")
    assert completion.text == "fox"
    assert completion.token_ids == [*ids, last]
    assert completion.finished.finish_reason == finish


async def test_text_of_the_last_token_counts_when_length_ends_it(verifier: FakeVerifier, tokenizer: Tokenizer) -> None:
    ids = tokenizers_for_tests.byte_level().encode("é中").ids
    cut = [*ids, tokenizers_for_tests.id_of(tokenizers_for_tests.byte_level(), "ð")]
    verifier.script = steps_of(cut, LENGTH)
    async with running_gateway(verifier, tokenizer=tokenizer) as running:
        completion = await complete(running, prompt="x")
    # The unfinished character at the end is shown as the tokenizer shows it.
    assert completion.text == tokenizer.decode(cut) == "é中\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("size", [1, 2, 3, 30])
async def test_stop_string_ends_text_tokens_and_the_sequence(
    verifier: FakeVerifier, tokenizer: Tokenizer, size: int
) -> None:
    ids = tokenizer._encode("The quick brown fox; naïve café jumps over it")
    script = steps_of(ids, LENGTH, size)
    # The last step never comes, as from a verifier that goes on until it is told to stop.
    verifier.script = lambda message: script(message)[: -1 if size < 30 else None]
    async with running_gateway(verifier, tokenizer=tokenizer) as running:
        completion = await complete(
            running, prompt="x", stopping=generation_pb2.StoppingParameters(stop=["never", "k br"])
        )
        sequence_id = (await verifier.next_open()).sequence_id
        await running.is_idle()
        if size < 30:
            await eventually(lambda: verifier.closed == [sequence_id])
    assert completion.text == "The quic"
    assert completion.finished.finish_reason == STOP_STRING
    assert completion.finished.stop_string == "k br"
    kept = completion.token_ids
    assert kept == ids[: len(kept)]
    assert "k br" in tokenizer.decode(kept)
    assert "k br" not in tokenizer.decode(kept[:-1])
    assert completion.finished.usage.num_output_tokens == len(kept) < len(ids)


async def test_possible_beginning_of_a_stop_string_is_held_back_and_released(
    verifier: FakeVerifier, tokenizer: Tokenizer
) -> None:
    async with running_gateway(verifier, tokenizer=tokenizer) as running:
        call = running.stub.Generate(
            generation_pb2.GenerateRequest(prompt="x", stopping=generation_pb2.StoppingParameters(stop=["fox;;"]))
        )
        sequence_id = (await verifier.next_open()).sequence_id
        verifier.send(update(sequence_id, tokenizer._encode("a fo")))
        assert (await next_of(call)).HasField("started")
        assert (await next_of(call)).chunk.text == "a "
        verifier.send(update(sequence_id, tokenizer._encode("x")))
        held = (await next_of(call)).chunk
        assert (held.text, len(held.tokens)) == ("", 1)
        verifier.send(update(sequence_id, tokenizer._encode("!"), finish=LENGTH))
        assert (await next_of(call)).chunk.text == "fox!"
        assert (await next_of(call)).finished.finish_reason == LENGTH


async def test_statistics_timings_and_log_probabilities(verifier: FakeVerifier) -> None:
    logprob = common_pb2.PositionLogprobs(
        chosen=common_pb2.TokenLogprob(token_id=5, logprob=-0.5), top=[common_pb2.TokenLogprob(token_id=6, logprob=-2)]
    )
    fallback = common_pb2.Fallback(reason=common_pb2.FALLBACK_REASON_LOW_ACCEPTANCE, position=9)

    def script(message: verifier_pb2.OpenDecoding) -> list[verifier_pb2.SequenceUpdate]:
        number = message.sequence_id
        prefill = verifier_pb2.PrefillReport(queue_seconds=2.0, prefill_seconds=3.0)
        return [
            update(number, [5], prefill=prefill, logprobs=[logprob]),
            update(number, [5, 6, 7, 8], drafted=3, accepted=3, logprobs=[logprob] * 4),
            update(number, [5], drafted=4, accepted=0, logprobs=[logprob]),
            update(number, [5, 6], drafted=2, accepted=1, logprobs=[logprob] * 2),
            update(number, fallbacks=[fallback]),
            update(number, [9], finish=LENGTH, logprobs=[logprob]),
        ]

    verifier.script = script
    async with running_gateway(verifier) as running:
        completion = await complete(running, token_ids=token_ids(1), logprobs=1)
    speculation, timings = completion.finished.speculation, completion.finished.timings
    assert speculation.num_steps == 5
    assert (speculation.num_draft_tokens, speculation.num_accepted_tokens) == (9, 4)
    assert list(speculation.num_accepted_per_position) == [2, 1, 1, 0]
    assert list(speculation.fallbacks) == [fallback]
    assert completion.finished.usage.num_output_tokens == 9
    tokens = [token for chunk in completion.chunks for token in chunk.tokens]
    names = [common_pb2.TokenOrigin.Name(token.origin).rpartition("_")[2] for token in tokens]
    assert names == [
        "PLAIN", "ACCEPTED", "ACCEPTED", "ACCEPTED", "BONUS", "RECOVERED", "ACCEPTED", "RECOVERED", "PLAIN"
    ]  # fmt: skip
    assert all(token.logprobs == logprob for token in tokens)
    assert completion.text == ""
    assert timings.prefill_seconds == 3.0
    assert 2.0 <= timings.queue_seconds < 3.0
    assert 0 < timings.time_to_first_token_seconds <= timings.total_seconds < 5.0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": ""}, "prompt: must not be empty"),
        ({}, "prompt: one of prompt and token_ids must be set"),
        ({"token_ids": token_ids(1, 1000)}, "token_ids: token id 1000 at index 1 is not below the vocabulary size"),
        ({"token_ids": token_ids(*[1] * 3000)}, "token_ids: has 3000 tokens, the model's context length is 2048"),
        ({"prompt": "x" * CONTEXT_LENGTH}, "prompt: has 2048 tokens and fills the model's context length of 2048"),
        ({"prompt": "x", "sampling": common_pb2.SamplingParameters(temperature=math.nan)}, "sampling.temperature: "),
    ],
)  # fmt: skip
async def test_bad_request_names_the_field(
    verifier: FakeVerifier, tokenizer: Tokenizer, fields: dict[str, object], message: str
) -> None:
    async with running_gateway(verifier, tokenizer=tokenizer) as running:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await complete(running, **fields)
        await running.is_idle()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (caught.value.details() or "").startswith(message)
    assert verifier.opened == {}


async def test_bytes_that_are_no_message_are_refused(verifier: FakeVerifier) -> None:
    async with running_gateway(verifier) as running:
        call = running.channel.unary_stream("/outrider.v1.GenerationService/Generate", None, None)(b"\xff\xff\xff")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_error_of_the_verifier_becomes_the_status(verifier: FakeVerifier) -> None:
    error = verifier_pb2.SequenceError(
        code=grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], message="no blocks", retry_delay_seconds=1.5
    )
    verifier.script = lambda message: [update(message.sequence_id, error=error)]
    async with running_gateway(verifier) as running:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await complete(running, token_ids=token_ids(1))
        await running.is_idle()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert caught.value.details() == "no blocks"
    retry = error_details_pb2.RetryInfo()
    assert rpc_status.from_call(caught.value).details[0].Unpack(retry)  # type: ignore[arg-type]
    assert retry.retry_delay.ToNanoseconds() == 1_500_000_000


@pytest.mark.parametrize(
    "broken",
    [
        verifier_pb2.SequenceUpdate(token_ids=b"123", origins=b""),
        verifier_pb2.SequenceUpdate(token_ids=b"1234", origins=b""),
        verifier_pb2.SequenceUpdate(num_draft_tokens=1, num_accepted_tokens=2),
        verifier_pb2.SequenceUpdate(ended=verifier_pb2.Ended()),
    ],
)
async def test_update_that_contradicts_itself_ends_one_sequence(
    verifier: FakeVerifier, broken: verifier_pb2.SequenceUpdate
) -> None:
    async with running_gateway(verifier) as running:
        bad = running.stub.Generate(generation_pb2.GenerateRequest(token_ids=token_ids(1)))
        broken.sequence_id = (await verifier.next_open()).sequence_id
        good = asyncio.create_task(complete(running, token_ids=token_ids(2)))
        sequence_id = (await verifier.next_open()).sequence_id
        verifier.send(broken, update(sequence_id, [4], finish=LENGTH))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await bad.read()
        assert (await good).token_ids == [4]
        await running.is_idle()
    assert caught.value.code() is grpc.StatusCode.INTERNAL


async def test_full_gateway_says_when_to_come_again(verifier: FakeVerifier) -> None:
    async with running_gateway(verifier, max_concurrent_sequences=1, max_queued_requests=0) as running:
        call = running.stub.Generate(generation_pb2.GenerateRequest(token_ids=token_ids(1)))
        sequence_id = (await verifier.next_open()).sequence_id
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await complete(running, token_ids=token_ids(1))
        verifier.send(update(sequence_id, [4], finish=LENGTH))
        assert [response.WhichOneof("event") async for response in call] == ["started", "chunk", "finished"]
        verifier.script = steps_of([5], LENGTH)
        await complete(running, token_ids=token_ids(1))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    retry = error_details_pb2.RetryInfo()
    assert rpc_status.from_call(caught.value).details[0].Unpack(retry)  # type: ignore[arg-type]
    assert retry.retry_delay.ToNanoseconds() > 0


async def test_get_model(verifier: FakeVerifier, tokenizer: Tokenizer) -> None:
    async with running_gateway(verifier, tokenizer=tokenizer, model_name="mine") as running:
        call = running.stub.Generate(generation_pb2.GenerateRequest(token_ids=token_ids(1)))
        await verifier.next_open()
        model = await running.stub.GetModel(generation_pb2.GetModelRequest())
        call.cancel()
    assert (model.name, model.revision, model.has_tokenizer) == ("mine", "r1", True)
    assert (model.context_length, model.vocabulary_size) == (2048, 1000)
    assert [(member.address, member.is_ready, member.num_sequences) for member in model.verifiers] == [
        (verifier.address, True, 1)
    ]


@pytest.mark.parametrize("size", [1, 3, 30])
async def test_token_texts_make_up_the_text(verifier: FakeVerifier, tokenizer: Tokenizer, size: int) -> None:
    """Whatever the steps: each token shows what it completed; what the end releases stands behind the last."""
    ids = [*tokenizer._encode("naïve 👩‍👩‍👧 fo"), EOS_ID]
    verifier.script = steps_of(ids, EOS, size)
    async with running_gateway(verifier, tokenizer=tokenizer) as running:
        stopping = generation_pb2.StoppingParameters(stop=["fox"])
        completion = await complete(running, prompt="x", token_texts=True, stopping=stopping)
        plain = await complete(running, prompt="x", stopping=stopping)
    texts = [token.text for chunk in completion.chunks for token in chunk.tokens]
    assert "".join(texts) == "naïve 👩‍👩‍👧 "
    assert "" in texts[:-1]
    assert completion.text == plain.text == "naïve 👩‍👩‍👧 fo"
    for chunk in completion.chunks:
        assert chunk.text.startswith("".join(token.text for token in chunk.tokens))
    assert not any(token.text for chunk in plain.chunks for token in chunk.tokens)
    # A token's share does not depend on the steps that it came in.
    detokenizer = tokenizer.detokenizer()
    assert texts[:4] == [detokenizer.push([token_id]) for token_id in ids[:4]]


@pytest.mark.parametrize("size", [1, 3, 60])
async def test_token_texts_end_before_a_stop_string(verifier: FakeVerifier, tokenizer: Tokenizer, size: int) -> None:
    ids = tokenizer._encode("The quick brown fox; naïve café jumps over it")
    verifier.script = steps_of(ids, LENGTH, size)
    async with running_gateway(verifier, tokenizer=tokenizer) as running:
        stopping = generation_pb2.StoppingParameters(stop=["k br"])
        completion = await complete(running, prompt="x", token_texts=True, stopping=stopping)
    tokens = [token for chunk in completion.chunks for token in chunk.tokens]
    assert "".join(token.text for token in tokens) == completion.text == "The quic"
    assert len(tokens) == completion.finished.usage.num_output_tokens < len(ids)
