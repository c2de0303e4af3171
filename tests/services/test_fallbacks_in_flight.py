"""Sequences that lose their drafter while a step is in flight: the step stays what it was when it was launched."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from engine.step import Row
from outrider.v1 import drafter_pb2
from tests.services.fake_drafter import Wire, fake_drafter, frame, refusal
from tests.services.harness import (
    DecodeClient,
    decode_client,
    eventually,
    replay,
    running_verifier,
    verifier_is_empty,
    verifier_settings,
)
from tests.services.in_flight import Flights
from tests.services.reference import greedy

Pair = tuple[Path, Path]
SPECULATING, WAITING, PLAIN = [4, 5, 6], [1, 2, 3], [7, 8, 9]


async def verifying(stack: AsyncExitStack, target: Path, drafter: str) -> DecodeClient:
    settings = verifier_settings(target, draft_timeout_seconds=60.0)
    verifier, _ = await stack.enter_async_context(running_verifier(settings, busy_poll_seconds=0.001))
    client = await stack.enter_async_context(decode_client(verifier.address))
    await client.use_drafters(drafter)
    return client


# What no graph holds.
ASKS: dict[str, dict[str, Any]] = {"logprobs": {"logprobs": 2}, "penalty": {"sampling": {"presence_penalty": 0.5}}}


@pytest.mark.parametrize("asks", ASKS.values(), ids=ASKS)
@pytest.mark.parametrize("is_lost", [False, True], ids=["refused", "lost"])
async def test_a_plan_does_not_outlive_what_it_was_made_from(
    pair: Pair, flights: Flights, is_lost: bool, asks: dict[str, Any]
) -> None:
    """Catches a batch that is verified although the step that one of its parts is chained to was committed before."""
    answer = asyncio.Event()

    async def hook(expansions: drafter_pb2.Expansions, sequence: Any) -> Sequence[Wire]:
        await answer.wait()
        return [refusal(sequence, drafter_pb2.REFUSAL_REASON_OVERLOADED)]

    async with AsyncExitStack() as stack, AsyncExitStack() as drafters:
        drafter = await drafters.enter_async_context(fake_drafter(lambda tokens, count: [1] * count, hook))
        client = await verifying(stack, pair[0], drafter.address)
        # No graph holds what it asks for, and it waits for drafts.
        _, waiting = client.open(WAITING, drafter=drafter.address, max_tokens=30, **asks)
        await eventually(lambda: len(waiting.token_ids) == 1)
        _, plain = client.open(PLAIN, max_tokens=40)
        await eventually(lambda: len(plain.token_ids) >= 3)
        flights.is_held = True
        await asyncio.sleep(0.2)  # a step of the plain one is in flight, and stays so
        if is_lost:
            await drafters.aclose()
        answer.set()
        await eventually(lambda: len(waiting.token_ids) > 1 or waiting.done.is_set())
        flights.is_held = False
        for result in (plain, waiting):
            await eventually(result.done.is_set)
        assert plain.token_ids == greedy(pair[0], PLAIN, 40)
        assert (waiting.finish, len(waiting.reasons)) == ("LENGTH", 1)
        if "logprobs" in asks:
            assert waiting.token_ids == greedy(pair[0], WAITING, 30)
        await eventually(lambda: verifier_is_empty(client))


@pytest.mark.parametrize("num_right", [0, 4])
async def test_a_drafter_lost_while_its_drafts_are_verified(pair: Pair, flights: Flights, num_right: int) -> None:
    """Catches a plain step chained to one that verifies drafts: how much that one commits is not known before."""

    def hold(rows: Sequence[Row]) -> None:
        # The first step that has both of them, and drafts, stays in flight.
        flights.is_held |= len(rows) == 2 and any(row.drafts.token_ids for row in rows)

    flights.on_submit = hold
    right = replay([*SPECULATING, *greedy(pair[0], SPECULATING, 60)])

    def script(tokens: Sequence[int], count: int) -> list[int]:
        found = list(right(tokens, count)) or [1] * count
        return [*found[:num_right], *((token + 1) % 64 for token in found[num_right:])]

    async def hook(expansions: drafter_pb2.Expansions, sequence: Any) -> Sequence[Wire]:
        # Whoever waits keeps the engine looking for news.
        return [] if list(sequence.token_ids[:3]) == WAITING else [frame(expansions)]

    async with AsyncExitStack() as stack, AsyncExitStack() as drafters:
        drafter = await drafters.enter_async_context(fake_drafter(script, hook))
        client = await verifying(stack, pair[0], drafter.address)
        _, waiting = client.open(WAITING, drafter=drafter.address, max_tokens=20)
        await eventually(lambda: len(waiting.token_ids) == 1)
        opened = []
        while not flights.is_held:  # they meet in one step sooner or later
            opened = [client.open(PLAIN, max_tokens=60)[1]]
            opened.append(client.open(SPECULATING, drafter=drafter.address, max_tokens=60)[1])
            await eventually(lambda: flights.is_held or all(result.done.is_set() for result in opened))  # noqa: B023
        await asyncio.sleep(0.2)
        await drafters.aclose()
        # All that can be done beside the step that is held is done: the one who waited goes on alone.
        await eventually(lambda: len(waiting.token_ids) > 1)
        flights.is_held = False
        for result in (waiting, *opened):
            await eventually(result.done.is_set)
        for result, prompt in ((waiting, WAITING), (opened[0], PLAIN), (opened[1], SPECULATING)):
            assert result.token_ids == greedy(pair[0], prompt, len(result.token_ids))
        await eventually(lambda: verifier_is_empty(client))
