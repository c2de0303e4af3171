"""What is taken otherwise than the request says, the client is told of."""

from __future__ import annotations

import pytest

from gateway.tokenizer import Tokenizer
from outrider.client import AsyncClient
from tests.gateway.fake_verifier import FakeVerifier
from tests.gateway.http_clients import front, saying


@pytest.mark.parametrize(
    ("asked", "used", "details"),
    [
        (0.001, 0.01, ["0.001 was raised to 0.01"]),
        (0.01, 0.01, []),
        (0.0, 0.0, []),
        (1.5, 1.5, []),
    ],
)
async def test_a_temperature_that_is_too_low(
    verifier: FakeVerifier, tokenizer: Tokenizer, asked: float, used: float, details: list[str]
) -> None:
    """Catches a request that is refused, or sampled otherwise than it says, without a word."""
    verifier.script = saying(tokenizer)
    async with front(verifier, tokenizer=tokenizer) as (running, client):
        async with AsyncClient(running.gateway_address) as grpc_client:
            completion = await grpc_client.generate("a", temperature=asked)
        assert [(found.field, found.detail) for found in completion.adjustments] == [
            ("sampling.temperature", detail) for detail in details
        ]
        answer = (await client.post("/v1/completions", json={"prompt": "a", "temperature": asked, "n": 2})).json()
        for choice in answer["choices"]:
            expected = [{"field": "temperature", "detail": detail} for detail in details]
            assert choice["outrider"]["adjustments"] == expected
        sent = [opened.sampling.temperature for opened in verifier.opened.values()]
        assert sent == [pytest.approx(used)] * 3


async def test_what_is_raised_is_not_greedy(verifier: FakeVerifier, tokenizer: Tokenizer) -> None:
    async with front(verifier, tokenizer=tokenizer) as (_, client):
        body = {"prompt": "a", "temperature": 0.001, "verification": "greedy"}
        assert (await client.post("/v1/completions", json=body)).json()["error"]["param"] == "verification"
