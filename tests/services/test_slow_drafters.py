"""A verifier that was told no time to wait: a drafter that is slow now and then stays of use."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from drafter_service.sequence import DraftSequence
from outrider.v1 import drafter_pb2
from tests.services.conftest import Pair
from tests.services.fake_drafter import Hook, Wire, fake_drafter, frame
from tests.services.harness import decode_client, replay, running_verifier, verifier_settings
from tests.services.reference import greedy, prompts
from verifier_service.patience import LEAST_SECONDS

PROMPT = prompts(3)[2]


class Stalling:
    """Sends answer number `at` so many seconds late; counts what it sends."""

    def __init__(self, seconds: float, *, at: int) -> None:
        self._seconds = seconds
        self._at = at
        self.num_sent = 0

    async def __call__(self, expansions: drafter_pb2.Expansions, sequence: DraftSequence) -> Sequence[Wire]:
        self.num_sent += 1
        if self.num_sent == self._at:
            await asyncio.sleep(self._seconds)
        return [frame(expansions)]


async def decode(pair: Pair, hook: Hook, *, idle_seconds: float = 0.0) -> None:
    target, _ = pair
    expected = greedy(target, PROMPT, 220)
    async with (
        fake_drafter(replay([*PROMPT, *expected]), hook) as drafter,
        running_verifier(verifier_settings(target, draft_timeout_seconds=None)) as (verifier, _),
        decode_client(verifier.address) as client,
    ):
        await client.use_drafters(drafter.address)
        await asyncio.sleep(idle_seconds)
        result = await client.decode(PROMPT, drafter=drafter.address, max_tokens=220)
        assert result.token_ids == expected
        assert result.reasons == []
        assert drafter.num_streams == 1


async def test_one_stall_does_not_end_speculation(pair: Pair) -> None:
    """Catches an answer that does without its drafter to its end because of one bad moment of the machine."""
    stalling = Stalling(LEAST_SECONDS + 0.2, at=5)
    await decode(pair, stalling)
    # The stall's own answer is followed by more.
    assert stalling.num_sent > 10


async def test_nobody_waits_for_a_drafter_that_runs_ahead(pair: Pair) -> None:
    """Catches steps that wait for drafts that are late or never come, and a drafter that is left because of it."""
    target, _ = pair
    expected = {tuple(prompt): greedy(target, prompt, 60) for prompt in prompts(3)}
    script = replay(*([*prompt, *expected[tuple(prompt)]] for prompt in prompts(3)))

    async def hook(expansions: drafter_pb2.Expansions, sequence: DraftSequence) -> Sequence[Wire]:
        if sequence.token_ids[: len(PROMPT)] == PROMPT:
            return []  # never
        await asyncio.sleep(0.2)
        return [frame(expansions)]

    async with (
        fake_drafter(script, hook) as drafter,
        running_verifier(verifier_settings(target, drafting="ahead")) as (verifier, service),
        decode_client(verifier.address) as client,
    ):
        await client.use_drafters(drafter.address)
        start = time.monotonic()
        results = await asyncio.gather(
            *(client.decode(prompt, drafter=drafter.address, max_tokens=60) for prompt in prompts(3))
        )
        # With a fifth of a second for each answer, 60 tokens of three sequences would take 7 s at the least.
        assert time.monotonic() - start < 5
        for prompt, result in zip(prompts(3), results, strict=True):
            assert result.token_ids == expected[tuple(prompt)]
            assert result.reasons == []
        assert service._engine._links.num_late == 0
        assert drafter.num_streams == 1


async def test_time_without_sequences_is_no_silence(pair: Pair) -> None:
    """Catches a drafter that is taken for lost at its first late answer, for what it did not say while idle."""
    stalling = Stalling(LEAST_SECONDS + 0.2, at=1)
    await decode(pair, stalling, idle_seconds=11 * LEAST_SECONDS)
    assert stalling.num_sent > 10
