"""The span of a request: names, attributes, parent, events and how it ends."""

from __future__ import annotations

import asyncio
import json
import logging
import re

import grpc
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from gateway.tokenizer import Tokenizer
from outrider.protocol.wire import pack_tokens
from outrider.service.logs import JsonFormatter
from outrider.service.telemetry import Telemetry
from outrider.v1 import common_pb2, generation_pb2, verifier_pb2
from tests.gateway.fake_verifier import (
    FakeVerifier,
    complete,
    eventually,
    rest_of,
    running_gateway,
    token_ids,
    update,
)

LENGTH = generation_pb2.FINISH_REASON_LENGTH
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
SEED = 123456789
PARENT = f"00-{TRACE_ID}-b7ad6b7169203331-01"
REQUEST = generation_pb2.GenerateRequest(token_ids=token_ids(1))


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def telemetry(exporter: InMemorySpanExporter) -> Telemetry:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Telemetry.from_provider(provider)


async def only_span(exporter: InMemorySpanExporter) -> ReadableSpan:
    """The one span of kind SERVER, once it has ended."""
    await eventually(lambda: len(exporter.get_finished_spans()) > 0)
    (span,) = (span for span in exporter.get_finished_spans() if span.kind is SpanKind.SERVER)
    return span


def script(message: verifier_pb2.OpenDecoding) -> list[verifier_pb2.SequenceUpdate]:
    fallback = common_pb2.Fallback(reason=common_pb2.FALLBACK_REASON_DRAFTER_LOST, position=4)
    return [
        update(
            message.sequence_id,
            [70, 71, 72],
            drafted=4,
            accepted=2,
            verification=common_pb2.VERIFICATION_COUPLED,
        ),
        update(message.sequence_id, [73], finish=LENGTH, fallbacks=[fallback]),
    ]


async def test_span_of_a_completed_request(
    verifier: FakeVerifier, tokenizer: Tokenizer, telemetry: Telemetry, exporter: InMemorySpanExporter
) -> None:
    verifier.script = script
    async with running_gateway(verifier, tokenizer=tokenizer, telemetry=telemetry, trace_prompts=True) as running:
        request = generation_pb2.GenerateRequest(
            prompt="The fox",
            request_id="r-1",
            sampling=common_pb2.SamplingParameters(temperature=0.7, top_p=0.9, top_k=5, seed=SEED),
            stopping=generation_pb2.StoppingParameters(max_tokens=4, stop=["never"]),
        )
        call = running.stub.Generate(request, metadata=(("traceparent", PARENT),))
        text = "".join([response.chunk.text async for response in call])
        message = await verifier.next_open()
    span = await only_span(exporter)
    assert span.name == "text_completion fake"
    assert format(span.context.trace_id, "032x") == TRACE_ID
    assert span.parent is not None
    assert format(span.parent.span_id, "016x") == "b7ad6b7169203331"
    # Verifier and drafter hang their spans below this one.
    assert message.traceparent == f"00-{TRACE_ID}-{span.context.span_id:016x}-01"
    attributes = dict(span.attributes or {})
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "outrider",
        "gen_ai.request.model": "fake",
        "gen_ai.request.stream": True,
        "gen_ai.request.temperature": 0.7,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 5,
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.stop_sequences": ("never",),
        "gen_ai.response.id": "r-1",
        "gen_ai.response.model": "fake",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": message.num_prompt_tokens,
        "gen_ai.usage.output_tokens": 4,
        "rpc.system.name": "grpc",
        "rpc.method": "outrider.v1.GenerationService/Generate",
        "rpc.response.status_code": "OK",
        "outrider.verifier.address": verifier.address,
        "outrider.verification": "coupled",
        "outrider.num_steps": 2,
        "outrider.num_draft_tokens": 4,
        "outrider.num_accepted_tokens": 2,
        "outrider.num_accepted_per_position": (1, 1, 0, 0),
        "outrider.acceptance_rate": 0.5,
        "outrider.mean_acceptance_length": 2.0,
    }
    assert {key: attributes.get(key) for key in expected} == expected
    assert "error.type" not in attributes
    assert SEED not in attributes.values(), "it would let others predict and repeat the output"
    assert span.status.status_code is StatusCode.UNSET
    routed, first_token, event = span.events
    assert routed.name == "outrider.routed"
    assert dict(routed.attributes or {}) == {
        "outrider.verifier.address": verifier.address,
        "outrider.drafter.address": "",
    }
    assert first_token.name == "outrider.first_token"
    assert event.name == "outrider.fallback"
    assert dict(event.attributes or {}) == {
        "outrider.fallback.reason": "DRAFTER_LOST",
        "outrider.fallback.position": 4,
    }
    assert json.loads(str(attributes["gen_ai.input.messages"]))[0]["parts"][0]["content"] == "The fox"
    assert json.loads(str(attributes["gen_ai.output.messages"]))[0]["parts"][0]["content"] == text != ""


