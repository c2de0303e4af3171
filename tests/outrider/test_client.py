"""The clients against a gateway that a test scripts: events, errors, retries, cancellation, trace context."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from opentelemetry import context as otel_context
from opentelemetry import trace

from outrider.client import (
    AsyncClient,
    Chunk,
    Client,
    ClientError,
    DeadlineExceededError,
    FallbackReason,
    Finished,
    FinishReason,
    InvalidRequestError,
    OverloadedError,
    RetryPolicy,
    Started,
    TokenOrigin,
    UnavailableError,
    Verification,
)
from outrider.request import build_request
from outrider.v1 import common_pb2, generation_pb2
from tests.network.tcp_proxy import TcpProxy, proxied
from tests.outrider.fake_gateway import FakeGateway

QUICK = RetryPolicy(initial_delay_seconds=0.01)


@pytest.fixture
async def gateway() -> AsyncIterator[FakeGateway]:
    async with FakeGateway() as gateway:
        yield gateway


@pytest.fixture
async def client(gateway: FakeGateway) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(gateway.address, retry=QUICK) as client:
        yield client


class TestAsyncClient:
    async def test_generate_adds_the_stream_up(self, client: AsyncClient) -> None:
        completion = await client.generate("tell", request_id="r1")
        assert completion.text == "Once \N{SLIGHTLY SMILING FACE}upon"
        assert completion.token_ids == (1, 2, 3, 4, 5)
        assert [token.origin for token in completion.tokens] == [
            TokenOrigin.ACCEPTED,
            TokenOrigin.RECOVERED,
            TokenOrigin.ACCEPTED,
            TokenOrigin.ACCEPTED,
            TokenOrigin.BONUS,
        ]
        assert (completion.request_id, completion.model, completion.seed) == ("r1", "fake", 7)
        assert completion.finish_reason is FinishReason.LENGTH
        assert completion.usage.num_output_tokens == 5
        assert completion.speculation.acceptance_rate == 0.5
        assert completion.speculation.num_accepted_per_position == (2, 1, 0)
        assert completion.speculation.fallbacks[0].reason is FallbackReason.DRAFTER_MAX_LENGTH
        assert completion.speculation.verification is Verification.COUPLED
        assert completion.mean_acceptance_length == 2.5
        assert completion.tokens_per_second == pytest.approx(2.0)

    async def test_stream_yields_typed_events_in_order(self, client: AsyncClient) -> None:
        kinds = [type(event) async for event in client.stream("tell")]
        assert kinds == [Started, Chunk, Chunk, Finished]

    async def test_model_describes_both_pools(self, client: AsyncClient) -> None:
        model = await client.model()
        assert (model.name, model.context_length, model.has_tokenizer) == ("fake", 128, True)
        assert model.verifiers[0].is_ready
        assert model.drafters[0].detail == "vocabulary differs"

    async def test_a_bad_request_names_its_field(self, client: AsyncClient) -> None:
        with pytest.raises(InvalidRequestError) as caught:
            await client.generate("fail INVALID_ARGUMENT sampling.top_p: must be at most 1")
        assert caught.value.field == "sampling.top_p"
        assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT

    async def test_a_full_service_says_when_to_come_back(self, client: AsyncClient, gateway: FakeGateway) -> None:
        with pytest.raises(OverloadedError) as caught:
            await client.generate("fail RESOURCE_EXHAUSTED")
        assert caught.value.retry_delay_seconds == 1.5
        assert len(gateway.requests) == 1

    async def test_other_statuses_keep_their_code(self, client: AsyncClient) -> None:
        with pytest.raises(ClientError) as caught:
            await client.generate("fail ABORTED")
        assert caught.value.code is grpc.StatusCode.ABORTED

    @pytest.mark.parametrize("code", ["RESOURCE_EXHAUSTED", "ABORTED", "INTERNAL", "UNKNOWN", "CANCELLED"])
    async def test_other_statuses_are_not_retried(self, client: AsyncClient, gateway: FakeGateway, code: str) -> None:
        with pytest.raises(ClientError):
            await client.generate(f"fail {code}")
        assert len(gateway.requests) == 1

    async def test_unavailable_is_retried_before_the_first_message(
        self, client: AsyncClient, gateway: FakeGateway
    ) -> None:
        gateway.num_failures_to_come = 2
        completion = await client.generate("tell")
        assert completion.usage.num_output_tokens == 5
        assert len(gateway.requests) == 3
        gateway.num_failures_to_come = 2
        assert (await client.model()).name == "fake"

    async def test_a_long_prompt_is_retried_as_well(self, client: AsyncClient, gateway: FakeGateway) -> None:
        """Catches gRPC's default of keeping no more than 256 KiB of a request for its next attempt."""
        gateway.num_failures_to_come = 1
        completion = await client.generate("tell " + "more " * 200_000)
        assert completion.usage.num_output_tokens == 5
        assert len(gateway.requests) == 2
        assert gateway.requests[0] == gateway.requests[1]

    async def test_a_gateway_that_comes_late_is_waited_for(self, gateway: FakeGateway) -> None:
        async with proxied(gateway.address) as proxy:
            address = proxy.address
        async with AsyncClient(address, retry=RetryPolicy(max_attempts=5, initial_delay_seconds=0.2)) as client:
            completing = asyncio.create_task(client.generate("tell"))
            await asyncio.sleep(0.1)
            assert not completing.done()
            proxy = TcpProxy(gateway.address)
            await proxy.start(address)
            assert (await completing).usage.num_output_tokens == 5
            await proxy.stop()

    async def test_the_time_that_the_gateway_names_counts(self, gateway: FakeGateway) -> None:
        """In place of the back-off, be it longer or shorter."""
        for initial_delay_seconds, pushback_ms, least, most in ((0.01, 300, 0.55, 3.0), (20.0, 10, 0.0, 3.0)):
            gateway.num_failures_to_come, gateway.pushback_ms = 2, pushback_ms
            policy = RetryPolicy(initial_delay_seconds=initial_delay_seconds, max_delay_seconds=30.0)
            start = time.monotonic()
            async with AsyncClient(gateway.address, retry=policy) as client:
                await client.generate("tell", timeout=20)
            assert least < time.monotonic() - start < most

    async def test_a_single_attempt(self, gateway: FakeGateway) -> None:
        gateway.num_failures_to_come = 1
        async with AsyncClient(gateway.address, retry=RetryPolicy(max_attempts=1)) as client:
            with pytest.raises(UnavailableError):
                await client.generate("tell")
        assert len(gateway.requests) == 1

    async def test_unavailable_ends_after_the_last_attempt(self, client: AsyncClient, gateway: FakeGateway) -> None:
        gateway.num_failures_to_come = 100
        with pytest.raises(UnavailableError, match="draining"):
            await client.generate("tell")
        assert len(gateway.requests) == QUICK.max_attempts

    async def test_unavailable_is_final_after_the_first_message(
        self, client: AsyncClient, gateway: FakeGateway
    ) -> None:
        events = []
        with pytest.raises(UnavailableError):  # noqa: PT012
            async for event in client.stream("late UNAVAILABLE"):
                events.append(event)
        assert len(events) == 3
        assert len(gateway.requests) == 1

    async def test_the_timeout_covers_all_attempts(self, gateway: FakeGateway) -> None:
        gateway.num_failures_to_come = 100
        start = time.monotonic()
        async with AsyncClient(gateway.address, retry=RetryPolicy(initial_delay_seconds=0.2)) as client:
            with pytest.raises(DeadlineExceededError):
                await client.generate("tell", timeout=0.5)
        assert 0.4 < time.monotonic() - start < 2
        assert 2 <= len(gateway.requests) < RetryPolicy().max_attempts

    async def test_a_deadline_ends_the_call_at_the_gateway(self, client: AsyncClient, gateway: FakeGateway) -> None:
        with pytest.raises(DeadlineExceededError):
            await client.generate("hang", timeout=0.2)
        await asyncio.wait_for(gateway.was_cancelled.wait(), 5)

    async def test_nobody_at_the_address(self) -> None:
        async with AsyncClient("127.0.0.1:1", retry=QUICK) as client:
            with pytest.raises(UnavailableError):
                await client.generate("tell")

    async def test_leaving_the_iterator_cancels_the_call(self, client: AsyncClient, gateway: FakeGateway) -> None:
        async for event in client.stream("endless"):
            if isinstance(event, Chunk):
                break
        assert await asyncio.wait_for(gateway.was_cancelled.wait(), 5)

    async def test_closing_a_kept_iterator_cancels_the_call(self, client: AsyncClient, gateway: FakeGateway) -> None:
        stream = client.stream("endless")
        async with contextlib.aclosing(stream):
            await anext(stream)
            assert not gateway.was_cancelled.is_set()
        await asyncio.wait_for(gateway.was_cancelled.wait(), 5)

    async def test_cancelling_the_task_cancels_the_call(self, client: AsyncClient, gateway: FakeGateway) -> None:
        task = asyncio.create_task(client.generate("endless"))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(gateway.was_cancelled.wait(), 5)

    async def test_a_stream_without_an_end_is_an_error(self, client: AsyncClient) -> None:
        with pytest.raises(ClientError, match="ended before"):
            await client.generate("cut")

    async def test_the_current_trace_travels_along(self, client: AsyncClient, gateway: FakeGateway) -> None:
        await client.generate("tell")
        assert "traceparent" not in gateway.metadata[0]
        span = trace.NonRecordingSpan(trace.SpanContext(0xABC, 0xDEF, is_remote=False, trace_flags=trace.TraceFlags(1)))
        token = otel_context.attach(trace.set_span_in_context(span))
        try:
            await client.generate("tell")
        finally:
            otel_context.detach(token)
        assert gateway.metadata[1]["traceparent"] == f"00-{0xABC:032x}-{0xDEF:016x}-01"


