"""Steps in flight: on a CPU each is computed at its launch and comes back later, on a GPU it really is in flight."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path

from outrider.v1 import verifier_pb2
from tests.services.harness import (
    DecodeClient,
    Result,
    decode_client,
    drafter_settings,
    eventually,
    running_drafter,
    running_verifier,
    scripted_drafter,
    verifier_is_empty,
    verifier_settings,
)
from tests.services.in_flight import Flights
from tests.services.reference import greedy
from tests.services.test_scheduler import decoding, make_scheduler, run

PROMPTS = [[index, 7, 3 + index, 5] for index in range(8)]

Pair = tuple[Path, Path]


async def decode_all(client: DecodeClient, drafter: str, *, temperature: float) -> list[Result]:
    results = [
        client.open(prompt, drafter=drafter, seed=seed, max_tokens=40, sampling={"temperature": temperature})[1]
        for seed, prompt in enumerate(PROMPTS)
    ]
    for result in results:
        await eventually(result.done.is_set, timeout=60)
    return results


async def test_steps_in_flight_change_nothing(pair: Pair, flights: Flights) -> None:
    """Catches a step prepared from what another, still in flight, is about to change."""
    target, draft = pair
    numbers = random.Random(0)
    flights.may_land = lambda: numbers.random() < 0.05
    async with running_drafter(drafter_settings(model=draft)) as drafter:
        outputs = []
        for most in (2, 1):
            flights.max_in_flight = most
            flights.depths.clear()
            async with (
                running_verifier(verifier_settings(target, split_from=2), busy_poll_seconds=0.001) as (verifier, _),
                decode_client(verifier.address) as client,
            ):
                await client.use_drafters(drafter.address)
                plain = await decode_all(client, drafter.address, temperature=0.0)
                assert [result.token_ids for result in plain] == [greedy(target, prompt, 40) for prompt in PROMPTS]
                sampled = await decode_all(client, drafter.address, temperature=1.0)
                outputs.append([result.token_ids for result in sampled])
                assert sum(result.num_accepted for result in sampled) > 0
                await eventually(lambda: verifier_is_empty(client))
            assert max(flights.depths) >= most
    assert outputs[0] == outputs[1]


async def test_plain_steps_are_chained(pair: Pair, flights: Flights) -> None:
    """Catches a chained step at the wrong position, with another's token, or one that outlives its sequence's end."""
    target, _ = pair
    expected = [greedy(target, prompt, 40) for prompt in PROMPTS]
    outputs = []
    for most in (2, 1):
        flights.max_in_flight = most
        flights.depths.clear()
        async with (
            running_verifier(verifier_settings(target)) as (verifier, _),
            decode_client(verifier.address) as client,
        ):
            plain = await decode_all(client, "", temperature=0.0)
            assert [result.token_ids for result in plain] == expected
            # Ends by length and by stop token, at all times and in company.
            lengths = [client.open(prompt, max_tokens=3 + 4 * i)[1] for i, prompt in enumerate(PROMPTS)]
            stops = [
                client.open(prompt, max_tokens=40, stop_token_ids=[tokens[2 + 3 * i]])[1]
                for i, (prompt, tokens) in enumerate(zip(PROMPTS, expected, strict=True))
            ]
            for result in (*lengths, *stops):
                await eventually(result.done.is_set, timeout=60)
            assert [result.token_ids for result in lengths] == [
                tokens[: 3 + 4 * i] for i, tokens in enumerate(expected)
            ]
            for i, (result, tokens) in enumerate(zip(stops, expected, strict=True)):
                assert result.token_ids == tokens[: tokens.index(tokens[2 + 3 * i]) + 1]
                assert result.finish == "STOP_TOKEN"
            sampled = await decode_all(client, "", temperature=1.0)
            outputs.append([result.token_ids for result in sampled])
            await eventually(lambda: verifier_is_empty(client))
        assert max(flights.depths) >= most
    assert outputs[0] == outputs[1]


async def test_a_sequence_closed_in_flight_ends_there(pair: Pair, flights: Flights) -> None:
    """Catches tokens committed to a sequence that is gone, and blocks that nobody gives back."""
    target, _ = pair
    flights.is_held = True

    def silent(token_ids: Sequence[int], max_draft_tokens: int) -> Sequence[int]:
        while flights.is_held:
            time.sleep(0.01)
        return ()

    async with (
        scripted_drafter(silent) as drafter,
        running_verifier(verifier_settings(target), busy_poll_seconds=0.001) as (verifier, _),
        decode_client(verifier.address) as client,
    ):
        await client.use_drafters(drafter.address)
        # Its wait for drafts keeps the engine looking for news while the other one's step is in flight.
        _, waiting = client.open([1, 2, 3], drafter=drafter.address, max_tokens=6)
        await eventually(lambda: len(waiting.token_ids) == 1)
        closed_id, closed = client.open([4, 5, 6], max_tokens=50)
        await eventually(lambda: bool(closed.token_ids) and 1 in flights.depths)
        num_tokens = len(closed.token_ids)
        client.send(client.closing(closed_id))
        await eventually(lambda: has_running(client, 1))
        _, again = client.open([4, 5, 6], max_tokens=5)
        flights.is_held = False
        await eventually(again.done.is_set)
        await eventually(waiting.done.is_set)
        assert len(closed.token_ids) == num_tokens
        assert again.token_ids == greedy(target, [4, 5, 6], 5)
        assert waiting.token_ids == greedy(target, [1, 2, 3], 6)
        await eventually(lambda: verifier_is_empty(client))


async def has_running(client: DecodeClient, num_running: int) -> bool:
    info = await client.stub.GetInfo(verifier_pb2.VerifierServiceGetInfoRequest())
    return info.load.num_running == num_running


def test_nobody_in_flight_is_preempted() -> None:
    """Catches blocks taken from a sequence whose step is still reading them, and a scheduler that then stands still."""
    scheduler, blocks = make_scheduler(num_blocks=4)
    first, second = (decoding(scheduler, blocks, length=7, drafter=None) for _ in range(2))
    second.num_in_flight = second.num_unknown = 1
    first.token_ids.append(0)
    first.num_computed = 8
    assert run(scheduler, blocks) == []
    assert scheduler.is_short
    assert second in scheduler.running
    second.num_in_flight = second.num_unknown = 0
    assert [part.sequence for part in run(scheduler, blocks)] == [first]
    assert not scheduler.is_short
    assert second not in scheduler.running
