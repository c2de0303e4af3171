"""The dashboard's parts: the OTLP receiver, what it makes of spans, the feed, and who may look."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import set_span_in_context
from opentelemetry.util.types import Attributes

from gateway.dashboard.receiver import Receiver
from gateway.dashboard.span_store import Span, SpanEvent, SpanStore, Trace
from gateway.dashboard.timeline import summary, timeline
from gateway.settings import GatewaySettings
from gateway.tokenizer import Tokenizer
from outrider.service.loopback import is_loopback
from outrider.service.settings import BadSettingsError
from outrider.service.telemetry import Telemetry
from outrider.v1 import common_pb2, generation_pb2, verifier_pb2
from tests.gateway.fake_verifier import FakeVerifier, RunningGateway, eventually, running_gateway, update

LENGTH = generation_pb2.FINISH_REASON_LENGTH
HTTP: dict[str, Any] = {"http_listen": "127.0.0.1:0", "dashboard": True}


def script(message: verifier_pb2.OpenDecoding) -> list[verifier_pb2.SequenceUpdate]:
    fallback = common_pb2.Fallback(reason=common_pb2.FALLBACK_REASON_DRAFTER_LOST, position=4)
    return [
        update(message.sequence_id, [70, 71, 72], drafted=4, accepted=2),
        update(message.sequence_id, [73, 74], drafted=1, accepted=1),
        update(message.sequence_id, [75], finish=LENGTH, fallbacks=[fallback]),
    ]


def client_of(running: RunningGateway) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://{running.gateway.http_address}/dashboard", timeout=10, trust_env=False)


async def lines_of(response: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line) async for line in response.aiter_lines() if line]


async def news_of(client: httpx.AsyncClient) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """What a page is told."""
    async with client.stream("GET", "/api/events") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        name = ""
        async for line in response.aiter_lines():
            if line.startswith("event: "):
                name = line[7:]
            elif line.startswith("data: "):
                yield name, json.loads(line[6:])


async def test_spans_come_in_over_otlp() -> None:
    store = SpanStore()
    receiver = Receiver(store, "127.0.0.1:0")
    await receiver.start()
    provider = TracerProvider(resource=Resource({"service.name": "outrider-verifier"}))
    exporter = OTLPSpanExporter(endpoint=f"http://{receiver.address}", insecure=True)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")

    def export() -> None:
        with tracer.start_as_current_span("text_completion m", attributes={"gen_ai.operation.name": "x"}) as root:
            root.add_event("outrider.fallback", {"outrider.fallback.reason": "DRAFTER_LOST"})
            attributes: Attributes = {
                "gen_ai.response.id": "r-1",
                "list": [1, 2],
                "flag": True,
                "ratio": 0.5,
            }
            tracer.start_span("queue", context=set_span_in_context(root), attributes=attributes).end()
            root.set_attribute("gen_ai.response.id", "r-1")

    await asyncio.to_thread(export)
    await receiver.stop()
    (trace,) = store.traces()
    queue, root = trace.spans
    assert store.get(trace.trace_id) is trace is store.of_request("r-1")
    assert (queue.service, queue.parent_id) == ("outrider-verifier", root.span_id)
    assert {"list": [1, 2], "flag": True, "ratio": 0.5}.items() <= queue.attributes.items()
    assert root.events[0].attributes == {"outrider.fallback.reason": "DRAFTER_LOST"}
    assert root.start <= queue.start <= queue.end <= root.end
    provider.shutdown()


async def test_an_address_that_is_taken() -> None:
    first = Receiver(SpanStore(), "127.0.0.1:0")
    await first.start()
    with pytest.raises(OSError, match="dashboard_otlp_listen"):
        await Receiver(SpanStore(), first.address).start()
    await first.stop()


def test_the_store_is_bounded() -> None:
    """Catches a gateway that fills its memory with traces."""
    store = SpanStore(max_traces=3, max_spans=5)

    class Fake:
        def __init__(self, trace: int) -> None:
            self.trace_id = bytes([trace]) * 16
            self.span_id = self.parent_span_id = b"\1" * 8
            self.name = "x"
            self.start_time_unix_nano = self.end_time_unix_nano = 0
            self.attributes: list[Any] = []
            self.events: list[Any] = []
            self.status = type("Status", (), {"code": 0, "message": "", "STATUS_CODE_ERROR": 2})

    class Resources:
        def __init__(self, spans: list[Fake]) -> None:
            self.resource = type("Resource", (), {"attributes": []})
            self.scope_spans = [type("Scope", (), {"spans": spans})]

    store.add([Resources([Fake(trace) for trace in range(5) for _ in range(7)])])
    assert [trace.trace_id[:2] for trace in store.traces()] == ["04", "03", "02"]
    assert all((len(trace.spans), trace.num_dropped) == (5, 2) for trace in store.traces())


def a_trace(draft_offset: float = 0.0) -> Trace:
    """Prompt, one step with a draft of 20 ms and 10 ms on the wire, one without, eight folded."""

    def span(name: str, start: float, end: float, events: tuple[SpanEvent, ...] = (), **attributes: Any) -> Span:
        attributes = {f"outrider.{key}": value for key, value in attributes.items()}
        return Span("s", name, name, "", 100 + start, 100 + end, attributes, events)

    fallback = SpanEvent("outrider.fallback", 100.3, {"outrider.fallback.reason": "DRAFTER_LOST"})
    first = SpanEvent("outrider.first_token", 100.11, {})
    root = Span(
        "g", "text_completion m", "1", "", 100.0, 101.0,
        {"gen_ai.operation.name": "text_completion", "gen_ai.response.id": "r"}, (first, fallback),
    )  # fmt: skip
    waits: dict[str, Any] = {"draft_wait_seconds": 0.03, "draft_seconds": 0.02, "turn_wait_seconds": 0.01}
    return Trace(
        "t",
        [
            span("verify_step", 0.14, 0.2, position=5, num_draft_tokens=4, num_accepted_tokens=3, **waits),
            span("draft d", 0.105 + draft_offset, 0.125 + draft_offset, position=5, num_draft_tokens=4),
            span("queue", 0.0, 0.02),
            span("prefill", 0.02, 0.1),
            span("verify_step", 0.21, 0.3, position=9, turn_wait_seconds=0.01, batch_size=1),
            span("verify_steps", 0.31, 0.9, position=10, num_steps=8, busy_seconds=0.4, turn_wait_seconds=0.19),
            span("decode m", 0.0, 1.0, (SpanEvent("outrider.fallback", 100.2999, fallback.attributes),)),
            root,
        ],
    )


def test_the_timeline_tells_where_the_time_went() -> None:
    found = timeline(a_trace())
    assert found is not None
    assert [phase["kind"] for phase in found["phases"]] == ["queue", "prefill"]
    first, second, folded = found["steps"]
    assert first["wire"] == [pytest.approx([0.1, 0.105]), pytest.approx([0.125, 0.13])]
    assert first["draft"] is None, "the drafter's own span says it"
    assert (second["wire"], second["draft"]) == ([], None)
    assert (folded["num_steps"], folded["verify_seconds"]) == (8, 0.4)
    totals = found["totals"]
    expected = {"queue": 0.02, "prefill": 0.08, "verify": 0.55, "draft": 0.02, "wire": 0.01, "turn": 0.21}
    assert {key: totals[key] for key in expected} == pytest.approx(expected)
    assert sum(totals.values()) == pytest.approx(1.0)
    assert [event["name"] for event in found["events"]] == ["first_token", "fallback"]


def test_a_clock_that_is_off_is_not_believed() -> None:
    """Catches wires that are drawn backwards because two machines disagree on the time."""
    found = timeline(a_trace(draft_offset=5.0))
    assert found is not None
    first = found["steps"][0]
    assert first["draft"] == pytest.approx([0.105, 0.125])
    assert first["wire"] == [pytest.approx([0.1, 0.105]), pytest.approx([0.125, 0.13])]


def test_a_request_that_runs_has_no_timeline_yet() -> None:
    trace = a_trace()
    trace.spans.pop()
    assert summary(trace) is timeline(trace) is None


async def test_the_page_and_its_box(verifier: FakeVerifier, tokenizer: Tokenizer) -> None:
    verifier.script = script
    async with running_gateway(verifier, tokenizer=tokenizer, **HTTP) as running, client_of(running) as client:
        page = await client.get("/")
        assert page.status_code == 200
        assert "default-src 'self'" in page.headers["content-security-policy"]
        assert "http://" not in page.text.replace("http://www.w3.org", "")
        bare = await client.get(f"http://{running.gateway.http_address}/dashboard")
        assert (bare.status_code, bare.headers["location"]) == (307, "/dashboard/")
        for name in ("main.js", "style.css", "icon.svg"):
            assert (await client.get(f"/{name}")).status_code == 200
        assert (await client.get("/../settings.py")).status_code == 404
        async with client.stream("POST", "/api/generate", json={"prompt": "The fox"}) as response:
            started, *tokens, finished = await lines_of(response)
        assert started["started"]["model"] == "fake"
        pieces = [piece for line in tokens for piece in line["tokens"]]
        assert [origin for _, origin in pieces] == ["accepted", "accepted", "recovered", "accepted", "bonus", "plain"]
        assert all(text for text, _ in pieces)
        assert finished["finished"]["fallbacks"] == ["DRAFTER_LOST"]
        state = (await client.get("/api/state")).json()
        assert state["totals"]["tokens_by_origin"] == {"accepted": 3, "recovered": 1, "bonus": 1, "plain": 1}
        assert state["totals"]["drafted_by_position"] == [2, 1, 1, 1]
        assert state["totals"]["accepted_by_position"] == [2, 1, 0, 0]
        assert state["totals"]["fallbacks_by_reason"] == {"DRAFTER_LOST": 1}
        assert state["totals"]["ends_by_reason"] == {"LENGTH": 1}
        (member,) = state["verifiers"]
        assert member["is_ready"]
        assert (await client.get("/api/traces")).json() == []
        assert (await client.get("/api/traces/0")).status_code == 404
        assert (await client.get("/api/requests/0/trace")).status_code == 204


@pytest.mark.parametrize("shows_texts", [False, True])
async def test_others_text_is_shown_only_where_a_setting_asks(
    verifier: FakeVerifier, tokenizer: Tokenizer, shows_texts: bool
) -> None:
    """Catches a page that lets one user read another's completion, and a client that gets what it did not ask for."""
    verifier.script = script
    async with (
        running_gateway(verifier, tokenizer=tokenizer, dashboard_texts=shows_texts, **HTTP) as running,
        client_of(running) as client,
    ):
        news = news_of(client)
        assert (await anext(news))[0] == "state"
        call = running.stub.Generate(generation_pb2.GenerateRequest(prompt="secret"))
        chunks = [response.chunk async for response in call if response.HasField("chunk")]
        text = "".join(chunk.text for chunk in chunks)
        assert not any(token.text for chunk in chunks for token in chunk.tokens)
        shown: list[list[str]] = []
        has_ended = False
        async for name, told in news:
            if name == "tokens":
                shown += [piece for pieces in told["tokens"].values() for piece in pieces]
                has_ended = has_ended or bool(told["ended"])
            if has_ended:
                break
        await news.aclose()  # type: ignore[attr-defined]
        assert [origin for _, origin in shown].count("accepted") == 3
        assert "".join(piece for piece, _ in shown) == (text if shows_texts else "")
        assert "secret" not in json.dumps((await client.get("/api/state")).json())


