"""What a request may say about its prompt's tokens and its output's text, over both fronts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.tokenizer import Tokenizer
from outrider.client import AsyncClient, InvalidRequestError
from outrider.v1 import generation_pb2, verifier_pb2
from tests.gateway import tokenizers_for_tests
from tests.gateway.fake_verifier import CONTEXT_LENGTH, FakeVerifier, Update, prompt_of, running_gateway, update
from tests.gateway.http_clients import TEXT, front, saying

STOP_TOKEN = generation_pb2.FINISH_REASON_STOP_TOKEN
END_OF_TEXT = 1


@pytest.fixture
def tokenizer() -> Tokenizer:
    """One that puts <s> before a prompt."""
    return Tokenizer(tokenizers_for_tests.with_template())


def ending(tokenizer: Tokenizer, *ids: int) -> Any:
    """A script of one step whose last token is a stop token."""

    def script(opened: verifier_pb2.OpenDecoding) -> Iterator[Update]:
        yield update(opened.sequence_id, ids, finish=STOP_TOKEN)

    return script


@asynccontextmanager
async def both(verifier: FakeVerifier, tokenizer: Tokenizer, **settings: Any) -> Any:
    async with (
        front(verifier, tokenizer=tokenizer, **settings) as (running, http),
        AsyncClient(running.gateway_address) as client,
    ):
        yield client, http


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "ab"),
        ({"show_special_tokens": True}, "<s>ab"),
        ({"include_stop": True}, "ab"),
        ({"show_special_tokens": True, "include_stop": True}, "<s>ab</s>"),
    ],
)
async def test_special_tokens_and_the_token_that_ends(
    verifier: FakeVerifier, tokenizer: Tokenizer, options: dict[str, bool], expected: str
) -> None:
    plain = tokenizer._encode("ab", add_special_tokens=False)
    verifier.script = ending(tokenizer, 0, *plain, END_OF_TEXT)
    names = {"show_special_tokens": "skip_special_tokens", "include_stop": "include_stop_str_in_output"}
    async with both(verifier, tokenizer) as (client, http):
        assert (await client.generate("a", **options)).text == expected
        body = {names[name]: value != (name == "show_special_tokens") for name, value in options.items()}
        for is_stream in (False, True):
            answer = await http.post("/v1/completions", json={"prompt": "a", "stream": is_stream, **body})
            assert f'"text":"{expected}"' in answer.text


async def test_the_text_of_a_stop_token_is_shown_on_demand(verifier: FakeVerifier, tokenizer: Tokenizer) -> None:
    verifier.script = ending(tokenizer, *tokenizer._encode("ab", add_special_tokens=False))
    async with both(verifier, tokenizer) as (client, _):
        assert (await client.generate("a")).text != "ab"
        assert (await client.generate("a", include_stop=True)).text == "ab"


async def test_stop_strings_over_http(verifier: FakeVerifier, tokenizer: Tokenizer) -> None:
    """Catches a minimum that reaches the verifier and not the text, or the other way round."""
    verifier.script = saying(tokenizer, "fox fox fox")
    body: dict[str, Any] = {"prompt": "a", "stop": " fox", "max_tokens": 50}
    async with front(verifier, tokenizer=tokenizer) as (_, client):

        async def text(**more: Any) -> str:
            answer: str = (await client.post("/v1/completions", json=body | more)).json()["choices"][0]["text"]
            return answer

        assert await text() == "fox"
        assert await text(include_stop_str_in_output=True) == "fox fox"
        num_tokens = len(tokenizer._encode("fox fox"))
        assert await text(min_tokens=num_tokens) == "fox fox"
        assert await text(min_tokens=num_tokens, include_stop_str_in_output=True) == "fox fox fox"
        assert [opened.min_tokens for opened in verifier.opened.values()] == [0, 0, num_tokens, num_tokens]
        error = (await client.post("/v1/completions", json={"prompt": "a", "min_tokens": 17})).json()["error"]
        assert error["param"] == "min_tokens"


async def test_prompts_are_cut_on_demand(verifier: FakeVerifier, tokenizer: Tokenizer) -> None:
    """Catches a prompt that loses its end, or that is cut without having been asked for."""
    verifier.script = saying(tokenizer)
    long = list(range(300)) * 10
    async with both(verifier, tokenizer) as (client, http):
        assert (await client.generate(token_ids=long, truncate_prompt_tokens=5)).usage.num_prompt_tokens == 5
        await client.generate(token_ids=long, truncate_prompt_tokens=0, max_tokens=48)
        await client.generate(token_ids=long, truncate_prompt_tokens=0)
        await http.post("/v1/completions", json={"prompt": long, "truncate_prompt_tokens": -1, "max_tokens": 8})
        await client.generate("x" * 400, truncate_prompt_tokens=7)
        await client.generate("ab", truncate_prompt_tokens=700)
        opened = [prompt_of(message) for message in verifier.opened.values()]
        kept = [5, CONTEXT_LENGTH - 48, CONTEXT_LENGTH - 1, CONTEXT_LENGTH - 8]
        assert opened[:4] == [long[-count:] for count in kept]
        assert opened[4:] == [tokenizer._encode("x" * 400)[-7:], tokenizer._encode("ab")]
        with pytest.raises(InvalidRequestError, match="context length"):
            await client.generate(token_ids=long, truncate_prompt_tokens=CONTEXT_LENGTH)
        answer = await http.post("/v1/completions", json={"prompt": "a", "truncate_prompt_tokens": 0})
        assert answer.json()["error"]["param"] == "truncate_prompt_tokens"


async def test_special_tokens_of_prompts(verifier: FakeVerifier, tokenizer: Tokenizer, tmp_path: Path) -> None:
    verifier.script = saying(tokenizer)
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content }}")
    chat = {"messages": [{"role": "user", "content": "ab"}]}
    without = tokenizer._encode("ab", add_special_tokens=False)
    async with both(verifier, tokenizer, chat_template=template) as (client, http):
        await client.generate("ab")
        await client.generate("ab", has_special_tokens=True)
        await http.post("/v1/completions", json={"prompt": "ab"})
        await http.post("/v1/completions", json={"prompt": "ab", "add_special_tokens": False})
        await http.post("/v1/chat/completions", json=chat)
        await http.post("/v1/chat/completions", json={**chat, "add_special_tokens": True})
        added = [prompt_of(message) == [0, *without] for message in verifier.opened.values()]
        assert added == [True, False, True, False, False, True]


async def test_token_ids_come_back_on_demand(verifier: FakeVerifier, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Catches ids that do not fit the text, and prompts that are shown as they were sent and not as they were used."""
    verifier.script = saying(tokenizer)
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content }}")
    ids, prompt = tokenizer._encode(TEXT), tokenizer._encode("ab")
    async with both(verifier, tokenizer, chat_template=template) as (client, http):
        assert (await client.generate("ab")).prompt_token_ids == ()
        completion = await client.generate("ab", prompt_token_ids=True)
        assert (list(completion.prompt_token_ids), list(completion.token_ids)) == (prompt, ids)

        body = {"prompt": ["ab", "a"], "return_token_ids": True, "truncate_prompt_tokens": 2}
        choices = (await http.post("/v1/completions", json=body)).json()["choices"]
        assert [choice["token_ids"] for choice in choices] == [ids, ids]
        assert [choice["prompt_token_ids"] for choice in choices] == [prompt[-2:], tokenizer._encode("a")[-2:]]
        assert "prompt_token_ids" not in (await http.post("/v1/completions", json=body)).json()
        assert "token_ids" not in (await http.post("/v1/completions", json={"prompt": "a"})).text

        chat = {"messages": [{"role": "user", "content": "ab"}], "return_token_ids": True}
        answer = (await http.post("/v1/chat/completions", json=chat)).json()
        assert answer["choices"][0]["token_ids"] == ids
        assert answer["prompt_token_ids"] == tokenizer._encode("ab", add_special_tokens=False)

        for path, request, expected in (
            ("/v1/completions", {**body, "prompt": "ab"}, prompt[-2:]),
            ("/v1/chat/completions", chat, answer["prompt_token_ids"]),
        ):
            lines = (await http.post(path, json={**request, "stream": True})).text.split("\n\n")
            pieces = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
            assert [token for piece in pieces for token in piece["choices"][0].get("token_ids", [])] == ids
            places = [piece["choices"][0] if path == "/v1/completions" else piece for piece in pieces]
            assert [place["prompt_token_ids"] for place in places if "prompt_token_ids" in place] == [expected]


