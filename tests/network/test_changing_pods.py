"""Pods that come and go: real services, one name, a real name server whose answers change, and running sequences."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from gateway import discovery
from outrider.service.serving import Server
from outrider.v1 import common_pb2, generation_pb2
from tests.gateway.fake_verifier import (
    GenerateCall,
    RunningGateway,
    complete,
    eventually,
    next_of,
    rest_of,
    running_gateway,
    token_ids,
)
from tests.network.conftest import Pair
from tests.network.dns_server import Answer, TestResolver, dns_server
from tests.services.harness import replay, running_verifier, scripted_drafter, verifier_settings
from tests.services.reference import greedy
from verifier_service.service import VerifierService

PROMPT = [7, 1, 40, 3]
NUM_TOKENS = 300


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "SHORTEST_SECONDS", 0.05)


def free_port() -> int:
    """A port that is free on every loopback address: what has the same name has the same port."""
    with socket.socket() as probe:
        probe.bind(("0.0.0.0", 0))
        port: int = probe.getsockname()[1]
        return port


def generate(running: RunningGateway, num_tokens: int = NUM_TOKENS) -> GenerateCall:
    return running.stub.Generate(
        generation_pb2.GenerateRequest(
            token_ids=token_ids(*PROMPT),
            sampling=common_pb2.SamplingParameters(temperature=0.0),
            stopping=generation_pb2.StoppingParameters(max_tokens=num_tokens, ignore_eos=True),
            speculation=generation_pb2.SpeculationParameters(max_draft_tokens=1),
        ),
        timeout=60,
    )


def tokens_of(responses: list[generation_pb2.GenerateResponse]) -> list[int]:
    return [token.id for response in responses for token in response.chunk.tokens]


async def begin(running: RunningGateway, num_tokens: int = 20) -> tuple[GenerateCall, list[int]]:
    """A request in full flow, and its first tokens."""
    call = generate(running)
    tokens: list[int] = []
    while len(tokens) < num_tokens:
        tokens += tokens_of([await next_of(call)])
    return call, tokens


@asynccontextmanager
async def pods(
    pair: Pair, num_verifiers: int, num_drafters: int
) -> AsyncIterator[tuple[list[Server], list[Server], list[VerifierService]]]:
    """Verifiers and drafters, each kind on one port of as many loopback addresses."""
    target, _ = pair
    # Always right, and no work for the cores that everything here shares.
    script = replay([*PROMPT, *greedy(target, PROMPT, NUM_TOKENS)])
    ports = free_port(), free_port()
    async with AsyncExitStack() as stack:
        drafters = [
            await stack.enter_async_context(
                scripted_drafter(script, listen=f"127.0.0.{n}:{ports[1]}", drain_seconds=20)
            )
            for n in range(1, num_drafters + 1)
        ]
        verifiers = [
            await stack.enter_async_context(
                running_verifier(verifier_settings(target, listen=f"127.0.0.{n}:{ports[0]}", drain_seconds=20))
            )
            for n in range(1, num_verifiers + 1)
        ]
        yield [server for server, _ in verifiers], drafters, [service for _, service in verifiers]


def name(kind: str, servers: list[Server]) -> str:
    return f"dns:///{kind}.test:{servers[0].address.rpartition(':')[2]}"


async def test_verifiers_come_and_go(pair: Pair) -> None:
    """New ones get traffic, those that go finish what they have, and name servers that fail change nothing."""
    expected = greedy(pair[0], PROMPT, NUM_TOKENS)
    answers: dict[str, Answer] = {"verifiers.test": ["127.0.0.1"]}
    async with (
        pods(pair, 2, 0) as (servers, _, services),
        dns_server(answers) as port,
        running_gateway(name("verifiers", servers), resolver=TestResolver(port), dns_refresh_seconds=0.1) as running,
    ):
        first, second = (server.address for server in servers)
        old, tokens = await begin(running)
        answers["verifiers.test"] = ["127.0.0.2"]
        await eventually(
            lambda: [(link.address, link.is_ready) for link in running.links] == [(first, False), (second, True)]
        )
        new, new_tokens = await begin(running)
        assert [link.num_sequences for link in running.links] == [1, 1]
        assert tokens + tokens_of(await rest_of(old)) == expected
        await eventually(lambda: [link.address for link in running.links] == [second])
        await eventually(lambda: not services[0]._sessions)
        failures: list[Answer] = ["SERVFAIL", "NXDOMAIN", "silence", []]
        for failure in failures:
            answers["verifiers.test"] = failure
            await asyncio.sleep(0.3)
            assert [(link.address, link.is_ready) for link in running.links] == [(second, True)]
        assert new_tokens + tokens_of(await rest_of(new)) == expected
        answers["verifiers.test"] = ["127.0.0.1", "127.0.0.2"]
        await eventually(lambda: [link.is_ready for link in running.links] == [True, True])
        calls = [generate(running, 40) for _ in range(4)]
        await eventually(lambda: [link.num_sequences for link in running.links] == [2, 2])
        assert [tokens_of(await rest_of(call)) for call in calls] == [expected[:40]] * 4


async def test_a_rolling_update(pair: Pair) -> None:
    """A verifier that was told to end takes nothing new, ends what it has, and no client notices anything."""
    expected = greedy(pair[0], PROMPT, NUM_TOKENS)
    answers: dict[str, Answer] = {"verifiers.test": ["127.0.0.1", "127.0.0.2"]}
    async with (
        pods(pair, 2, 0) as (servers, _, _),
        dns_server(answers) as port,
        running_gateway(name("verifiers", servers), resolver=TestResolver(port), dns_refresh_seconds=0.1) as running,
    ):
        await eventually(lambda: [link.is_ready for link in running.links] == [True, True])
        calls = [await begin(running) for _ in range(2)]
        is_over = False
        late: list[list[int]] = []

        async def traffic() -> None:
            while not is_over:
                late.append(
                    (
                        await complete(
                            running,
                            token_ids=token_ids(*PROMPT),
                            sampling={"temperature": 0.0},
                            stopping={"max_tokens": 5},
                        )
                    ).token_ids
                )

        clients = [asyncio.create_task(traffic()) for _ in range(4)]
        await asyncio.sleep(0.1)
        stopping = asyncio.create_task(servers[0].stop())
        # DNS is late, as it is in a cluster.
        await asyncio.sleep(0.5)
        answers["verifiers.test"] = ["127.0.0.2"]
        for call, tokens in calls:
            assert tokens + tokens_of(await rest_of(call)) == expected
        await asyncio.wait_for(stopping, 10)
        await asyncio.sleep(0.2)
        is_over = True
        await asyncio.gather(*clients)
        assert len(late) > 4
        assert all(tokens == expected[:5] for tokens in late)
        await eventually(lambda: [link.address for link in running.links] == [servers[1].address])


async def test_drafters_come_and_go(pair: Pair) -> None:
    """A sequence keeps the drafter that it has to its end, new ones use the new drafter, and nothing falls back."""
    expected = greedy(pair[0], PROMPT, NUM_TOKENS)
    answers: dict[str, Answer] = {"verifiers.test": ["127.0.0.1"], "drafters.test": ["127.0.0.1"]}
    async with (
        pods(pair, 1, 2) as (servers, drafters, services),
        dns_server(answers) as port,
        running_gateway(
            name("verifiers", servers),
            drafters=(name("drafters", drafters),),
            resolver=TestResolver(port),
            dns_refresh_seconds=0.1,
        ) as running,
    ):
        links = services[0]._links
        old, tokens = await begin(running)
        answers["drafters.test"] = ["127.0.0.2"]
        await eventually(lambda: drafters[1].address in links and links[drafters[1].address].key is not None)
        await eventually(lambda: drafters[1].address in running.links[0].drafters)
        new, new_tokens = await begin(running)
        for call, seen in ((old, tokens), (new, new_tokens)):
            responses = await rest_of(call)
            assert seen + tokens_of(responses) == expected
            speculation = responses[-1].finished.speculation
            assert speculation.num_accepted_tokens > 0
            assert not speculation.fallbacks
        await eventually(lambda: list(links) == [drafters[1].address])
        # One that is told to end says so: its sequences go on, new ones do without, as there is no other.
        call, seen = await begin(running)
        stopping = asyncio.create_task(drafters[1].stop())
        await eventually(lambda: running.links[0].drafters[drafters[1].address].detail == "it is draining")
        alone = await complete(
            running, token_ids=token_ids(*PROMPT), sampling={"temperature": 0.0}, stopping={"max_tokens": 5}
        )
        assert [fallback.reason for fallback in alone.finished.speculation.fallbacks] == [
            common_pb2.FALLBACK_REASON_NO_DRAFTER
        ]
        responses = await rest_of(call)
        assert seen + tokens_of(responses) == expected
        assert not responses[-1].finished.speculation.fallbacks
        await asyncio.wait_for(stopping, 10)