async def test_a_request_that_its_client_leaves_is_counted(verifier: FakeVerifier, tokenizer: Tokenizer) -> None:
    async with running_gateway(verifier, tokenizer=tokenizer, **HTTP) as running, client_of(running) as client:
        call = running.stub.Generate(generation_pb2.GenerateRequest(prompt="x"))
        sequence_id = (await verifier.next_open()).sequence_id
        verifier.send(update(sequence_id, [70]))
        await call.read()
        assert (await client.get("/api/state")).json()["num_running"] == 1
        call.cancel()
        await eventually(lambda: running.num_sequences == 0)
        state = (await client.get("/api/state")).json()
        assert (state["num_running"], state["totals"]["ends_by_reason"]) == (0, {"CANCELLED": 1})


async def test_who_may_look(verifier: FakeVerifier, tokenizer: Tokenizer) -> None:
    """Catches web pages elsewhere that read, or generate, through a browser on this machine."""
    async with running_gateway(verifier, tokenizer=tokenizer, **HTTP) as running, client_of(running) as client:
        for path in ("/api/state", "/api/traces", "/api/events"):
            assert (await client.get(path, headers={"host": "evil.example:80"})).status_code == 403
        body = {"prompt": "x"}
        assert (await client.post("/api/generate", json=body, headers={"host": "evil.example"})).status_code == 403
        form = await client.post("/api/generate", content=json.dumps(body), headers={"content-type": "text/plain"})
        assert form.status_code == 415
        assert (await client.get("/api/state", headers={"host": "localhost:99"})).status_code == 200
        bad = await client.post("/api/generate", json={"prompt": "x", "max_tokens": 0})
        assert bad.status_code == 400
        assert bad.json()["error"]["param"] == "max_tokens"
        assert (await client.post("/api/generate", json={"prompt": "x", "nonsense": 1})).status_code == 400


