"""One request is one trace over three processes, exported as the standard variables say."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from outrider.v1 import common_pb2, generation_pb2, generation_pb2_grpc
from tests.end_to_end.test_sampling import tiny_cluster

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CLIENT_SPAN = "b7ad6b7169203331"
SEED = 8_241_905_773_310


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps every span that arrives, as (service, span)."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:
        for resource in request.resource_spans:
            [service] = [item.value.string_value for item in resource.resource.attributes if item.key == "service.name"]
            self.spans += [(service, span) for scope in resource.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def named(self, start: str) -> list[Any]:
        """Spans whose name begins so."""
        return [span for _, span in self.spans if span.name.startswith(start)]


def attributes(span: Any) -> dict[str, Any]:
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in span.attributes}


async def test_one_trace_from_client_to_drafter(
    tiny_pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a service that drops the context, a span without its parent, an exporter that never flushes, and a seed
    where others than the client can read it."""
    receiver = Receiver()
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    request = generation_pb2.GenerateRequest(
        token_ids=generation_pb2.TokenIds(ids=[3, 1, 4]),
        sampling=common_pb2.SamplingParameters(temperature=1.0, seed=SEED),
        # Both contexts are 256 tokens long: the drafter is outgrown a chain before the end.
        stopping=generation_pb2.StoppingParameters(max_tokens=253),
        speculation=generation_pb2.SpeculationParameters(max_draft_tokens=16),
    )
    cluster = tiny_cluster(tiny_pair, tmp_path, max_draft_tokens=16, log_level="DEBUG")
    async with cluster, grpc.aio.insecure_channel(cluster.address) as channel:
        call = generation_pb2_grpc.GenerationServiceStub(channel).Generate(
            request, metadata=(("traceparent", f"00-{TRACE_ID}-{CLIENT_SPAN}-01"),)
        )
        responses = [response async for response in call]
    # The services have ended, and have exported what was left.
    await asyncio.to_thread(server.stop(grace=1).wait)

    finished = responses[-1].finished
    assert {span.trace_id.hex() for _, span in receiver.spans} == {TRACE_ID}
    assert {service for service, _ in receiver.spans} == {"outrider-gateway", "outrider-verifier", "outrider-drafter"}
    [completion] = receiver.named("text_completion")
    [decode] = receiver.named("decode")
    assert completion.parent_span_id.hex() == CLIENT_SPAN
    assert decode.parent_span_id == completion.span_id
    assert attributes(completion)["gen_ai.usage.output_tokens"] == finished.usage.num_output_tokens
    for name in ("queue", "prefill"):
        [span] = receiver.named(name)
        assert span.parent_span_id == decode.span_id
    steps = receiver.named("verify_step")
    assert {step.parent_span_id for step in steps} == {decode.span_id}
    num_steps = sum(attributes(step).get("outrider.num_steps", 1) for step in steps)
    assert num_steps == finished.speculation.num_steps - 1, "every step but the prompt's own"
    assert len(steps) < 32 + 10, "steps beyond the first ones are folded"
    for key, total in (
        ("outrider.num_draft_tokens", finished.speculation.num_draft_tokens),
        ("outrider.num_accepted_tokens", finished.speculation.num_accepted_tokens),
    ):
        assert sum(attributes(step)[key] for step in steps) == total
    drafts = receiver.named("draft")
    assert drafts
    assert {draft.parent_span_id for draft in drafts} == {decode.span_id}
    fallbacks: list[Mapping[str, Any]] = []
    for span in (completion, decode):
        [event] = [event for event in span.events if event.name == "outrider.fallback"]
        fallbacks.append(attributes(event))
        assert attributes(event)["outrider.fallback.reason"] == "DRAFTER_MAX_LENGTH"
    # What both services tell has one name: a query finds it in either's spans.
    assert fallbacks[0] == fallbacks[1]
    assert fallbacks[0]["outrider.fallback.position"] == finished.speculation.fallbacks[0].position
    addresses = {attributes(span)["outrider.drafter.address"] for span in (completion, decode)}
    assert addresses == {cluster.drafter.address}
    assert {attributes(span)["outrider.verification"] for span in (completion, decode)} == {"coupled"}
    logs = [path.read_text() for path in tmp_path.glob("*.log")]
    assert len(logs) == 3
    assert all("serving on" in log for log in logs)
    assert str(SEED) not in "".join([*logs, *(str(span) for _, span in receiver.spans)])
