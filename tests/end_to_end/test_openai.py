"""OpenAI's own client against the running services, beside the gRPC client: two fronts, one answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI, OpenAI

from outrider.bundled import heldout_prompt
from outrider.client import AsyncClient, Completion
from outrider.local import LocalCluster
from outrider.v1 import verifier_pb2, verifier_pb2_grpc
from tests.end_to_end.services import free_addresses, running_gateway

pytestmark = pytest.mark.asyncio(loop_scope="session")

CAPACITY = 4
TEMPLATE = """\
{% for message in messages %}# {{ message.role }}: {{ message.content }}
{% endfor %}{% if add_generation_prompt %}{{ prefix | default('') }}def {% endif %}"""
PROMPT = heldout_prompt()[:400]


@dataclass(frozen=True)
class Fronts:
    """A gateway with both fronts, few places and no queue, before the shared verifier and drafter."""

    address: str
    http_address: str
    verifier_address: str
    logs: Sequence[Path]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def fronts(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fronts]:
    directory = tmp_path_factory.mktemp("fronts")
    template = directory / "chat_template.jinja"
    template.write_text(TEMPLATE)
    (http_address,) = free_addresses(1)
    verifier, drafter = cluster.verifier, cluster.drafter
    flags = (
        *("--http-listen", http_address),
        *("--chat-template", str(template)),
        *("--max-concurrent-sequences", str(CAPACITY)),
        *("--max-queued-requests", "0"),
    )
    async with running_gateway(verifier.address, directory, *flags, drafter=drafter.address) as gateway:
        logs = [process.log_path for process in (gateway, verifier, drafter)]
        yield Fronts(gateway.address, http_address, verifier.address, logs)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def client(fronts: Fronts) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"http://{fronts.http_address}/v1", api_key="none", max_retries=0) as client:
        yield client


async def over_grpc(fronts: Fronts, prompt: str, **options: Any) -> Completion:
    async with AsyncClient(fronts.address) as client:
        return await client.generate(prompt, **options)


def token_ids(choice: Any) -> tuple[int, ...]:
    return tuple(token["id"] for token in choice.tokens)


async def test_a_seed_gives_the_same_over_both_fronts(fronts: Fronts, client: AsyncOpenAI) -> None:
    """Catches a parameter that is lost or changed on its way, and a second way of generating."""
    options: dict[str, Any] = {"max_tokens": 40, "temperature": 0.8, "top_p": 0.95, "frequency_penalty": 0.2, "seed": 7}
    extra = {"top_k": 50, "min_p": 0.01, "repetition_penalty": 1.05, "ignore_eos": True}
    expected = await over_grpc(fronts, PROMPT, **options, **extra, logit_bias={11: -3.0})
    got = await client.completions.create(
        model="target", prompt=PROMPT, **options, logit_bias={"11": -3}, extra_body={**extra, "return_tokens": True}
    )
    choice = got.choices[0]
    assert choice.text == expected.text
    assert token_ids(choice) == expected.token_ids
    assert choice.finish_reason == "length"
    assert choice.outrider["seed"] == 7
    # A seed asks for output that can be had again.
    assert choice.outrider["speculation"]["verification"] == expected.speculation.verification == "coupled"
    assert (got.object, got.model) == ("text_completion", "target")
    assert got.usage is not None
    assert got.usage.prompt_tokens == expected.usage.num_prompt_tokens
    assert got.usage.completion_tokens == 40
    assert got.usage.total_tokens == expected.usage.num_prompt_tokens + 40
    assert got.usage.completion_tokens_details is not None
    assert got.usage.completion_tokens_details.accepted_prediction_tokens > 0
    origins = [token["origin"] for token in choice.tokens]
    assert {"ACCEPTED", "RECOVERED"} <= set(origins)
    extra["verification"] = "rejection"
    other = await client.completions.create(
        model="target", prompt=PROMPT, **{**options, "seed": 8}, logit_bias={"11": -3}, extra_body=extra
    )
    assert other.choices[0].text != choice.text
    assert other.choices[0].outrider["speculation"]["verification"] == "rejection"  # type: ignore[attr-defined]


async def test_logprobs_are_those_of_grpc(fronts: Fronts, client: AsyncOpenAI) -> None:
    options: dict[str, Any] = {"max_tokens": 24, "temperature": 0.9, "seed": 3}
    expected = await over_grpc(fronts, PROMPT, **options, logprobs=2, ignore_eos=True)
    got = await client.completions.create(
        model="target", prompt=PROMPT, **options, logprobs=2, extra_body={"ignore_eos": True}
    )
    logprobs = got.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs == [pytest.approx(token.logprob, abs=1e-6) for token in expected.tokens]
    for top, token in zip(logprobs.top_logprobs or [], expected.tokens, strict=True):
        assert list(top.values()) == [pytest.approx(one.logprob, abs=1e-6) for one in token.top_logprobs]
    text, offsets = got.choices[0].text, logprobs.text_offset or []
    assert "".join(logprobs.tokens or []) == text
    for token_text, offset in zip(logprobs.tokens or [], offsets, strict=True):
        assert text[offset : offset + len(token_text)] == token_text


async def test_a_stream_is_the_whole_in_pieces(client: AsyncOpenAI) -> None:
    options: dict[str, Any] = {"model": "target", "prompt": PROMPT, "max_tokens": 40, "temperature": 0.7, "seed": 5}
    options |= {"logprobs": 1, "n": 2}
    whole = await client.completions.create(**options)
    stream = await client.completions.create(**options, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert not chunks[-1].choices
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    # How many draft tokens were on time is the clock's affair.
    keep = {"prompt_tokens", "completion_tokens", "total_tokens"}
    assert chunks[-1].usage.model_dump(include=keep) == whole.usage.model_dump(include=keep)
    for choice in whole.choices:
        pieces = [piece for chunk in chunks for piece in chunk.choices if piece.index == choice.index]
        assert len(pieces) > 3
        assert "".join(piece.text for piece in pieces) == choice.text
        assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
        assert pieces[-1].finish_reason == choice.finish_reason
        for name in ("tokens", "token_logprobs", "text_offset"):
            parts = [part for piece in pieces if piece.logprobs for part in getattr(piece.logprobs, name)]
            assert parts == (
                getattr(choice.logprobs, name)
                if name != "token_logprobs"
                else [pytest.approx(one, abs=1e-5) for one in choice.logprobs.token_logprobs]
            )


async def test_choice_i_draws_with_the_seed_plus_i(fronts: Fronts, client: AsyncOpenAI) -> None:
    """Catches completions of one request that are all the same, or that nobody can repeat."""
    options: dict[str, Any] = {"max_tokens": 16, "temperature": 1.0}
    got = await client.completions.create(model="target", prompt=[PROMPT, "import os"], n=2, seed=20, **options)
    assert [choice.index for choice in got.choices] == [0, 1, 2, 3]
    expected = [
        await over_grpc(fronts, prompt, seed=20 + index, **options)
        for index, prompt in enumerate([PROMPT, PROMPT, "import os", "import os"])
    ]
    assert [choice.text for choice in got.choices] == [completion.text for completion in expected]
    assert got.usage is not None
    assert got.usage.prompt_tokens == expected[0].usage.num_prompt_tokens + expected[2].usage.num_prompt_tokens


async def test_stop_and_echo_and_no_speculation(client: AsyncOpenAI) -> None:
    options: dict[str, Any] = {"model": "target", "prompt": "def main():", "max_tokens": 30, "temperature": 0}
    free = await client.completions.create(**options)
    stop = free.choices[0].text[12:15]
    got = await client.completions.create(**options, stop=stop, echo=True, extra_body={"speculation": False})
    choice = got.choices[0]
    assert choice.text == "def main():" + free.choices[0].text[: free.choices[0].text.index(stop)]
    assert choice.finish_reason == "stop"
    assert choice.outrider["stop_string"] == stop
    assert choice.outrider["speculation"]["drafted"] == 0
    assert choice.outrider["speculation"]["fallbacks"][0]["reason"] == "CLIENT_DISABLED"


async def test_chat_is_a_completion_behind_the_template(fronts: Fronts, client: AsyncOpenAI) -> None:
    messages: list[Any] = [
        {"role": "developer", "content": "Write Python."},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
    ]
    options: dict[str, Any] = {"temperature": 0.6, "seed": 4}
    rendered = "# system: Write Python.\n# user: one\ntwo\nasync def "
    expected = await over_grpc(fronts, rendered, max_tokens=20, logprobs=1, **options)
    arguments: dict[str, Any] = {
        "model": "target", "messages": messages, "max_completion_tokens": 20, "logprobs": True, "top_logprobs": 1,
        "extra_body": {"chat_template_kwargs": {"prefix": "async "}}, **options,
    }  # fmt: skip
    got = await client.chat.completions.create(**arguments)
    choice = got.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content == expected.text
    assert choice.logprobs is not None
    entries = choice.logprobs.content or []
    assert [entry.logprob for entry in entries] == [pytest.approx(token.logprob, abs=1e-6) for token in expected.tokens]
    assert (
        b"".join(bytes(entry.bytes or []) for entry in entries).decode().removesuffix("<|endoftext|>") == expected.text
    )
    assert all(len(entry.top_logprobs) == 1 for entry in entries)
    assert got.usage is not None
    assert got.usage.prompt_tokens == expected.usage.num_prompt_tokens
    chunks = [chunk async for chunk in await client.chat.completions.create(**arguments, stream=True)]
    assert chunks[0].object == "chat.completion.chunk"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected.text
    assert chunks[-1].choices[0].finish_reason == choice.finish_reason
    # The answer goes back as it came, as a conversation does.
    messages += [choice.message.model_dump(), {"role": "user", "content": "three"}]
    raw = await client.chat.completions.with_raw_response.create(model="target", messages=messages, max_tokens=4)
    assert "x-outrider-ignored-fields" not in raw.headers
    again = raw.parse()
    assert again.usage is not None
    assert again.usage.prompt_tokens > got.usage.prompt_tokens


async def test_the_synchronous_client(fronts: Fronts) -> None:
    def use() -> None:
        with OpenAI(base_url=f"http://{fronts.http_address}/v1", api_key="none", max_retries=0) as client:
            model = client.models.list().data[0]
            assert (model.id, client.models.retrieve("target").id) == ("target", "target")
            options: dict[str, Any] = {"model": model.id, "prompt": "import ", "max_tokens": 8, "temperature": 0}
            with client.completions.create(**options, stream=True) as stream:
                text = "".join(chunk.choices[0].text for chunk in stream)
            raw = client.completions.with_raw_response.create(**options, extra_headers={"x-request-id": "mine"})
            assert raw.headers["x-request-id"] == "mine"
            assert raw.parse().id == "cmpl-mine"
            assert raw.parse().choices[0].text == text

    await asyncio.to_thread(use)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "temperature -1": ({"temperature": -1}, "temperature"),
    "max_tokens 0": ({"max_tokens": 0}, "max_tokens"),
    "what would change the answer": ({"extra_body": {"guided_regex": "a*"}}, "guided_regex"),
    "17 stop strings": ({"stop": ["x"] * 17}, "stop"),
    "33 draft tokens": ({"extra_body": {"max_draft_tokens": 33}}, "max_draft_tokens"),
    "21 log-probabilities": ({"logprobs": 21}, "logprobs"),
    "best of more than n": ({"best_of": 2}, "best_of"),
    "an unknown token": ({"prompt": [1, 1 << 20]}, "prompt"),
    "an empty prompt": ({"prompt": ""}, "prompt"),
    "a prompt over the context": ({"prompt": [7] * 2500}, "prompt"),
    "a bias for an unknown token": ({"logit_bias": {"1000000": 1}}, "logit_bias"),
}


@pytest.mark.parametrize("name", BAD)
async def test_bad_requests_name_the_field(client: AsyncOpenAI, name: str) -> None:
    bad, param = BAD[name]
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(**{"model": "target", "prompt": "a", **bad})
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"
    assert param in caught.value.message
    if name == "a prompt over the context":
        assert caught.value.code == "context_length_exceeded"


async def test_other_errors_have_their_own_classes(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.completions.create(model="gpt-4o", prompt="a")
    assert (unknown.value.param, unknown.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.RateLimitError) as full:
        await client.completions.create(model="target", prompt="a", n=CAPACITY + 1, max_tokens=400)
    assert full.value.code == "rate_limit_exceeded"
    assert 1 <= int(full.value.response.headers["retry-after"]) <= 60
    with pytest.raises(openai.BadRequestError) as context:
        await client.chat.completions.create(model="target", messages=[{"role": "user", "content": "x = 1\n" * 2000}])
    assert context.value.param == "messages"


async def load(fronts: Fronts) -> tuple[int, int]:
    """The verifier's KV blocks in use, and its sequences."""
    async with grpc.aio.insecure_channel(fronts.verifier_address) as channel:
        info = await verifier_pb2_grpc.VerifierServiceStub(channel).GetInfo(
            verifier_pb2.VerifierServiceGetInfoRequest()
        )
    return info.load.num_kv_blocks - info.load.num_free_kv_blocks, info.load.num_running + info.load.num_waiting


