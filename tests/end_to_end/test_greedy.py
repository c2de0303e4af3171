"""Greedy output of the three services equals the target model alone, whatever the drafter is, does or suffers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from outrider.bundled import bundled_model
from outrider.client import AsyncClient
from outrider.completion import Completion, FallbackReason, TokenOrigin
from outrider.local import LocalCluster
from tests.end_to_end.conftest import assert_greedy
from tests.end_to_end.services import running_drafter, running_gateway, running_model_drafter
from tests.tiny_models import save_tiny_llama

pytestmark = pytest.mark.asyncio(loop_scope="session")

NUM_TOKENS = 48
# The drafter's context. A shorter prompt speculates, a longer one cannot.
DRAFTER_LENGTH = 512
DRAFT_TOKENS = 4


def heldout_prompts() -> list[list[int]]:
    """Token ids of excerpts that neither model was trained on, 24 to 1,600 tokens long."""
    path = bundled_model("target").parent / "heldout" / "snippets.json"
    tokenizer = Tokenizer.from_file(str(bundled_model("target") / "tokenizer.json"))
    return [tokenizer.encode(snippet["text"]).ids for snippet in json.loads(path.read_text())]


def assert_targets_own(prompt: Sequence[int], completion: Completion) -> None:
    """What the target alone would say, and no less."""
    assert_greedy(bundled_model("target"), prompt, completion.token_ids, NUM_TOKENS)


async def generate_all(
    address: str, prompts: Sequence[Sequence[int]], **options: object
) -> list[tuple[Sequence[int], Completion]]:
    """Every prompt at once, greedy."""
    async with AsyncClient(address) as client:
        completions = await asyncio.gather(
            *(
                client.generate(
                    token_ids=prompt,
                    max_tokens=NUM_TOKENS,
                    temperature=0.0,
                    ignore_eos=True,
                    **options,  # type: ignore[arg-type]
                )
                for prompt in prompts
            )
        )
    return list(zip(prompts, completions, strict=True))


def reasons(completion: Completion) -> list[FallbackReason]:
    return [fallback.reason for fallback in completion.speculation.fallbacks]


@pytest.mark.slow
async def test_the_draft_model_changes_nothing(
    cluster: LocalCluster,
) -> None:
    """Catches a wrong verdict, a cache that keeps rejected tokens, and a fallback that loses or repeats a token."""
    prompts = heldout_prompts()
    assert len(prompts) >= 20
    results = await generate_all(cluster.address, prompts)
    disabled = await generate_all(cluster.address, prompts[:3], speculation=False)
    origins = set()
    for prompt, completion in results:
        assert_targets_own(prompt, completion)
        origins |= {token.origin for token in completion.tokens}
        end = len(prompt) + NUM_TOKENS
        if len(prompt) + DRAFT_TOKENS > DRAFTER_LENGTH:
            assert reasons(completion) == [FallbackReason.DRAFTER_MAX_LENGTH]
            assert completion.speculation.fallbacks[0].position == len(prompt)
            assert completion.speculation.num_draft_tokens == 0
        elif end + DRAFT_TOKENS <= DRAFTER_LENGTH:
            assert reasons(completion) == []
    assert {TokenOrigin.ACCEPTED, TokenOrigin.RECOVERED, TokenOrigin.BONUS, TokenOrigin.PLAIN} <= origins
    for prompt, completion in disabled:
        assert_targets_own(prompt, completion)
        assert reasons(completion) == [FallbackReason.CLIENT_DISABLED]
        assert {token.origin for token in completion.tokens} == {TokenOrigin.PLAIN}


@pytest.mark.slow
async def test_prompt_lookup_changes_nothing(cluster: LocalCluster, tmp_path: Path) -> None:
    """Catches a drafter without a model that is held to a model's limits, and steps that wait for what never comes."""
    verifier = cluster.verifier.address
    async with (
        running_drafter(tmp_path, "--kind", "ngram") as drafter,
        running_gateway(verifier, tmp_path, drafter=drafter.address) as gateway,
    ):
        results = await generate_all(gateway.address, heldout_prompts())
    num_accepted = 0
    for prompt, completion in results:
        assert_targets_own(prompt, completion)
        assert reasons(completion) == []
        num_accepted += completion.speculation.num_accepted_tokens
    assert num_accepted > 0


@pytest.mark.slow
async def test_scripts_change_nothing(cluster: LocalCluster, tmp_path: Path) -> None:
    """A script that knows the answer saves most steps; one that is wrong halfway costs nothing but speed."""
    prompts = heldout_prompts()[:8]
    plain = await generate_all(cluster.address, prompts, speculation=False)
    right = [[*prompt, *completion.token_ids] for prompt, completion in plain]
    # The second half of the scripts goes wrong at their 22nd token, and stays so.
    for script, prompt in zip(right[4:], prompts[4:], strict=True):
        script[len(prompt) + 22] ^= 1
    path = tmp_path / "script.json"
    path.write_text(json.dumps({"sequences": right}))
    verifier = cluster.verifier.address
    async with (
        running_drafter(tmp_path, "--kind", "scripted", "--script", str(path)) as drafter,
        running_gateway(verifier, tmp_path, drafter=drafter.address) as gateway,
    ):
        results = await generate_all(gateway.address, prompts)
    for index, (tokens, completion) in enumerate(results):
        assert_targets_own(tokens, completion)
        statistics = completion.speculation
        if index < 4:
            assert statistics.num_accepted_tokens == statistics.num_draft_tokens
            assert statistics.num_steps <= 2 + NUM_TOKENS // (DRAFT_TOKENS + 1)
        else:
            assert 0 < statistics.num_accepted_tokens < statistics.num_draft_tokens


async def test_a_drafter_that_does_not_fit_is_refused(cluster: LocalCluster, tmp_path: Path) -> None:
    """Catches a drafter of another vocabulary being asked for tokens."""
    prompt = heldout_prompts()[0]
    stranger = save_tiny_llama(tmp_path / "stranger", vocab_size=64)
    async with running_model_drafter(tmp_path, stranger) as drafter:
        flags = ("--drafters", drafter.address, "--drafter-wait-seconds", "0")
        async with (
            running_gateway(cluster.verifier.address, tmp_path, *flags) as gateway,
            AsyncClient(gateway.address) as client,
            asyncio.timeout(30),
        ):
            while not (status := (await client.model()).drafters[0]).detail:
                await asyncio.sleep(0.05)
            [(_, completion)] = await generate_all(gateway.address, [prompt])
    assert_targets_own(prompt, completion)
    assert reasons(completion) == [FallbackReason.INCOMPATIBLE_DRAFTER]
    assert not status.is_ready
    assert "vocabulary_size" in status.detail


async def test_no_drafter_at_all(cluster: LocalCluster, tmp_path: Path) -> None:
    """Catches a gateway that needs a drafter to serve."""
    prompt = heldout_prompts()[0]
    async with running_gateway(cluster.verifier.address, tmp_path) as gateway:
        [(_, completion)] = await generate_all(gateway.address, [prompt])
    assert_targets_own(prompt, completion)
    assert reasons(completion) == [FallbackReason.NO_DRAFTER]
