"""A bad request is told everything that is wrong with it at once, over both fronts."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from gateway.tokenizer import Tokenizer
from outrider.client import AsyncClient, InvalidRequestError
from outrider.request import build_request
from tests.gateway.fake_verifier import VOCABULARY_SIZE, FakeVerifier, running_gateway
from tests.gateway.http_clients import front

# Each of them bad, in the order in which they are named.
OPTIONS: dict[str, Any] = {
    "request_id": "x" * 129,
    "temperature": -1.0,
    "top_p": 7.0,
    "min_p": -1.0,
    "repetition_penalty": 0.0,
    "presence_penalty": 3.0,
    "frequency_penalty": 3.0,
    "logit_bias": {VOCABULARY_SIZE: 1.0},
    "max_tokens": 0,
    "stop": ["x"] * 17,
    "stop_token_ids": [VOCABULARY_SIZE],
    "max_draft_tokens": 33,
    "verification": "greedy",
    "logprobs": 21,
}
# The trailers that gRPC's implementations take, its own overhead set aside.
MAX_TRAILER_BYTES = 8 << 10


async def test_the_client_is_told_every_field(verifier: FakeVerifier, tokenizer: Tokenizer) -> None:
    async with running_gateway(verifier, tokenizer=tokenizer) as running:
        async with AsyncClient(running.gateway_address) as client:
            with pytest.raises(InvalidRequestError) as caught:
                await client.generate("", **OPTIONS)
        error = caught.value
        names = [violation.field.rpartition(".")[2] for violation in error.violations]
        assert names == ["prompt", *OPTIONS]
        assert (error.field, error.reason) == ("prompt", "INVALID_VALUE")
        reasons = {violation.field: violation.reason for violation in error.violations}
        assert reasons["stopping.stop_token_ids"] == reasons["sampling.logit_bias"] == "UNKNOWN_TOKEN_ID"
        assert all(violation.description for violation in error.violations)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await running.stub.Generate(build_request("", None, **OPTIONS)).read()
    # The stubs know neither how metadata is iterated nor what it holds.
    trailers: Any = refused.value.trailing_metadata()
    assert "grpc-status-details-bin" in dict(trailers)
    # On the wire, bytes are written in base 64.
    num_bytes = sum(len(key) + len(value) * 4 // 3 for key, value in trailers) + len(refused.value.details() or "")
    assert num_bytes < MAX_TRAILER_BYTES


async def test_a_prompt_that_is_too_long_says_so_in_one_word(verifier: FakeVerifier) -> None:
    async with running_gateway(verifier) as running, AsyncClient(running.gateway_address) as client:
        with pytest.raises(InvalidRequestError) as caught:
            await client.generate(token_ids=[1] * 5000)
        assert caught.value.reason == "CONTEXT_LENGTH_EXCEEDED"
        with pytest.raises(InvalidRequestError) as caught:
            await client.generate("text")
        assert caught.value.reason == "NO_TOKENIZER"


async def test_http_names_every_field(verifier: FakeVerifier, tokenizer: Tokenizer) -> None:
    """Catches an error that is found only when the one before it is repaired."""
    async with front(verifier, tokenizer=tokenizer) as (_, client):

        async def error(path: str, **body: Any) -> dict[str, Any]:
            answer = await client.post(path, json=body)
            assert answer.status_code == 400
            found: dict[str, Any] = answer.json()["error"]
            return found

        completion = await error("/v1/completions", prompt="", suffix="x", top_p=7, max_completion_tokens=0, logprobs=3)
        assert completion == {
            "message": "suffix: is not supported; prompt: must not be empty; "
            "top_p: must be a number above 0 and at most 1, is 7; max_completion_tokens: must be at least 1",
            "type": "invalid_request_error",
            "param": "suffix",
            "code": None,
        }
        types = await error("/v1/chat/completions", messages=[{"role": "user"}, {"role": "x"}], n="2", stop=[1])
        assert types["param"] == "n"
        for name in ("n: ", "stop[0]: ", "messages[1].role: "):
            assert name in types["message"]
        chat = await error(
            "/v1/chat/completions", messages=[{"role": "user"}], top_p=7, tools=[{}], logit_bias={"9999": 1}
        )
        assert chat["param"] == "tools"
        for name in ("messages[0].content: ", "top_p: ", "logit_bias: "):
            assert name in chat["message"]
        assert (await error("/v1/completions"))["code"] == "missing_required_parameter"
        many = await error("/v1/completions", prompt="a", stop=[1] * 1000)
        assert many["message"].endswith("and 968 more")
    assert not verifier.opened