@pytest.mark.parametrize("how", ["streaming", "waiting for the whole"])
async def test_a_client_that_leaves_frees_every_choice(fronts: Fronts, client: AsyncOpenAI, how: str) -> None:
    """Catches completions that go on for nobody."""
    options: dict[str, Any] = {"model": "target", "prompt": PROMPT, "n": 3, "max_tokens": 1700}
    options["extra_body"] = {"ignore_eos": True}
    if how == "streaming":
        stream = await client.completions.create(**options, stream=True)
        seen = set()
        async for chunk in stream:
            seen.add(chunk.choices[0].index)
            if seen == {0, 1, 2}:
                break
        assert (await load(fronts))[1] == 3
        await stream.close()
    else:
        asking = asyncio.create_task(client.completions.create(**options))
        async with asyncio.timeout(10):
            while (await load(fronts))[1] < 3:
                await asyncio.sleep(0.02)
        asking.cancel()
    async with asyncio.timeout(10):
        while await load(fronts) != (0, 0):
            await asyncio.sleep(0.02)


async def test_no_service_logged_a_traceback(fronts: Fronts) -> None:
    """Runs last: everything above was the clients' doing."""
    assert len(fronts.logs) == 3
    for log in fronts.logs:
        assert "Traceback" not in log.read_text(), log.name