async def test_pages_that_look_on_are_limited(verifier: FakeVerifier) -> None:
    async with running_gateway(verifier, **HTTP) as running, client_of(running) as client:
        async with asyncio.timeout(20):
            pages = [news_of(client) for _ in range(8)]
            for page in pages:
                await anext(page)
            assert (await client.get("/api/events")).status_code == 503
            for page in pages:
                await page.aclose()  # type: ignore[attr-defined]
            feed = running.gateway._dashboard.feed  # type: ignore[union-attr]
            await eventually(lambda: not feed.is_full)


async def test_requests_of_the_page_are_traced_whatever_the_rate(verifier: FakeVerifier, tokenizer: Tokenizer) -> None:
    verifier.script = script
    provider = TracerProvider()
    telemetry = Telemetry.from_provider(provider)
    settings = {**HTTP, "dashboard_otlp_listen": "127.0.0.1:0"}
    async with (
        running_gateway(verifier, tokenizer=tokenizer, telemetry=telemetry, **settings) as running,
        client_of(running) as client,
    ):
        address = running.gateway._dashboard.otlp_address  # type: ignore[union-attr]
        exporter = OTLPSpanExporter(endpoint=f"http://{address}", insecure=True)
        provider.add_span_processor(SimpleSpanProcessor(_InThread(exporter)))
        response = await client.post("/api/generate", json={"prompt": "x"})
        request_id = json.loads(response.text.splitlines()[0])["started"]["request_id"]
        await eventually(lambda: running.gateway._dashboard.spans.of_request(request_id) is not None)  # type: ignore[union-attr]
        found = (await client.get(f"/api/requests/{request_id}/trace")).json()
        assert found["num_output_tokens"] == 6
        assert (await client.get(f"/api/traces/{found['trace_id']}")).json()["request_id"] == request_id
        assert [line["request_id"] for line in (await client.get("/api/traces")).json()] == [request_id]


class _InThread(SpanExporter):
    """An exporter that does not block the loop that its receiver runs on."""

    def __init__(self, exporter: OTLPSpanExporter) -> None:
        self._exporter = exporter

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        asyncio.get_running_loop().run_in_executor(None, self._exporter.export, spans)
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self._exporter.shutdown()


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--dashboard"], "--dashboard needs --http-listen"),
        (["--dashboard-otlp-listen", "0.0.0.0:4317"], "--dashboard-otlp-listen must be an address of this machine"),
    ],
)
def test_settings_that_contradict_themselves(flags: list[str], problem: str) -> None:
    with pytest.raises(BadSettingsError, match=problem):
        GatewaySettings.load(["--verifiers", "v:1", *flags], program="x")


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.3.2.1", True), ("[::1]", True), ("LOCALHOST", True), ("0.0.0.0", False),
     ("[::]", False), ("10.0.0.1", False), ("evil.example", False), ("127.0.0.1.evil.example", False), ("", False)],
)  # fmt: skip
def test_this_machine_alone(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