async def test_prompts_stay_out_of_traces_by_default(
    verifier: FakeVerifier, tokenizer: Tokenizer, telemetry: Telemetry, exporter: InMemorySpanExporter
) -> None:
    verifier.script = script
    async with running_gateway(verifier, tokenizer=tokenizer, telemetry=telemetry) as running:
        stopping = generation_pb2.StoppingParameters(stop=["secret too"])
        await complete(running, prompt="secret", stopping=stopping)
    span = await only_span(exporter)
    assert "secret" not in span.to_json()
    assert "gen_ai.output.messages" not in (span.attributes or {})


async def test_aborted_request(verifier: FakeVerifier, telemetry: Telemetry, exporter: InMemorySpanExporter) -> None:
    async with running_gateway(verifier, telemetry=telemetry) as running:
        with pytest.raises(grpc.aio.AioRpcError):
            await complete(running, token_ids=token_ids())
        bad = await only_span(exporter)
        exporter.clear()
        call = running.stub.Generate(REQUEST)
        await verifier.next_open()
        verifier.break_stream()
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()
        lost = await only_span(exporter)
    assert (bad.attributes or {})["error.type"] == "INVALID_ARGUMENT"
    assert (bad.attributes or {})["rpc.response.status_code"] == "INVALID_ARGUMENT"
    # The caller's mistake is no error of the server.
    assert bad.status.status_code is StatusCode.UNSET
    assert (lost.attributes or {})["error.type"] == "UNAVAILABLE"
    assert lost.status.status_code is StatusCode.ERROR
    assert "lost the verifier" in str(lost.status.description)


async def test_cancelled_and_late_requests(
    verifier: FakeVerifier, telemetry: Telemetry, exporter: InMemorySpanExporter
) -> None:
    async with running_gateway(verifier, telemetry=telemetry) as running:
        call = running.stub.Generate(REQUEST, timeout=30)
        await verifier.next_open()
        call.cancel()
        cancelled = await only_span(exporter)
        exporter.clear()
        call = running.stub.Generate(REQUEST, timeout=0.2)
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()
        late = await only_span(exporter)
    assert (cancelled.attributes or {})["error.type"] == "CANCELLED"
    assert cancelled.status.status_code is StatusCode.UNSET
    assert (late.attributes or {})["error.type"] == "DEADLINE_EXCEEDED"
    assert late.status.status_code is StatusCode.ERROR


async def test_long_tokenization_has_a_span_of_its_own(
    verifier: FakeVerifier, tokenizer: Tokenizer, telemetry: Telemetry, exporter: InMemorySpanExporter
) -> None:
    verifier.identity.max_length = 0
    verifier.script = script
    async with running_gateway(verifier, tokenizer=tokenizer, telemetry=telemetry) as running:
        completion = await complete(running, prompt="The quick brown fox " * 5000)
    span = await only_span(exporter)
    (child,) = (one for one in exporter.get_finished_spans() if one.name == "tokenize")
    assert child.parent is not None
    assert child.parent.span_id == span.context.span_id
    assert (child.attributes or {})["outrider.num_prompt_tokens"] == completion.started.num_prompt_tokens


async def test_nothing_is_traced_when_nobody_listens(verifier: FakeVerifier) -> None:
    verifier.script = script
    async with running_gateway(verifier) as running:
        call = running.stub.Generate(REQUEST, metadata=(("traceparent", PARENT),))
        assert [response.WhichOneof("event") async for response in call][-1] == "finished"
    assert (await verifier.next_open()).traceparent == ""


async def test_a_trace_that_is_not_sampled_goes_on_unsampled(
    verifier: FakeVerifier, telemetry: Telemetry, exporter: InMemorySpanExporter
) -> None:
    """Catches services below that would begin traces of their own, or pay for spans that nobody keeps."""
    verifier.script = script
    async with running_gateway(verifier, telemetry=telemetry) as running:
        call = running.stub.Generate(REQUEST, metadata=(("traceparent", PARENT[:-2] + "00"),))
        assert [response.WhichOneof("event") async for response in call][-1] == "finished"
        message = await verifier.next_open()
    assert message.traceparent.startswith(f"00-{TRACE_ID}-")
    assert message.traceparent.endswith("-00")
    assert not exporter.get_finished_spans()


