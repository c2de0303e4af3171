"""What a trace tells of a sequence's way through verifier and drafter."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from opentelemetry.sdk.trace import Event, ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode, format_span_id, format_trace_id

from outrider.service.step_spans import StepSpans
from outrider.service.telemetry import Telemetry
from outrider.v1 import common_pb2, verifier_pb2
from tests.services.conftest import Pair
from tests.services.fake_drafter import fake_drafter
from tests.services.harness import (
    decode_client,
    drafter_settings,
    eventually,
    running_drafter,
    running_verifier,
    verifier_settings,
)
from tests.services.reference import prompts
from verifier_service.sequence_trace import SequenceTrace

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"
PROMPT = prompts(3)[2]


class Recorder:
    """A service's telemetry and the spans that it made."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.telemetry = Telemetry.from_provider(provider)

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]


def number(span: ReadableSpan | Event, key: str) -> float:
    value = (span.attributes or {})[key]
    assert isinstance(value, int | float)
    return value


def parent_of(span: ReadableSpan) -> str:
    return format_span_id(span.parent.span_id) if span.parent else ""


def id_of(span: ReadableSpan) -> str:
    assert span.context is not None
    return format_span_id(span.context.span_id)


async def test_one_trace_over_both_services(pair: Pair) -> None:
    target, draft = pair
    verifier_spans, drafter_spans = Recorder(), Recorder()
    async with (
        running_drafter(drafter_settings(model=draft), drafter_spans.telemetry) as drafter,
        running_verifier(verifier_settings(target), verifier_spans.telemetry) as (verifier, _),
        decode_client(verifier.address) as client,
    ):
        await client.use_drafters(drafter.address)
        result, untraced = await asyncio.gather(
            client.decode(
                PROMPT, drafter=drafter.address, max_tokens=40, traceparent=TRACEPARENT, request_id="request 1"
            ),
            client.decode(PROMPT, drafter=drafter.address, max_tokens=40, traceparent="nonsense"),
        )
        assert untraced.token_ids == result.token_ids
    spans = verifier_spans.exporter.get_finished_spans() + drafter_spans.exporter.get_finished_spans()
    assert {format_trace_id(span.context.trace_id) for span in spans if span.context} == {TRACE_ID}

    (decode,) = verifier_spans.named("decode target")
    assert parent_of(decode) == PARENT_ID
    assert decode.kind is SpanKind.SERVER
    assert decode.attributes is not None
    assert decode.attributes["outrider.request_id"] == "request 1"
    assert decode.attributes["outrider.drafter.address"] == drafter.address
    assert decode.attributes["outrider.finish_reason"] == "LENGTH"
    assert decode.attributes["outrider.verification"] == "greedy"
    assert decode.status.status_code is not StatusCode.ERROR
    assert all(parent_of(span) == id_of(decode) for span in spans if span is not decode)

    (queue,), (prefill,) = verifier_spans.named("queue"), verifier_spans.named("prefill")
    assert queue.start_time is not None
    assert prefill.start_time is not None
    assert prefill.end_time is not None
    assert queue.start_time <= prefill.start_time <= prefill.end_time
    steps = verifier_spans.named("verify_step")
    # The step that ended the prompt is its prefill.
    assert len(steps) == result.num_steps - 1
    numbers: list[dict[str, Any]] = [dict(step.attributes or {}) for step in steps]
    assert sum(int(step["outrider.num_draft_tokens"]) for step in numbers) == result.num_drafted
    assert sum(int(step["outrider.num_accepted_tokens"]) for step in numbers) == result.num_accepted
    position = len(PROMPT) + 1
    for step in numbers:
        assert step["outrider.position"] == position
        drafted, accepted = int(step["outrider.num_draft_tokens"]), int(step["outrider.num_accepted_tokens"])
        assert ("outrider.rejected_position" in step) == (accepted < drafted)
        if accepted < drafted:
            assert step["outrider.rejected_position"] == position + accepted
        if drafted == 4:
            assert int(step["outrider.draft_bytes"]) >= 4 * drafted
            assert 0 <= float(step["outrider.draft_wait_seconds"]) < 10
        position += accepted + 1
    drafts = drafter_spans.named("draft draft")
    assert len(drafts) >= len(steps) - 1
    for span in drafts:
        assert span.attributes is not None
        assert span.attributes["outrider.drafter.kind"] == "model"
        assert 1 <= int(span.attributes["outrider.num_expansions"]) <= 5  # type: ignore[arg-type]


