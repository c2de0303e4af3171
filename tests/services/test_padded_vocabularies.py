"""A target and a drafter of one tokenizer whose vocabularies are padded to different sizes."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from outrider.protocol.errors import FailedPreconditionError
from outrider.protocol.handshake import check_compatible
from outrider.v1 import common_pb2
from tests.services.conftest import Pair
from tests.services.harness import (
    decode_client,
    drafter_settings,
    running_drafter,
    running_verifier,
    verifier_settings,
)
from tests.services.reference import greedy, prompts
from tests.services.test_decode_sampling import (
    SIGNIFICANCE,
    VOCABULARY,
    WHOLE,
    check_branches,
    p_values,
    sample,
    sampling_client,
)
from tests.tiny_models import save_padded

ACCEPTED, RECOVERED = common_pb2.TOKEN_ORIGIN_ACCEPTED, common_pb2.TOKEN_ORIGIN_RECOVERED
# Of the small pair's 64.
NUM_TOKEN_IDS = 60


def identity(rows: int, num_token_ids: int = 60, fingerprint: str = "same") -> common_pb2.ModelIdentity:
    return common_pb2.ModelIdentity(
        vocabulary_size=rows, num_token_ids=num_token_ids, tokenizer_fingerprint=fingerprint
    )


@pytest.mark.parametrize(
    ("target", "drafter", "field"),
    [
        (identity(64), identity(64), None),
        (identity(64), identity(80), None),
        (identity(80), identity(60), None),
        (identity(59), identity(80), "vocabulary_size"),
        (identity(80), identity(59), "vocabulary_size"),
        (identity(64), identity(80, fingerprint="other"), "vocabulary_size"),
        (identity(64, fingerprint=""), identity(80, fingerprint=""), "vocabulary_size"),
        # One that is older says nothing of its tokenizer's size, and does not hold back what is padding.
        (identity(64), identity(80, num_token_ids=0), "vocabulary_size"),
        (identity(64, num_token_ids=0), identity(80, num_token_ids=0), "vocabulary_size"),
        (identity(64), identity(64, fingerprint="other"), "tokenizer_fingerprint"),
        (identity(64), identity(0, num_token_ids=0, fingerprint=""), None),
    ],
)
def test_what_fits(target: common_pb2.ModelIdentity, drafter: common_pb2.ModelIdentity, field: str | None) -> None:
    """Catches a pair that is refused for its padding alone, and one whose ids mean different tokens."""
    if field is None:
        check_compatible(target, drafter)
    else:
        with pytest.raises(FailedPreconditionError, match=f"^{field}: "):
            check_compatible(target, drafter)


@pytest.mark.parametrize(("target_rows", "draft_rows"), [(64, 80), (80, 64)])
async def test_padding_is_never_proposed(pair: Pair, tmp_path: Path, target_rows: int, draft_rows: int) -> None:
    """Catches a draft of what is no token, which the target would have to reject, or does not even have."""
    target = save_padded(pair[0], tmp_path / "target", num_rows=target_rows, num_token_ids=NUM_TOKEN_IDS)
    draft = save_padded(pair[1], tmp_path / "draft", num_rows=draft_rows, num_token_ids=NUM_TOKEN_IDS, is_loud=True)
    prompt = prompts(3, vocab_size=NUM_TOKEN_IDS)[2]
    # Left to itself, the draft model would say hardly anything else.
    assert max(greedy(draft, prompt, 5)) >= NUM_TOKEN_IDS
    async with (
        running_drafter(drafter_settings(model=draft)) as drafter,
        running_verifier(verifier_settings(target)) as (verifier, _),
        decode_client(verifier.address) as client,
    ):
        await client.use_drafters(drafter.address)
        result = await client.decode(prompt, drafter=drafter.address, max_tokens=40)
        assert result.token_ids == greedy(target, prompt, 40)
        assert result.reasons == []
        assert {ACCEPTED, RECOVERED} <= set(result.origins)
        # A bias for an id that only the target has is none of the drafter's business.
        biased = {"sampling": {"logit_bias": {target_rows - 1: -5.0}}, "drafter": drafter.address}
        assert (await client.decode(prompt, max_tokens=10, **biased)).reasons == []


async def test_what_the_drafter_has_no_row_for_ends_its_part(
    pair: Pair, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches an id that is looked up behind the end of the draft model's embedding."""
    target = save_padded(pair[0], tmp_path / "target", num_rows=80, num_token_ids=NUM_TOKEN_IDS, is_loud=True)
    draft = save_padded(pair[1], tmp_path / "draft", num_rows=64, num_token_ids=NUM_TOKEN_IDS)
    prompt = prompts(3, vocab_size=NUM_TOKEN_IDS)[2]
    wanted = greedy(target, prompt, 20)
    assert max(wanted) >= 64
    caplog.set_level(logging.INFO, "verifier_service")
    async with (
        running_drafter(drafter_settings(model=draft)) as drafter,
        running_verifier(verifier_settings(target)) as (verifier, _),
        decode_client(verifier.address) as client,
    ):
        await client.use_drafters(drafter.address)
        for tokens in (prompt, [*prompt, *wanted[:15]]):
            result = await client.decode(tokens, drafter=drafter.address, max_tokens=20)
            assert result.token_ids[:5] == greedy(target, tokens, 5)
            assert result.reasons == ["DRAFTER_LOST"]
        # By name, and not because the draft model failed, which would concern everybody.
        refusals = [record.getMessage() for record in caplog.records if "without the drafter" in record.getMessage()]
        assert len(refusals) == 2
        assert all("is not below the vocabulary size 64" in refusal for refusal in refusals)
        fine = await client.decode(prompt, drafter=drafter.address, max_tokens=1)
        assert fine.reasons == []


@pytest.mark.slow
async def test_tokens_are_distributed_as_the_target_alone_would(narrow_pair: Pair, tmp_path: Path) -> None:
    """Catches a q that has what was masked in its sum, or that was drawn from otherwise than it is sent."""
    target = save_padded(narrow_pair[0], tmp_path / "target", num_rows=VOCABULARY, num_token_ids=VOCABULARY)
    draft = save_padded(
        narrow_pair[1], tmp_path / "draft", num_rows=VOCABULARY + 8, num_token_ids=VOCABULARY, is_loud=True
    )
    settings = drafter_settings(model=draft, max_sequences=4096)
    async with running_drafter(settings) as drafter, sampling_client(target, drafter.address) as client:
        results = await sample(client, drafter.address, WHOLE, first_seed=9_000_000)
    check_branches(results)
    assert {name: p for name, p in p_values(results, target, WHOLE).items() if p < SIGNIFICANCE} == {}
