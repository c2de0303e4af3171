"""OpenAI's API over a verifier that a test scripts: what goes wrong, and what the services of a test cannot show."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import openai
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from gateway.http import server as http_server
from gateway.tokenizer import Tokenizer
from outrider.service.settings import BadSettingsError
from outrider.service.telemetry import Telemetry
from outrider.v1 import common_pb2, verifier_pb2
from tests.gateway import tokenizers_for_tests
from tests.gateway.fake_verifier import FakeVerifier, Update, eventually, prompt_of, update
from tests.gateway.http_clients import LENGTH, TEXT, front, openai_client, saying


async def test_an_error_in_mid_stream_is_the_last_event(verifier: FakeVerifier, tokenizer: Tokenizer) -> None:
    """Catches a stream that looks complete although its verifier died."""
    async with front(verifier, tokenizer=tokenizer) as (running, _), openai_client(running) as client:
        waiting = asyncio.create_task(client.completions.create(model="fake", prompt="a", stream=True))
        opened = await verifier.next_open()
        verifier.send(update(opened.sequence_id, tokenizer._encode("The")))
        stream = await waiting
        assert (await anext(stream)).choices[0].text == "The"
        verifier.break_stream()
        with pytest.raises(openai.APIError, match="verifier") as caught:
            await anext(stream)
        assert caught.value.type == "server_error"
        assert caught.value.code == "unavailable"
        await running.is_idle()


async def test_an_error_of_one_choice_ends_all(verifier: FakeVerifier, tokenizer: Tokenizer) -> None:
    async with front(verifier, tokenizer=tokenizer) as (running, client):
        body = {"prompt": "a", "n": 3}
        asking = asyncio.create_task(client.post("/v1/completions", json=body))
        opened = [await verifier.next_open() for _ in range(3)]
        for sequence in opened[:2]:
            verifier.send(update(sequence.sequence_id, tokenizer._encode("The")))
        error = verifier_pb2.SequenceError(code=8, message="out of blocks", retry_delay_seconds=1.5)
        verifier.send(update(opened[2].sequence_id, error=error))
        answer = await asking
        assert answer.status_code == 429
        assert answer.json()["error"]["message"] == "out of blocks"
        assert (answer.headers["retry-after"], answer.headers["retry-after-ms"]) == ("2", "1500")
        await running.is_idle()
        await eventually(lambda: {sequence.sequence_id for sequence in opened[:2]} <= set(verifier.closed))


async def test_no_verifier_is_unavailable(verifier: FakeVerifier, tokenizer: Tokenizer) -> None:
    async with front(verifier, tokenizer=tokenizer) as (running, _), openai_client(running) as client:
        await verifier.stop()
        await eventually(lambda: not any(link.is_ready for link in running.links))
        with pytest.raises(openai.InternalServerError) as caught:
            await client.completions.create(model="fake", prompt="a")
        assert caught.value.status_code == 503
        assert caught.value.response.headers["retry-after"] == "1"


async def test_a_stream_that_runs_is_finished_while_draining(verifier: FakeVerifier, tokenizer: Tokenizer) -> None:
    """Catches a rollout that cuts answers off."""
    async with (
        front(verifier, tokenizer=tokenizer) as (running, client),
        openai_client(running) as openai_api,
    ):
        waiting = asyncio.create_task(openai_api.completions.create(model="fake", prompt="a", stream=True))
        opened = await verifier.next_open()
        verifier.send(update(opened.sequence_id, tokenizer._encode("The")))
        stream = await waiting
        stopping = asyncio.create_task(running.stop())
        await asyncio.sleep(0.05)
        assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 503
        verifier.send(update(opened.sequence_id, tokenizer._encode(" quick"), finish=LENGTH))
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].text for chunk in chunks) == "The quick"
        assert chunks[-1].choices[0].finish_reason == "length"
        await asyncio.wait_for(stopping, 10)


async def test_the_rule_of_verification_is_asked_for_and_told(verifier: FakeVerifier, tokenizer: Tokenizer) -> None:
    """Catches a rule that is lost on its way, and an answer that tells what was asked for in place of what was done."""
    rules = {0: None, 1: "greedy", 2: "rejection", 3: "coupled"}

    def script(opened: verifier_pb2.OpenDecoding) -> Iterable[Update]:
        number = 3 - opened.verification
        told = common_pb2.Verification.values()[number]
        yield update(opened.sequence_id, tokenizer._encode("The"), finish=LENGTH, verification=told)

    verifier.script = script
    async with front(verifier, tokenizer=tokenizer) as (_, client):
        for number, rule in rules.items():
            body = {"prompt": "a", "temperature": 0, "verification": rule}
            choice = (await client.post("/v1/completions", json=body)).json()["choices"][0]
            assert (await verifier.next_open()).verification == number
            assert choice["outrider"]["speculation"]["verification"] == rules[3 - number]
        refused = await client.post("/v1/completions", json={"prompt": "a", "verification": "hope"})
        assert refused.json()["error"]["param"] == "verification"


async def test_prompts_of_every_kind(verifier: FakeVerifier, tokenizer: Tokenizer) -> None:
    verifier.script = saying(tokenizer)
    ids = tokenizer._encode("def f")
    cases: list[tuple[Any, list[list[int]]]] = [
        ("def f", [ids]),
        ([1, 2], [[1, 2]]),
        (["def f", "x"], [ids, tokenizer._encode("x")]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ]
    async with front(verifier, tokenizer=tokenizer) as (_, client):
        for prompt, expected in cases:
            verifier.opened.clear()
            body = {"prompt": prompt, "echo": True}
            answer = (await client.post("/v1/completions", json=body)).json()
            assert [prompt_of(message) for message in verifier.opened.values()] == expected
            texts = [choice["text"] for choice in answer["choices"]]
            assert texts == [tokenizer.decode(prompt_ids) + TEXT for prompt_ids in expected]
            assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))


async def test_a_prompt_gets_special_tokens_once(verifier: FakeVerifier, tmp_path: Path) -> None:
    """Catches a second beginning-of-sequence token behind the one that a chat template writes."""
    tokenizer = Tokenizer(tokenizers_for_tests.with_template())
    template = tmp_path / "template.jinja"
    template.write_text("<s>{{ messages[0].content }}")
    verifier.script = saying(tokenizer)
    async with front(verifier, tokenizer=tokenizer, chat_template=template) as (_, client):
        await client.post("/v1/completions", json={"prompt": "ab"})
        answer = await client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "ab"}]})
        assert answer.json()["choices"][0]["message"] == {"role": "assistant", "content": TEXT, "refusal": None}
        plain, chat = [prompt_of(message) for message in verifier.opened.values()]
        assert plain == chat == [0, *tokenizer._encode("ab", add_special_tokens=False)]


UNSUPPORTED = {
    "tools": [{"type": "function"}],
    "response_format": {"type": "json_object"},
    "reasoning_effort": "high",
    "modalities": ["audio"],
    "guided_json": {"type": "object"},
    "chat_template": "{{ messages }}",
}


async def test_chat_says_what_it_cannot_do(verifier: FakeVerifier, tokenizer: Tokenizer) -> None:
    """Catches a field that is ignored although the answer should depend on it."""
    message = {"role": "user", "content": "a"}
    bad: list[tuple[dict[str, Any], str]] = [({name: value}, name) for name, value in UNSUPPORTED.items()]
    bad += [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        ({"messages": [message, {"role": "user"}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ]
    async with front(verifier, tokenizer=tokenizer) as (_, client):
        for fields, param in bad:
            answer = await client.post("/v1/chat/completions", json={"messages": [message], **fields})
            assert answer.status_code == 400, fields
            assert answer.json()["error"]["param"] == param
        harmless = {
            "user": "u",
            "metadata": {"a": "b"},
            "store": False,
            "tools": [],
            "response_format": {"type": "text"},
        }
        answer = await client.post("/v1/chat/completions", json={"messages": [message], **harmless})
        assert answer.json()["error"]["code"] == "no_chat_template"


async def test_what_is_no_good_request_at_all(verifier: FakeVerifier, tokenizer: Tokenizer) -> None:
    post = {"method": "POST", "url": "/v1/completions"}
    json_type = {"content-type": "application/json"}
    cases: list[tuple[dict[str, Any], int]] = [
        ({**post, "content": b"{", "headers": json_type}, 400),
        ({**post, "content": b"[1]", "headers": json_type}, 400),
        ({**post, "content": b'{"prompt": "\\ud800"}', "headers": json_type}, 400),
        ({**post, "content": b'{"prompt": "a", "temperature": NaN}', "headers": json_type}, 400),
        ({**post, "json": {"prompt": "a"}, "headers": {"x-request-id": "x" * 125}}, 400),
        ({**post, "content": b'{"prompt": "a"}', "headers": {"content-type": "text/plain"}}, 415),
        ({**post, "json": {"prompt": "a"}, "headers": {"host": "evil.example:80"}}, 403),
        ({**post, "json": {"prompt": "a" * 5000}}, 413),
        ({"method": "GET", "url": "/v1/completions"}, 405),
        ({"method": "GET", "url": "/v1/assistants"}, 404),
        ({"method": "GET", "url": "/v1/models/gpt-4o"}, 404),
    ]
    async with front(verifier, tokenizer=tokenizer, http_max_body_bytes=4096) as (_, client):
        for request, status in cases:
            answer = await client.request(**request)
            assert answer.status_code == status, request
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

        async def endless() -> AsyncIterator[bytes]:
            for _ in range(1000):
                yield b" " * 1024

        answer = await client.post("/v1/completions", content=endless(), headers=json_type)
        assert answer.status_code == 413
    assert not verifier.opened


async def test_a_client_that_does_not_read_is_cut_off(
    verifier: FakeVerifier, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a place that is held for as long as somebody keeps a connection open and silent."""
    monkeypatch.setattr(http_server, "WRITE_SECONDS", 0.5)
    ids = tokenizer._encode(TEXT * 40)
    steps = 20

    def script(opened: verifier_pb2.OpenDecoding) -> Iterable[Update]:
        for step in range(steps):
            yield update(opened.sequence_id, ids, finish=LENGTH if step == steps - 1 else None)

    verifier.script = script
    async with front(verifier, tokenizer=tokenizer) as (running, _):
        assert running.gateway._http is not None
        listener = running.gateway._http._server.servers[0].sockets[0]
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        body = json.dumps({"prompt": "a", "stream": True, "return_tokens": True, "max_tokens": 2000}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        host, _, port = running.gateway.http_address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 10)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        assert b"200" in await reader.readline()
        assert running.num_sequences == 1
        await running.is_idle()
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(100 << 20)
        writer.close()