class TestClient:
    """The blocking client runs in a thread beside the gateway's loop."""

    async def test_generate_and_model(self, gateway: FakeGateway) -> None:
        def use() -> str:
            with Client(gateway.address) as client:
                assert client.model().name == "fake"
                return client.generate("tell", temperature=0).text

        assert await asyncio.to_thread(use) == "Once \N{SLIGHTLY SMILING FACE}upon"
        assert gateway.requests[0].sampling.temperature == 0

    async def test_retries_and_errors(self, gateway: FakeGateway) -> None:
        gateway.num_failures_to_come = 2

        def use() -> None:
            with Client(gateway.address, retry=QUICK) as client:
                assert client.generate("tell").usage.num_output_tokens == 5
                assert len(gateway.requests) == 3
                gateway.num_failures_to_come = 2
                assert client.model().name == "fake"
                with pytest.raises(UnavailableError, match="too late"):
                    client.generate("late UNAVAILABLE")
                assert len(gateway.requests) == 4
                gateway.num_failures_to_come = 100
                with pytest.raises(UnavailableError, match="draining"):
                    client.generate("tell")
                assert len(gateway.requests) == 4 + QUICK.max_attempts
                gateway.num_failures_to_come = 0
                with pytest.raises(InvalidRequestError, match="no"):
                    client.generate("fail INVALID_ARGUMENT")
                with pytest.raises(DeadlineExceededError):
                    client.generate("hang", timeout=0.2)

        await asyncio.to_thread(use)

    async def test_leaving_the_iterator_cancels_the_call(self, gateway: FakeGateway) -> None:
        def use() -> None:
            with Client(gateway.address) as client:
                for event in client.stream("endless"):
                    if isinstance(event, Chunk):
                        break

        await asyncio.to_thread(use)
        assert await asyncio.wait_for(gateway.was_cancelled.wait(), 5)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_attempts": 0},
        {"max_attempts": 6},
        {"initial_delay_seconds": 0.0},
        {"max_delay_seconds": -1.0},
        {"max_delay_seconds": float("inf")},
        {"initial_delay_seconds": float("nan")},
    ],
)
def test_a_retry_policy_that_grpc_would_not_follow(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        RetryPolicy(**fields)


class TestBuildRequest:
    def test_unset_stays_unset(self) -> None:
        request = build_request("p", None)
        assert not request.sampling.ListFields()
        assert not request.stopping.HasField("max_tokens")
        assert request.speculation.mode == generation_pb2.SPECULATION_MODE_AUTO
        assert not request.HasField("logprobs")

    def test_zero_is_a_value(self) -> None:
        request = build_request("p", None, temperature=0, top_k=0, logprobs=0, max_tokens=0, seed=0)
        assert {field.name for field, _ in request.sampling.ListFields()} == {"temperature", "top_k", "seed"}
        assert request.stopping.HasField("max_tokens")
        assert request.HasField("logprobs")

    def test_everything_arrives_in_its_place(self) -> None:
        request = build_request(
            None,
            [1, 2],
            logit_bias={5: -1.0},
            stop="END",
            stop_token_ids=(9,),
            ignore_eos=True,
            speculation=False,
            max_draft_tokens=4,
            verification=Verification.COUPLED,
        )
        assert list(request.token_ids.ids) == [1, 2]
        assert request.sampling.logit_bias[5] == -1.0
        assert list(request.stopping.stop) == ["END"]
        assert list(request.stopping.stop_token_ids) == [9]
        assert request.stopping.ignore_eos
        assert request.speculation.mode == generation_pb2.SPECULATION_MODE_OFF
        assert request.speculation.max_draft_tokens == 4
        assert request.speculation.verification == common_pb2.VERIFICATION_COUPLED

    def test_no_prompt_is_left_for_the_gateway_to_refuse(self) -> None:
        assert build_request(None, None).WhichOneof("input") is None
        assert build_request(None, []).WhichOneof("input") == "token_ids"

    @pytest.mark.parametrize(
        ("field", "options"),
        [
            ("stopping.max_tokens", {"max_tokens": -1}),
            ("sampling.top_k", {"top_k": 1 << 40}),
            ("sampling.seed", {"seed": -5}),
            ("stopping.stop_token_ids", {"stop_token_ids": [-1]}),
            ("sampling.logit_bias", {"logit_bias": {-1: 1.0}}),
            ("speculation.verification", {"verification": "hope"}),
            ("request_id", {"request_id": "\udcff"}),
        ],
    )
    def test_what_the_wire_cannot_hold_names_the_field(self, field: str, options: dict[str, Any]) -> None:
        with pytest.raises(InvalidRequestError) as caught:
            build_request("p", None, **options)
        assert caught.value.field == field

    def test_prompt_and_token_ids_exclude_each_other(self) -> None:
        with pytest.raises(InvalidRequestError, match="not both"):
            build_request("p", [1])


def test_the_client_needs_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys, outrider.client, outrider.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
