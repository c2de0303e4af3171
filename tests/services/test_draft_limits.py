"""Verifier and drafter that were set up for proposals of different sizes: the lower limits hold, and nobody is lost."""

from __future__ import annotations

import asyncio

import pytest

from outrider.protocol.handshake import DraftLimits
from outrider.protocol.wire import pack_tokens
from outrider.v1 import drafter_pb2, verifier_pb2
from tests.services.conftest import Pair
from tests.services.fake_drafter import answers, fake_drafter, frame
from tests.services.harness import (
    decode_client,
    drafter_settings,
    eventually,
    replay,
    running_drafter,
    running_verifier,
    verifier_settings,
)
from tests.services.reference import greedy, prompts

PROMPT = prompts(3)[2]
INCOMPATIBLE = verifier_pb2.DRAFTER_STATE_INCOMPATIBLE


async def test_the_lower_limits_hold_and_nothing_is_lost(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    """Catches a drafter whose every proposal breaks the limits of a verifier that was set up for less."""
    target, draft = pair
    caplog.set_level("INFO")
    async with (
        running_drafter(drafter_settings(model=draft, num_candidates=30)) as drafter,
        running_verifier(verifier_settings(target, num_candidates=3, max_draft_tokens=2)) as (verifier, _),
        decode_client(verifier.address) as client,
    ):
        await client.use_drafters(drafter.address)
        agreed = "at most 2 draft tokens a proposal, 3 candidates a draft token"
        assert f"drafter {drafter.address} is ready: {agreed}" in caplog.text
        assert f"drafting for {target.name}: {agreed}" in caplog.text
        for fields in ({}, {"max_draft_tokens": 1}, {"max_draft_tokens": 32}):
            result = await client.decode(
                PROMPT, drafter=drafter.address, max_tokens=40, sampling={"temperature": 1.0}, seed=5, **fields
            )
            assert result.reasons == []
            assert result.num_accepted > 0


@pytest.mark.parametrize(("asked", "opened"), [({}, 2), ({"max_draft_tokens": 1}, 1), ({"max_draft_tokens": 3}, 2)])
async def test_a_drafter_of_shorter_proposals_is_asked_for_no_more(
    pair: Pair, asked: dict[str, int], opened: int
) -> None:
    target, _ = pair
    script = replay([*PROMPT, *greedy(target, PROMPT, 60)])
    async with (
        fake_drafter(script, limits=DraftLimits(2, 0)) as drafter,
        running_verifier(verifier_settings(target)) as (verifier, _),
        decode_client(verifier.address) as client,
    ):
        await client.use_drafters(drafter.address)
        result = await client.decode(PROMPT, drafter=drafter.address, max_tokens=20, **asked)
        assert drafter.asked == [opened]
        assert result.token_ids == greedy(target, PROMPT, 20)
        assert result.reasons == []


@pytest.mark.parametrize(("num_tokens", "problem"), [(3, "must be 1 to 2"), (1, "at most 2 were agreed upon")])
async def test_a_proposal_beyond_the_agreement_costs_its_sequence_the_drafter(
    pair: Pair, num_tokens: int, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Too many draft tokens in one case, too many candidates in the other; the stream goes on."""
    target, _ = pair
    script = replay([*PROMPT, *greedy(target, PROMPT, 60)])

    def large(proposal: drafter_pb2.Proposal) -> drafter_pb2.DraftResponse:
        proposal = drafter_pb2.Proposal(
            sequence_id=proposal.sequence_id, position=proposal.position, token_ids=pack_tokens([1] * num_tokens)
        )
        if num_tokens == 1:
            proposal.candidate_ids, proposal.candidate_weights = pack_tokens([1, 2, 3]), b"\0\x40\0\x40\0\x80"
        return frame(proposal)

    async with (
        fake_drafter(script, limits=DraftLimits(2, 2)) as drafter,
        running_verifier(verifier_settings(target)) as (verifier, _),
        decode_client(verifier.address) as client,
    ):
        await client.use_drafters(drafter.address)
        bystander = asyncio.create_task(client.decode(PROMPT, drafter=drafter.address, max_tokens=60))
        await eventually(lambda: len(drafter.opened) == 1)
        drafter.hook = lambda proposal, sequence: (
            [large(proposal)] if sequence.sequence_id != drafter.opened[0] else [frame(proposal)]
        )
        result = await client.decode(PROMPT, drafter=drafter.address, max_tokens=20)
        assert result.token_ids == greedy(target, PROMPT, 20)
        assert result.reasons == ["DRAFTER_LOST"]
        assert problem in caplog.text
        assert (await bystander).reasons == []
        assert drafter.num_streams == 1


@pytest.mark.parametrize("answer", [(5, 8), (4, 9), (0, 8)])
async def test_a_drafter_that_does_not_keep_to_the_offer_is_left(pair: Pair, answer: tuple[int, int]) -> None:
    target, _ = pair
    limits = drafter_pb2.DraftLimits(max_draft_tokens=answer[0], max_candidates=answer[1])
    async with (
        fake_drafter(hook=answers(), answer=limits) as drafter,
        running_verifier(verifier_settings(target, num_candidates=8)) as (verifier, _),
        decode_client(verifier.address) as client,
    ):
        await client.use_drafters(drafter.address, state=INCOMPATIBLE)
        assert "limits." in client.drafters[drafter.address].detail
        result = await client.decode(PROMPT, drafter=drafter.address, max_tokens=5)
        assert result.reasons == ["INCOMPATIBLE_DRAFTER"]