async def test_a_connection_that_never_asks_is_closed(
    verifier: FakeVerifier, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "HEAD_SECONDS", 0.2)
    async with front(verifier, tokenizer=tokenizer) as (running, _):
        host, _, port = running.gateway.http_address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/compl")
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()


async def test_one_trace_over_all_choices(verifier: FakeVerifier, tokenizer: Tokenizer) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    verifier.script = saying(tokenizer)
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    headers = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}
    async with front(verifier, tokenizer=tokenizer, telemetry=Telemetry.from_provider(provider)) as (_, client):
        answer = await client.post("/v1/completions", json={"prompt": "a", "n": 2}, headers=headers)
        assert answer.status_code == 200
    spans = [span for span in exporter.get_finished_spans() if span.name.startswith("text_completion")]
    assert len(spans) == 3
    assert {f"{span.context.trace_id:032x}" for span in spans} == {trace_id}
    parents = [span.parent.span_id for span in spans if span.parent is not None]
    whole = spans[parents.index(0xB7AD6B7169203331)]
    assert parents.count(whole.context.span_id) == 2
    assert all((span.attributes or {})["http.route"] == "/v1/completions" for span in spans)
    assert all(trace_id in message.traceparent for message in verifier.opened.values())


async def test_a_bad_chat_template_of_the_operator_is_refused(verifier: FakeVerifier, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% if %}")
    tokenizer = Tokenizer(tokenizers_for_tests.byte_level())
    with pytest.raises(BadSettingsError, match="chat_template"):
        async with front(verifier, tokenizer=tokenizer, chat_template=template):
            pass
