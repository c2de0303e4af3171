"""A gateway with both fronts over verifiers that a test scripts, and clients of its HTTP one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import httpx
from openai import AsyncOpenAI

from gateway.tokenizer import Tokenizer
from outrider.v1 import generation_pb2, verifier_pb2
from tests.gateway.fake_verifier import FakeVerifier, RunningGateway, Update, running_gateway, update

LENGTH = generation_pb2.FINISH_REASON_LENGTH
TEXT = "The quick brown fox"


@asynccontextmanager
async def front(*verifiers: FakeVerifier, **settings: Any) -> AsyncIterator[tuple[RunningGateway, httpx.AsyncClient]]:
    """A gateway with both fronts, and a plain HTTP client."""
    async with running_gateway(*verifiers, http_listen="127.0.0.1:0", **settings) as running:
        base = f"http://{running.gateway.http_address}"
        async with httpx.AsyncClient(base_url=base, trust_env=False, timeout=10) as client:
            yield running, client


def openai_client(running: RunningGateway) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"http://{running.gateway.http_address}/v1", api_key="none", max_retries=0)


def saying(tokenizer: Tokenizer, text: str = TEXT) -> Any:
    """A script that answers every sequence with a text, token by token."""

    def script(opened: verifier_pb2.OpenDecoding) -> Iterable[Update]:
        ids = tokenizer._encode(text)
        for token_id in ids[:-1]:
            yield update(opened.sequence_id, [token_id])
        yield update(opened.sequence_id, ids[-1:], finish=LENGTH)

    return script
