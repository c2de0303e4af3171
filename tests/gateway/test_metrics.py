"""What the gateway counts of requests that end in every way there is."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest

import gateway.admission
import gateway.rate_limits
from gateway.metrics import REFUSALS, GatewayMetrics
from gateway.tokenizer import Tokenizer
from outrider.v1 import common_pb2, generation_pb2, verifier_pb2
from tests.gateway.fake_verifier import FakeVerifier, RunningGateway, complete, eventually, running_gateway, token_ids
from tests.gateway.fake_verifier import update as step
from tests.scrape import Scrape

REQUEST = generation_pb2.GenerateRequest(token_ids=token_ids(1))
LENGTH = generation_pb2.FINISH_REASON_LENGTH
LOST = common_pb2.Fallback(reason=common_pb2.FALLBACK_REASON_DRAFTER_LOST, position=3)


@pytest.fixture
def metrics() -> Iterator[GatewayMetrics]:
    made = GatewayMetrics.from_environment(is_scraped=True, environment={})
    yield made
    made.stop()


def look(metrics: GatewayMetrics) -> Scrape:
    return Scrape.of_text(metrics.render()[0].decode())


def ended(metrics: GatewayMetrics) -> dict[str, float]:
    return look(metrics).by("outrider_gateway_requests_ended_total", "reason")


async def fails(running: RunningGateway, *prompt: int, **options: object) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await complete(running, token_ids=token_ids(*prompt), **options)
    code: grpc.StatusCode = caught.value.code()
    return code


async def test_each_end_has_its_name(verifier: FakeVerifier, metrics: GatewayMetrics) -> None:
    """Catches requests that are counted under the wrong name, twice, or not at all."""
    verifier.max_running = 2
    async with running_gateway(verifier, metrics=metrics, max_queued_requests=0) as running:
        # Finished, after a fallback, with tokens of three origins.
        call = running.stub.Generate(REQUEST)
        opened = await verifier.next_open()
        assert look(metrics).total("outrider_gateway_requests_running") == 1
        verifier.send(step(opened.sequence_id, [4]))
        verifier.send(step(opened.sequence_id, [5, 6, 7], drafted=4, accepted=2, fallbacks=[LOST]))
        verifier.send(step(opened.sequence_id, [8], finish=LENGTH))
        async for _ in call:
            pass
        assert ended(metrics) == {"length": 1}
        # Cancelled by the client, in the midst of its answer.
        call = running.stub.Generate(REQUEST)
        opened = await verifier.next_open()
        verifier.send(step(opened.sequence_id, [4]))
        await call.read()
        await call.read()
        call.cancel()
        await running.is_idle()
        # Out of time.
        with pytest.raises(grpc.aio.AioRpcError):
            await running.stub.Generate(REQUEST, timeout=0.2).read()
        await verifier.next_open()
        await running.is_idle()
        # Bad, refused for want of a place, and lost with their verifier.
        assert await fails(running, 100_000) is grpc.StatusCode.INVALID_ARGUMENT
        holding = [running.stub.Generate(REQUEST) for _ in range(2)]
        for _ in holding:
            await verifier.next_open()
        assert await fails(running, 2) is grpc.StatusCode.RESOURCE_EXHAUSTED
        verifier.break_stream()
        for call in holding:
            with pytest.raises(grpc.aio.AioRpcError):
                await call.read()
        await running.is_idle()
        # The answers are with the clients before they are counted.
        await eventually(lambda: sum(ended(metrics).values()) == 7)
        found = look(metrics)
    assert found.by("outrider_gateway_requests_ended_total", "reason") == {
        "length": 1,
        "cancelled": 1,
        "deadline_exceeded": 1,
        "invalid_argument": 1,
        "resource_exhausted": 1,
        "unavailable": 2,
    }
    assert found.by("outrider_gateway_requests_refused_total", "reason") == {"queue_full": 1}
    assert found.by("outrider_gateway_tokens_total", "origin") == {"plain": 3, "accepted": 2, "recovered": 1}
    # Five got as far as a verifier, with a prompt of one token each.
    assert found.total("outrider_gateway_prompt_tokens_total") == 5
    assert found.total("gen_ai_server_time_to_first_token_seconds_count") == 2
    assert found.total("gen_ai_server_time_per_output_token_seconds_count") == 1
    durations = found.by("gen_ai_server_request_duration_seconds_count", "error_type")
    assert durations.pop("") == 1
    assert durations == {
        "CANCELLED": 1,
        "DEADLINE_EXCEEDED": 1,
        "INVALID_ARGUMENT": 1,
        "RESOURCE_EXHAUSTED": 1,
        "UNAVAILABLE": 2,
    }
    assert found.by("outrider_gateway_fallbacks_total", "reason")["drafter_lost"] == 1


async def test_the_queue_and_the_pool_can_be_seen(verifier: FakeVerifier, metrics: GatewayMetrics) -> None:
    verifier.max_running = 1
    async with running_gateway(
        verifier, "127.0.0.1:1", metrics=metrics, drafters=("d1:1",), drafter_wait_seconds=0
    ) as running:
        found = look(metrics)
        assert found.by("outrider_gateway_verifiers", "state") == {"ready": 1, "lost": 1}
        assert found.by("outrider_gateway_drafters", "state") == {"lost": 1}
        assert found.total("outrider_gateway_requests_limit") == 1
        verifier.report(d1=verifier_pb2.DRAFTER_STATE_READY)
        await eventually(lambda: look(metrics).by("outrider_gateway_drafters", "state") == {"ready": 1})
        calls = [running.stub.Generate(REQUEST) for _ in range(3)]
        await verifier.next_open()
        await eventually(lambda: look(metrics).total("outrider_gateway_requests_waiting") == 2)
        assert look(metrics).total("outrider_gateway_requests_running") == 1
        await asyncio.sleep(0.2)
        for call in calls:
            call.cancel()
        await running.is_idle()
        verifier.drain()
        await eventually(lambda: look(metrics).by("outrider_gateway_verifiers", "state") == {"draining": 1, "lost": 1})
        await eventually(lambda: ended(metrics) == {"cancelled": 3})
        found = look(metrics)
    assert found.total("outrider_gateway_queue_duration_seconds_count") == 3
    assert found.total("outrider_gateway_queue_duration_seconds_sum") >= 0.4


async def test_each_choice_of_an_http_request_is_a_request(
    verifier: FakeVerifier, tokenizer: Tokenizer, metrics: GatewayMetrics
) -> None:
    verifier.script = lambda opened: [step(opened.sequence_id, [65, 66], finish=LENGTH)]
    async with (
        running_gateway(verifier, tokenizer=tokenizer, metrics=metrics, http_listen="127.0.0.1:0") as running,
        httpx.AsyncClient(base_url=f"http://{running.gateway.http_address}", trust_env=False) as client,
    ):
        response = await client.post("/v1/completions", json={"model": "fake", "prompt": "a", "n": 3, "max_tokens": 2})
        assert response.status_code == 200, response.text
        text = (await client.get("/metrics")).text
    found = Scrape.of_text(text)
    assert found.by("outrider_gateway_requests_ended_total", "reason") == {"length": 3}
    assert found.total("outrider_gateway_tokens_total") == 6
    assert (
        found.total(
            "gen_ai_server_request_duration_seconds_count",
            gen_ai_operation_name="text_completion",
            gen_ai_provider_name="outrider",
            gen_ai_request_model="fake",
        )
        == 3
    )


def test_reasons_for_refusals_are_known() -> None:
    """Catches a reason that no dashboard shows before it occurs for the first time."""
    sources = [Path(str(module.__file__)).read_text() for module in (gateway.admission, gateway.rate_limits)]
    used = set(re.findall(r'(?:_refusal\(|Excess\(|refusals\[)\s*"(\w+)"', "".join(sources)))
    assert used == set(REFUSALS)