async def test_a_fallback_is_an_event_and_an_error_a_status(pair: Pair) -> None:
    target, _ = pair
    recorder = Recorder()
    async with (
        fake_drafter(lambda tokens, count: [1], lambda expansions, sequence: [b"\xff"]) as drafter,
        running_verifier(verifier_settings(target), recorder.telemetry) as (verifier, _),
        decode_client(verifier.address) as client,
    ):
        await client.use_drafters(drafter.address)
        result = await client.decode(PROMPT, drafter=drafter.address, max_tokens=20, traceparent=TRACEPARENT)
        (span,) = recorder.named("decode target")
        (event,) = span.events
        assert event.name == "outrider.fallback"
        assert event.attributes is not None
        assert event.attributes["outrider.fallback.reason"] == "DRAFTER_LOST"
        assert event.attributes["outrider.fallback.position"] == result.fallbacks[0][1]
        recorder.exporter.clear()

        await client.decode(
            PROMPT, max_tokens=1, traceparent=TRACEPARENT, no_drafter_reason=common_pb2.FALLBACK_REASON_CLIENT_DISABLED
        )
        (span,) = recorder.named("decode target")
        assert [event.attributes and event.attributes["outrider.fallback.reason"] for event in span.events] == [
            "CLIENT_DISABLED"
        ]
        recorder.exporter.clear()

        # The same id twice: the first one's span ends with what ended it, the second one's as well.
        twice, result = client.open(PROMPT, traceparent=TRACEPARENT)
        await eventually(lambda: len(result.token_ids) > 3)
        again = verifier_pb2.OpenDecoding(
            sequence_id=twice,
            token_ids=b"\1\0\0\0",
            num_prompt_tokens=1,
            sampling=common_pb2.SamplingParameters(seed=1),
            traceparent=TRACEPARENT,
        )
        client.send(verifier_pb2.DecodeRequest(opens=[again]))
        await eventually(result.done.is_set)
        assert [span.status.status_code for span in recorder.named("decode target")] == [StatusCode.ERROR] * 2
        recorder.exporter.clear()

        # One that the gateway closes ends without an error, those of a broken stream with one.
        closed, result = client.open(PROMPT, traceparent=TRACEPARENT)
        await eventually(lambda: len(result.token_ids) > 3)
        client.send(verifier_pb2.DecodeRequest(closes=[closed]))
        await eventually(lambda: len(recorder.named("decode target")) == 1)
        (span,) = recorder.named("decode target")
        assert span.status.status_code is StatusCode.UNSET
        recorder.exporter.clear()
        _, result = client.open(PROMPT, traceparent=TRACEPARENT)
        await eventually(lambda: len(result.token_ids) > 3)
    (span,) = recorder.named("decode target")
    assert span.status.status_code is StatusCode.ERROR


async def test_a_verifier_that_does_not_trace_passes_the_trace_on(pair: Pair) -> None:
    target, draft = pair
    recorder = Recorder()
    async with (
        running_drafter(drafter_settings(model=draft), recorder.telemetry) as drafter,
        running_verifier(verifier_settings(target)) as (verifier, service),
        decode_client(verifier.address) as client,
    ):
        await client.use_drafters(drafter.address)
        await client.decode(PROMPT, drafter=drafter.address, max_tokens=10, traceparent=TRACEPARENT)
        assert not service._sessions or not next(iter(service._sessions.values()))._spans
    assert {parent_of(span) for span in recorder.named("draft draft")} == {PARENT_ID}


async def test_steps_beyond_the_first_ones_are_folded(pair: Pair) -> None:
    """Catches spans without bound at full load, and folded steps that lose what they counted."""
    target, draft = pair
    verifier_spans, drafter_spans = Recorder(), Recorder()
    async with (
        running_drafter(drafter_settings(model=draft), drafter_spans.telemetry, step_spans=3) as drafter,
        running_verifier(verifier_settings(target, step_spans=3), verifier_spans.telemetry) as (verifier, _),
        decode_client(verifier.address) as client,
    ):
        await client.use_drafters(drafter.address)
        result = await client.decode(PROMPT, drafter=drafter.address, max_tokens=60, traceparent=TRACEPARENT)
        await eventually(lambda: len(drafter_spans.named("drafts draft")) > 0)
        # One that the gateway closes has its last steps in the trace all the same.
        closed, partial = client.open(PROMPT, traceparent=TRACEPARENT.replace(PARENT_ID, "1" * 16))
        await eventually(lambda: len(partial.token_ids) > 5)
        client.send(verifier_pb2.DecodeRequest(closes=[closed]))
        await eventually(lambda: len(verifier_spans.named("decode target")) == 2)
    first, second = verifier_spans.named("decode target")
    alone = [span for span in verifier_spans.named("verify_step") if parent_of(span) == id_of(first)]
    folded = [span for span in verifier_spans.named("verify_steps") if parent_of(span) == id_of(first)]
    assert len(alone) == 3
    num_folded = [number(span, "outrider.num_steps") for span in folded]
    assert set(num_folded[:-1]) == {3}
    assert 3 + sum(num_folded) == result.num_steps - 1
    for key, total in (
        ("outrider.num_draft_tokens", result.num_drafted),
        ("outrider.num_accepted_tokens", result.num_accepted),
    ):
        assert sum(number(span, key) for span in alone + folded) == total
    for before, after in itertools.pairwise(folded):
        assert (before.end_time or 0) <= (after.start_time or 0)
    for span in folded:
        numbers = dict(span.attributes or {})
        assert 0 < numbers["outrider.slowest_step_seconds"] <= numbers["outrider.busy_seconds"]  # type: ignore[operator]
    assert [parent_of(span) for span in verifier_spans.named("verify_steps")].count(id_of(second)) >= 1
    assert len(drafter_spans.named("draft draft")) == 3


