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
from tests.end_to_end.conftest import MakeCluster, greedy_tokens
from tests.tiny_models import save_tiny_llama

NUM_TOKENS = 48
# The drafter's context. A shorter prompt speculates, a longer one cannot.
DRAFTER_LENGTH = 512
DRAFT_TOKENS = 4


def heldout_prompts() -> list[list[int]]:
    """Token ids of excerpts that neither model was trained on, 24 to 1,600 tokens long."""
    path = bundled_model("target").parent / "heldout" / "snippets.json"
    tokenizer = Tokenizer.from_file(str(bundled_model("target") / "tokenizer.json"))
    return [tokenizer.encode(snippet["text"]).ids for snippet in json.loads(path.read_text())]


@pytest.fixture(scope="module")
def expected() -> dict[tuple[int, ...], list[int]]:
    """The target's own continuation of every held-out prompt."""
    return {tuple(prompt): greedy_tokens(bundled_model("target"), prompt, NUM_TOKENS) for prompt in heldout_prompts()}


async def generate_all(
    cluster: LocalCluster, prompts: Sequence[Sequence[int]], **options: object
) -> list[tuple[Sequence[int], Completion]]:
    """Every prompt at once, greedy."""
    async with AsyncClient(cluster.address) as client:
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
    demo_cluster: MakeCluster, expected: dict[tuple[int, ...], list[int]]
) -> None:
    """Catches a wrong verdict, a cache that keeps rejected tokens, and a fallback that loses or repeats a token."""
    prompts = heldout_prompts()
    assert len(prompts) >= 20
    async with demo_cluster() as cluster:
        results = await generate_all(cluster, prompts)
        disabled = await generate_all(cluster, prompts[:3], speculation=False)
    origins = set()
    for prompt, completion in results:
        assert list(completion.token_ids) == expected[tuple(prompt)]
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
        assert list(completion.token_ids) == expected[tuple(prompt)]
        assert reasons(completion) == [FallbackReason.CLIENT_DISABLED]
        assert {token.origin for token in completion.tokens} == {TokenOrigin.PLAIN}


@pytest.mark.slow
async def test_prompt_lookup_changes_nothing(
    demo_cluster: MakeCluster, expected: dict[tuple[int, ...], list[int]]
) -> None:
    """Catches a drafter without a model that is held to a model's limits, and steps that wait for what never comes."""
    async with demo_cluster(drafter="ngram", draft=None) as cluster:
        results = await generate_all(cluster, heldout_prompts())
    num_accepted = 0
    for prompt, completion in results:
        assert list(completion.token_ids) == expected[tuple(prompt)]
        assert reasons(completion) == []
        num_accepted += completion.speculation.num_accepted_tokens
    assert num_accepted > 0


@pytest.mark.slow
async def test_scripts_change_nothing(
    demo_cluster: MakeCluster, expected: dict[tuple[int, ...], list[int]], tmp_path: Path
) -> None:
    """A script that knows the answer saves most steps; one that is wrong halfway costs nothing but speed."""
    prompts = heldout_prompts()[:8]
    right = [[*prompt, *expected[tuple(prompt)]] for prompt in prompts]
    # The second half of the scripts goes wrong at their 20th token, and stays so.
    for script, prompt in zip(right[4:], prompts[4:], strict=True):
        script[len(prompt) + 20] ^= 1
    path = tmp_path / "script.json"
    path.write_text(json.dumps({"sequences": right}))
    async with demo_cluster(drafter="scripted", draft=None, script=str(path)) as cluster:
        results = await generate_all(cluster, prompts)
    for index, (tokens, completion) in enumerate(results):
        assert list(completion.token_ids) == expected[tuple(tokens)]
        statistics = completion.speculation
        if index < 4:
            assert statistics.num_accepted_tokens == statistics.num_draft_tokens
            assert statistics.num_steps <= 2 + NUM_TOKENS // (DRAFT_TOKENS + 1)
        else:
            assert 0 < statistics.num_accepted_tokens < statistics.num_draft_tokens


async def test_a_drafter_that_does_not_fit_is_refused(demo_cluster: MakeCluster, tmp_path: Path) -> None:
    """Catches a drafter of another vocabulary being asked for tokens."""
    prompt = heldout_prompts()[0]
    stranger = save_tiny_llama(tmp_path / "stranger", vocab_size=64)
    async with demo_cluster(draft=stranger) as cluster:
        [(_, completion)] = await generate_all(cluster, [prompt])
        async with AsyncClient(cluster.address) as client:
            [drafter] = (await client.model()).drafters
    assert list(completion.token_ids) == greedy_tokens(bundled_model("target"), prompt, NUM_TOKENS)
    assert reasons(completion) == [FallbackReason.INCOMPATIBLE_DRAFTER]
    assert not drafter.is_ready
    assert "vocabulary_size" in drafter.detail


async def test_no_drafter_at_all(demo_cluster: MakeCluster) -> None:
    """Catches a gateway that needs a drafter to serve."""
    prompt = heldout_prompts()[0]
    async with demo_cluster(drafter="none", draft=None) as cluster:
        [(_, completion)] = await generate_all(cluster, [prompt])
    assert list(completion.token_ids) == greedy_tokens(bundled_model("target"), prompt, NUM_TOKENS)
    assert reasons(completion) == [FallbackReason.NO_DRAFTER]
