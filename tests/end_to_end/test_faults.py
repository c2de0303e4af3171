"""A sequence outlives its drafter: outgrown, killed, and back again."""

from __future__ import annotations

import asyncio

import pytest

from outrider.bundled import bundled_model
from outrider.client import AsyncClient
from outrider.completion import Chunk, CompletionBuilder, FallbackReason, TokenOrigin
from outrider.local import LocalCluster
from tests.end_to_end.conftest import assert_greedy
from tests.end_to_end.test_greedy import DRAFT_TOKENS, DRAFTER_LENGTH, heldout_prompts

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.slow
async def test_a_sequence_goes_on_past_the_drafters_context(cluster: LocalCluster) -> None:
    """Catches a fallback in mid-stream that loses a token, repeats one, or comes at the wrong position."""
    prompt = next(prompt for prompt in heldout_prompts() if 400 < len(prompt) < 490)
    num_tokens = DRAFTER_LENGTH - len(prompt) + 60
    async with AsyncClient(cluster.address) as client:
        completion = await client.generate(token_ids=prompt, max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    assert_greedy(bundled_model("target"), prompt, completion.token_ids, num_tokens)
    [fallback] = completion.speculation.fallbacks
    assert fallback.reason is FallbackReason.DRAFTER_MAX_LENGTH
    assert DRAFTER_LENGTH - DRAFT_TOKENS < fallback.position <= DRAFTER_LENGTH
    origins = [token.origin for token in completion.tokens]
    after = origins[fallback.position - len(prompt) :]
    assert TokenOrigin.ACCEPTED in origins
    assert set(after) == {TokenOrigin.PLAIN}


@pytest.mark.slow
async def test_a_drafter_killed_in_mid_stream_costs_nothing_but_speed(cluster: LocalCluster) -> None:
    """Catches a sequence that hangs, fails or changes when its drafter dies, and a drafter that is not taken back."""
    prompt = next(prompt for prompt in heldout_prompts() if 40 < len(prompt) < 100)
    num_tokens = 300
    async with AsyncClient(cluster.address) as client:
        builder = CompletionBuilder()
        num_seen = 0
        async for event in client.stream(token_ids=prompt, max_tokens=num_tokens, temperature=0.0, ignore_eos=True):
            builder.add(event)
            if isinstance(event, Chunk):
                num_seen += len(event.tokens)
            if num_seen >= 40 and cluster.drafter.is_running:
                cluster.drafter.kill()
                await cluster.drafter.wait()
        completion = builder.build()
        assert_greedy(bundled_model("target"), prompt, completion.token_ids, num_tokens)
        assert [fallback.reason for fallback in completion.speculation.fallbacks] == [FallbackReason.DRAFTER_LOST]
        assert completion.speculation.num_accepted_tokens > 0

        # Meanwhile new sequences do without.
        alone = await client.generate(token_ids=prompt, max_tokens=8, temperature=0.0)
        assert [fallback.reason for fallback in alone.speculation.fallbacks] == [FallbackReason.NO_DRAFTER]

        # The cluster starts it again.
        await drafter_is_ready(cluster)
        again = await client.generate(token_ids=prompt, max_tokens=30, temperature=0.0, ignore_eos=True)
        assert again.speculation.fallbacks == ()
        assert again.speculation.num_draft_tokens > 0
        assert again.token_ids == completion.token_ids[:30]


async def drafter_is_ready(cluster: LocalCluster) -> None:
    async with asyncio.timeout(30), AsyncClient(cluster.address) as client:
        while not any(drafter.is_ready for drafter in (await client.model()).drafters):
            await asyncio.sleep(0.05)