async def test_a_slow_client_shows(
    verifier: FakeVerifier, telemetry: Telemetry, exporter: InMemorySpanExporter
) -> None:
    """Catches a client's own slowness being taken for ours."""
    # More than what the connection holds for a client that does not read.
    steps, per_step = 60, 20_000
    ids = [7] * per_step

    def long_script(message: verifier_pb2.OpenDecoding) -> list[verifier_pb2.SequenceUpdate]:
        return [update(message.sequence_id, ids)]

    verifier.script = long_script
    async with running_gateway(verifier, telemetry=telemetry) as running:
        call = running.stub.Generate(REQUEST)
        await call.read()
        sequence_id = (await verifier.next_open()).sequence_id
        for step in range(steps):
            # One by one, or they would be a single chunk.
            verifier.send(update(sequence_id, ids, finish=LENGTH if step == steps - 1 else None))
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.3)
        await rest_of(call)
    span = await only_span(exporter)
    events = [event for event in span.events if event.name == "outrider.slow_client"]
    assert events
    assert float((span.attributes or {})["outrider.client_wait_seconds"]) >= 0.2  # type: ignore[arg-type]


async def test_a_request_that_goes_elsewhere_shows(
    verifier: FakeVerifier, other_verifier: FakeVerifier, telemetry: Telemetry, exporter: InMemorySpanExporter
) -> None:
    def refuse(message: verifier_pb2.OpenDecoding) -> list[verifier_pb2.SequenceUpdate]:
        code = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
        return [update(message.sequence_id, error=verifier_pb2.SequenceError(code=code, message="full"))]

    verifier.script, other_verifier.script = refuse, refuse
    async with running_gateway(verifier, other_verifier, telemetry=telemetry) as running:
        await eventually(lambda: all(link.is_ready for link in running.links))
        with pytest.raises(grpc.aio.AioRpcError):
            await complete(running, token_ids=token_ids(1))
    span = await only_span(exporter)
    routed, rerouted, routed_again = span.events
    assert rerouted.name == "outrider.rerouted"
    assert (rerouted.attributes or {})["exception.message"] == "full"
    addresses = {(event.attributes or {})["outrider.verifier.address"] for event in (routed, routed_again)}
    assert addresses == {verifier.address, other_verifier.address}


async def test_logs_name_the_request_and_none_of_its_text(
    verifier: FakeVerifier,
    tokenizer: Tokenizer,
    telemetry: Telemetry,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Catches prompts and completions in logs, at any level, however a request ends."""
    caplog.set_level(logging.DEBUG)
    caplog.handler.setFormatter(JsonFormatter("gateway"))
    hush = await tokenizer.encode("hush")
    verifier.script = lambda message: [update(message.sequence_id, hush, finish=LENGTH)]
    async with running_gateway(verifier, tokenizer=tokenizer, telemetry=telemetry) as running:
        stopping = generation_pb2.StoppingParameters(stop=["secret stop"])
        completion = await complete(running, prompt="secret prompt", request_id="r-7", stopping=stopping)
        assert completion.text == "hush"
        for bad in ({"stop": ["secret" * 1000]}, {"max_tokens": 0}):
            with pytest.raises(grpc.aio.AioRpcError):
                await complete(running, prompt="secret prompt", stopping=generation_pb2.StoppingParameters(**bad))
        verifier.script = lambda message: [
            verifier_pb2.SequenceUpdate(sequence_id=message.sequence_id, token_ids=pack_tokens([5]))
        ]
        with pytest.raises(grpc.aio.AioRpcError, match="malformed"):
            await complete(running, prompt="secret prompt")
        verifier.script = None
        call = running.stub.Generate(generation_pb2.GenerateRequest(prompt="secret prompt"))
        await eventually(lambda: len(verifier.opened) == 3)
        verifier.break_stream()
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()
    lines = [json.loads(line) for line in caplog.text.splitlines() if line.startswith("{")]
    assert not re.search("secret|hush", caplog.text)
    (ended,) = (line for line in lines if line.get("request_id") == "r-7")
    assert ended["message"] == "a request ended with OK"
    assert ended["num_output_tokens"] == len(hush)
    assert len(ended["trace_id"]) == 32
    ends = [line["message"].split()[4] for line in lines if line["message"].startswith("a request ended")]
    assert sorted(ends) == ["INTERNAL:", "INVALID_ARGUMENT", "INVALID_ARGUMENT", "OK", "UNAVAILABLE:"]
