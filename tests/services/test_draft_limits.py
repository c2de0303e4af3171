"""Verifier and drafter that were set up for drafts of different sizes: the lower limits hold, and nobody is lost."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from drafter_service.sequence import DraftSequence
from outrider.protocol.handshake import DraftLimits
from outrider.v1 import drafter_pb2, verifier_pb2
from tests.services.conftest import Pair
from tests.services.fake_drafter import answers, chain_of, fake_drafter, frame
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


@pytest.mark.parametrize(
    ("drafting", "device", "max_running", "takes_turns"),
    [
        ("auto", "cpu", 1, True),
        ("auto", "cuda", 16, False),
        ("auto", "cuda", 17, True),
        ("turns", "cuda", 1, True),
        ("ahead", "cuda", 64, False),
        ("ahead", "cpu", 64, False),
    ],
)
def test_who_takes_turns(pair: Pair, drafting: str, device: str, max_running: int, takes_turns: bool) -> None:
    """Catches a default that runs ahead where that is slower, and a wish that does not hold."""
    settings = verifier_settings(pair[0], drafting=drafting, max_running=max_running)
    assert settings.draft_limits(torch.device(device)).takes_turns == takes_turns


async def test_the_lower_limits_hold_and_nothing_is_lost(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    """Catches a drafter whose every frame breaks the limits of a verifier that was set up for less."""
    target, draft = pair
    caplog.set_level("INFO")
    async with (
        running_drafter(drafter_settings(model=draft, num_candidates=30)) as drafter,
        running_verifier(verifier_settings(target, num_candidates=3, max_draft_tokens=2)) as (verifier, _),
        decode_client(verifier.address) as client,
    ):
        await client.use_drafters(drafter.address)
        agreed = (
            "in turns, at most 2 draft tokens a chain, 1 children and 3 candidates an expansion, "
            "64 expansions a sequence"
        )
        assert f"drafter {drafter.address} is ready: {agreed}" in caplog.text
        assert f"drafting for {target.name}: {agreed}" in caplog.text
        for fields in ({}, {"max_draft_tokens": 1}, {"max_draft_tokens": 32}):
            result = await client.decode(
                PROMPT, drafter=drafter.address, max_tokens=40, sampling={"temperature": 1.0}, seed=5, **fields
            )
            assert result.reasons == []
            assert result.num_accepted > 0


@pytest.mark.parametrize(("asked", "opened"), [({}, 2), ({"max_draft_tokens": 1}, 1), ({"max_draft_tokens": 3}, 2)])
async def test_a_drafter_of_shorter_chains_is_asked_for_no_more(pair: Pair, asked: dict[str, int], opened: int) -> None:
    target, _ = pair
    script = replay([*PROMPT, *greedy(target, PROMPT, 60)])
    async with (
        fake_drafter(script, limits=DraftLimits(max_draft_tokens=2, max_candidates=0)) as drafter,
        running_verifier(verifier_settings(target)) as (verifier, _),
        decode_client(verifier.address) as client,
    ):
        await client.use_drafters(drafter.address)
        result = await client.decode(PROMPT, drafter=drafter.address, max_tokens=20, **asked)
        assert drafter.asked == [opened]
        assert result.token_ids == greedy(target, PROMPT, 20)
        assert result.reasons == []


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        (
            {"child_ids": np.array([[1, 2, 3]], np.int32), "probabilities": np.zeros((1, 3), np.uint16)},
            "must be 1 to 2",
        ),
        (
            {
                "candidate_ids": np.array([[1, 2, 3]], np.int32),
                "candidate_weights": np.array([[16384, 16384, 32768]], np.uint16),
            },
            "at most 2 were agreed upon",
        ),
    ],
    ids=["children", "candidates"],
)
async def test_expansions_beyond_the_agreement_cost_their_sequence_the_drafter(
    pair: Pair, fields: dict[str, Any], problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Too many children in one case, too many candidates in the other; the stream goes on."""
    target, _ = pair
    script = replay([*PROMPT, *greedy(target, PROMPT, 60)])

    def large(sequence: DraftSequence) -> drafter_pb2.DraftResponse:
        return frame(chain_of(sequence.sequence_id, [1], num_committed=sequence.length, first_id=1000, **fields))

    async with (
        fake_drafter(script, limits=DraftLimits(max_draft_tokens=2, max_candidates=2, num_children=2)) as drafter,
        running_verifier(verifier_settings(target)) as (verifier, _),
        decode_client(verifier.address) as client,
    ):
        await client.use_drafters(drafter.address)
        bystander = asyncio.create_task(client.decode(PROMPT, drafter=drafter.address, max_tokens=60))
        await eventually(lambda: len(drafter.opened) == 1)
        drafter.hook = lambda expansions, sequence: (
            [large(sequence)] if sequence.sequence_id != drafter.opened[0] else [frame(expansions)]
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
    limits = drafter_pb2.DraftLimits(
        max_draft_tokens=answer[0], max_candidates=answer[1], num_children=1, max_expansions=64, takes_turns=True
    )
    async with (
        fake_drafter(hook=answers(), answer=limits) as drafter,
        running_verifier(verifier_settings(target, num_candidates=8)) as (verifier, _),
        decode_client(verifier.address) as client,
    ):
        await client.use_drafters(drafter.address, state=INCOMPATIBLE)
        assert "limits." in client.drafters[drafter.address].detail
        result = await client.decode(PROMPT, drafter=drafter.address, max_tokens=5)
        assert result.reasons == ["INCOMPATIBLE_DRAFTER"]
