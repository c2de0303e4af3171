"""Fields that nobody knows: what clients of many providers send along, and what an answer echoed back brings."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from gateway.http.ignored_fields import MAX_HEADER_CHARACTERS, note_ignored
from gateway.tokenizer import Tokenizer
from tests.gateway.fake_verifier import FakeVerifier, prompt_of
from tests.gateway.http_clients import front, saying

HEADER = "x-outrider-ignored-fields"
USER: dict[str, Any] = {"role": "user", "content": "a"}
# As LiteLLM hands an answer to its caller, who sends it with the next request.
ECHOED: dict[str, Any] = {
    "content": "The quick brown fox",
    "role": "assistant",
    "tool_calls": None,
    "function_call": None,
    "provider_specific_fields": {"refusal": None},
    "reasoning_content": None,
}


@pytest.fixture
def template(tmp_path: Path) -> Path:
    path = tmp_path / "template.jinja"
    path.write_text("{% for message in messages %}{{ message.content }}|{% endfor %}")
    return path


async def test_a_reply_echoed_back_goes_on_with_the_chat(
    verifier: FakeVerifier, tokenizer: Tokenizer, template: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches a conversation that ends at its second turn because a client's library adds to messages."""
    verifier.script = saying(tokenizer)
    cached = [{"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}]
    body = {"messages": [USER, ECHOED, {"role": "user", "content": cached}], "num_ctx": 4096}
    async with front(verifier, tokenizer=tokenizer, chat_template=template) as (_, client):
        with caplog.at_level(logging.DEBUG, "gateway.http"):
            answer = await client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200
        names = [
            "num_ctx",
            "messages[1].provider_specific_fields",
            "messages[1].reasoning_content",
            "messages[2].content[0].cache_control",
        ]
        assert answer.headers[HEADER] == ", ".join(names)
        assert all(name in caplog.text for name in names)
        assert [prompt_of(opened) for opened in verifier.opened.values()] == [
            tokenizer._encode(f"a|{ECHOED['content']}|b|")
        ]
        stream = await client.post("/v1/chat/completions", json={**body, "stream": True})
        assert stream.headers[HEADER] == answer.headers[HEADER]
        clean = await client.post("/v1/chat/completions", json={"messages": [USER], "user": "u", "tools": []})
        assert HEADER not in clean.headers


async def test_strict_requests_are_refused_with_all_names(verifier: FakeVerifier, tokenizer: Tokenizer) -> None:
    async with front(verifier, tokenizer=tokenizer, strict_requests=True) as (_, client):
        body = {"prompt": "a", "beam_width": 3, "stream": True, "stream_options": {"every": 2}}
        error = (await client.post("/v1/completions", json=body)).json()["error"]
        assert error["param"] == "beam_width"
        assert error["message"].count("Unrecognized request argument supplied: ") == 2
        assert "stream_options.every" in error["message"]
        # Known, and asking for nothing.
        verifier.script = saying(tokenizer)
        answer = await client.post("/v1/completions", json={"prompt": "a", "suffix": "", "best_of": 1})
        assert answer.status_code == 200


@pytest.mark.parametrize(("name", "value"), [("guided_json", {}), ("suffix", "x"), ("use_beam_search", True)])
async def test_what_would_change_the_answer_is_never_ignored(
    verifier: FakeVerifier, tokenizer: Tokenizer, name: str, value: object
) -> None:
    async with front(verifier, tokenizer=tokenizer) as (_, client):
        answer = await client.post("/v1/completions", json={"prompt": "a", name: value})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == name
    assert not verifier.opened


async def test_names_that_no_header_can_have(verifier: FakeVerifier, tokenizer: Tokenizer) -> None:
    """Catches a header that a client's field name breaks up or makes too long."""
    verifier.script = saying(tokenizer)
    content = json.dumps({"prompt": "a", "x\r\nset-cookie: y": 1, "é, ü": 2})
    async with front(verifier, tokenizer=tokenizer) as (_, client):
        headers = {"content-type": "application/json"}
        answer = await client.post("/v1/completions", content=content, headers=headers)
        assert answer.status_code == 200
        assert answer.headers[HEADER] == "x%0D%0Aset-cookie%3A%20y, %C3%A9%2C%20%C3%BC"
        assert "set-cookie" not in answer.headers
    listed = note_ignored("r", [f"field{number}" for number in range(1000)])[HEADER]
    assert len(listed) <= MAX_HEADER_CHARACTERS
    assert listed.startswith("field0, field1, ")
    assert listed.endswith(", ...")