async def test_the_time_of_a_request_has_no_holes(pair: Pair) -> None:
    """What a step waited for, and the step itself, add up to the time since the step before."""
    target, draft = pair
    recorder = Recorder()
    async with (
        running_drafter(drafter_settings(model=draft)) as drafter,
        running_verifier(verifier_settings(target), recorder.telemetry) as (verifier, _),
        decode_client(verifier.address) as client,
    ):
        await client.use_drafters(drafter.address)
        await asyncio.gather(
            client.decode(PROMPT, drafter=drafter.address, max_tokens=40, traceparent=TRACEPARENT),
            client.decode(PROMPT[:9], drafter=drafter.address, max_tokens=40),
        )
    steps = recorder.named("verify_step")
    gaps, explained = 0.0, 0.0
    for before, after in itertools.pairwise(steps):
        numbers = {key: float(value) for key, value in (after.attributes or {}).items()}  # type: ignore[arg-type]
        gaps += ((after.start_time or 0) - (before.end_time or 0)) * 1e-9
        explained += numbers["outrider.draft_wait_seconds"] + numbers["outrider.turn_wait_seconds"]
        assert 1 <= numbers["outrider.batch_size"] <= 2
        if numbers["outrider.draft_wait_seconds"]:
            parts = numbers["outrider.draft_seconds"] + numbers["outrider.wire_seconds"]
            assert parts == pytest.approx(numbers["outrider.draft_wait_seconds"])
    assert explained == pytest.approx(gaps, rel=0.2, abs=0.05)
    (prefill,) = recorder.named("prefill")
    assert (prefill.attributes or {})["outrider.num_prompt_tokens"] == len(PROMPT)
    (queue,) = recorder.named("queue")
    assert (queue.attributes or {})["outrider.num_running"] in (1, 2)


async def test_preemption_shows(pair: Pair) -> None:
    """Catches the worst of all delays going unnoticed: a sequence that lost its KV blocks."""
    target, _ = pair
    recorder = Recorder()
    settings = verifier_settings(target, num_blocks=16, max_num_batched_tokens=64)
    async with running_verifier(settings, recorder.telemetry) as (verifier, _), decode_client(verifier.address) as one:
        await asyncio.gather(
            *(one.decode(PROMPT, max_tokens=150, traceparent=TRACEPARENT, ignore_eos=True) for _ in range(3))
        )
    lost = recorder.named("preempted")
    assert lost
    decodes = {id_of(span): span for span in recorder.named("decode target")}
    for span in lost:
        events = [event for event in decodes[parent_of(span)].events if event.name == "outrider.preempted"]
        assert any(event.timestamp == span.start_time for event in events)
        assert all(number(event, "outrider.num_lost_tokens") > 0 for event in events)
    assert {parent_of(span) for span in recorder.named("recompute")} <= {parent_of(span) for span in lost}


@pytest.mark.parametrize("traceparent", [TRACEPARENT[:-2] + "00", ""])
async def test_what_is_not_sampled_costs_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch, traceparent: str) -> None:
    """Catches spans, or records of what may become spans, that are made only to be thrown away."""
    target, draft = pair
    verifier_spans, drafter_spans = Recorder(), Recorder()

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("something was made for a trace that nobody keeps")

    for telemetry in (verifier_spans.telemetry, drafter_spans.telemetry):
        monkeypatch.setattr(telemetry.tracer, "start_span", fail)
    monkeypatch.setattr(SequenceTrace, "__init__", fail)
    monkeypatch.setattr(StepSpans, "__init__", fail)
    async with (
        running_drafter(drafter_settings(model=draft), drafter_spans.telemetry) as drafter,
        running_verifier(verifier_settings(target), verifier_spans.telemetry) as (verifier, _),
        decode_client(verifier.address) as client,
    ):
        await client.use_drafters(drafter.address)
        result = await client.decode(PROMPT, drafter=drafter.address, max_tokens=20, traceparent=traceparent)
        assert len(result.token_ids) == 20
        assert result.num_accepted > 0


async def test_nothing_is_recorded_when_nobody_listens(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches spans that are made, and paid for, without an exporter."""
    target, draft = pair

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("a span was made")

    telemetry = Telemetry()
    monkeypatch.setattr(telemetry.tracer, "start_span", fail)
    async with (
        running_drafter(drafter_settings(model=draft), telemetry) as drafter,
        running_verifier(verifier_settings(target), telemetry) as (verifier, _),
        decode_client(verifier.address) as client,
    ):
        await client.use_drafters(drafter.address)
        result = await client.decode(PROMPT, drafter=drafter.address, max_tokens=20, traceparent=TRACEPARENT)
        assert len(result.token_ids) == 20
