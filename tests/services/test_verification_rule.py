"""Which rule verifies a sequence, and who hears of it."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.v1 import common_pb2
from tests.scrape import Scrape
from tests.services.conftest import Pair
from tests.services.harness import (
    decode_client,
    drafter_settings,
    eventually,
    running_drafter,
    running_verifier,
    verifier_is_empty,
    verifier_settings,
)
from tests.services.reference import prompts
from verifier_service.metrics import VerifierMetrics

PROMPT = prompts(3)[2]
GREEDY, REJECTION, COUPLED = (
    common_pb2.VERIFICATION_GREEDY,
    common_pb2.VERIFICATION_REJECTION,
    common_pb2.VERIFICATION_COUPLED,
)
SAMPLED: dict[str, Any] = {"sampling": {"temperature": 0.7}}
# What a request says, and its rule; None: the verifier's setting.
RULES: list[tuple[dict[str, Any], common_pb2.Verification | None]] = [
    ({}, GREEDY),
    ({"is_seeded": True}, GREEDY),
    ({"verification": GREEDY}, GREEDY),
    ({"verification": REJECTION}, GREEDY),
    ({"verification": COUPLED}, GREEDY),
    (SAMPLED, None),
    ({**SAMPLED, "is_seeded": True}, COUPLED),
    ({**SAMPLED, "verification": REJECTION}, REJECTION),
    ({**SAMPLED, "verification": REJECTION, "is_seeded": True}, REJECTION),
    ({**SAMPLED, "verification": COUPLED}, COUPLED),
    # Too low to divide by, and raised: still not greedy.
    ({"sampling": {"temperature": 0.001}, "is_seeded": True}, COUPLED),
]


@pytest.mark.parametrize(("settings", "unasked"), [({}, REJECTION), ({"verification": "coupled"}, COUPLED)])
async def test_the_rule_that_a_request_gets(
    pair: Pair, settings: dict[str, Any], unasked: common_pb2.Verification
) -> None:
    """Catches a seed that is not reproducible, and a rule that was named and is not used, or not told."""
    target, _ = pair
    async with (
        running_verifier(verifier_settings(target, **settings)) as (verifier, _),
        decode_client(verifier.address) as client,
    ):
        for fields, expected in RULES:
            result = await client.decode(PROMPT, max_tokens=2, **fields)
            assert result.verification == (unasked if expected is None else expected), fields


async def test_rules_are_counted_apart(pair: Pair) -> None:
    """Catches draft tokens that are counted for another rule's."""
    target, draft = pair
    metrics = VerifierMetrics.from_environment(is_scraped=True, environment={})
    try:
        async with (
            running_drafter(drafter_settings(model=draft)) as drafter,
            running_verifier(verifier_settings(target), metrics=metrics) as (verifier, _),
            decode_client(verifier.address) as client,
        ):
            await client.use_drafters(drafter.address)
            results = {
                name: await client.decode(PROMPT, drafter=drafter.address, max_tokens=40, **fields)
                for name, fields in {
                    "greedy": {},
                    "rejection": SAMPLED,
                    "coupled": {**SAMPLED, "is_seeded": True},
                }.items()
            }
            await eventually(lambda: verifier_is_empty(client))
            found = Scrape.of_text(metrics.render()[0].decode())
            metrics.forget_drafter(drafter.address)
            rest = Scrape.of_text(metrics.render()[0].decode())
    finally:
        metrics.stop()
    assert found.by("outrider_verifier_sequences_started_total", "verification") == dict.fromkeys(results, 1)
    drafted = {name: result.num_drafted for name, result in results.items()}
    accepted = {name: result.num_accepted for name, result in results.items()}
    assert min(*drafted.values(), *accepted.values()) > 0
    assert found.by("outrider_verifier_draft_tokens_total", "verification") == drafted
    assert found.by("outrider_verifier_draft_accepted_total", "verification") == accepted
    assert rest.by("outrider_verifier_draft_tokens_total", "verification") == {}