async def test_where_a_conversation_ends(verifier: FakeVerifier, tokenizer: Tokenizer, tmp_path: Path) -> None:
    verifier.script = saying(tokenizer)
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for message in messages %}{{ message.content }}|{% endfor %}{% if add_generation_prompt %}a{% endif %}"
    )
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "ab"}]
    async with front(verifier, tokenizer=tokenizer, chat_template=template) as (_, client):

        async def ask(**more: Any) -> Any:
            return (await client.post("/v1/chat/completions", json={"messages": messages, **more})).json()

        for more in (
            {},
            {"add_generation_prompt": False},
            {"continue_final_message": True},
            {"continue_final_message": True, "add_generation_prompt": False},
        ):
            assert "choices" in await ask(**more)
        rendered = [tokenizer.decode(prompt_of(message)) for message in verifier.opened.values()]
        assert rendered == ["x|ab|a", "x|ab|", "x|ab", "x|ab"]
        both_true = await ask(continue_final_message=True, add_generation_prompt=True)
        assert both_true["error"]["param"] == "continue_final_message"


async def test_without_a_tokenizer(verifier: FakeVerifier) -> None:
    async with running_gateway(verifier) as running, AsyncClient(running.gateway_address) as client:
        verifier.script = lambda opened: [update(opened.sequence_id, [5, 6], finish=STOP_TOKEN)]
        completion = await client.generate(
            token_ids=[1, 2, 3], include_stop=True, show_special_tokens=True, truncate_prompt_tokens=2
        )
        assert (completion.text, completion.token_ids) == ("", (5, 6))
