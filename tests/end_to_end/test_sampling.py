"""Sampling through client, gateway, verifier and drafter against the target's exact distribution."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from scipy import stats

from outrider.client import AsyncClient, Verification
from outrider.completion import Completion, TokenOrigin
from outrider.local import LocalCluster, Options
from tests.end_to_end.conftest import load_model
from tests.service_device import DRAFTER_FLAGS, SERVICE_DEVICE, VERIFIER_FLAGS

VOCABULARY = 16
PROMPT = [3, 1, 4, 1, 5]
NUM_TOKENS = 16
# 3,200 tokens a case: each mistake that is planted below has a p-value under 1e-7.
NUM_REQUESTS = 200
# With two dozen statistics a run, one false alarm in tens of thousands of runs.
SIGNIFICANCE = 1e-6

Shape = Callable[[torch.Tensor, list[int]], torch.Tensor]


def top_k(k: int) -> Shape:
    def shape(logits: torch.Tensor, output: list[int]) -> torch.Tensor:
        return logits.masked_fill(logits < logits.topk(k).values[-1], -torch.inf)

    return shape


def top_p(p: float) -> Shape:
    def shape(logits: torch.Tensor, output: list[int]) -> torch.Tensor:
        values, order = logits.softmax(0).sort(descending=True)
        keep = order[: int((values.cumsum(0) - values < p).sum())]
        return torch.full_like(logits, -torch.inf).index_copy(0, keep, logits[keep])

    return shape


def presence(penalty: float, repetition: float) -> Shape:
    def shape(logits: torch.Tensor, output: list[int]) -> torch.Tensor:
        shaped = logits.clone()
        for token_id in {*PROMPT, *output}:
            shaped[token_id] = shaped[token_id] / repetition if shaped[token_id] > 0 else shaped[token_id] * repetition
        for token_id in set(output):
            shaped[token_id] -= penalty
        return shaped

    return shape


@dataclass(frozen=True)
class Case:
    name: str
    temperature: float
    options: dict[str, float]
    before: Shape | None = None  # penalties come before the temperature
    after: Shape | None = None  # filters behind it
    verification: Verification = Verification.REJECTION


CASES = {
    case.name: case
    for case in (
        Case("temperature 1", 1.0, {}),
        Case("temperature 0.7", 0.7, {}),
        Case("top-k", 1.0, {"top_k": 5}, after=top_k(5)),
        Case("top-p", 0.9, {"top_p": 0.8}, after=top_p(0.8)),
        Case("penalties", 1.0, {"presence_penalty": 1.5, "repetition_penalty": 1.5}, before=presence(1.5, 1.5)),
        Case("coupled", 1.0, {}, verification=Verification.COUPLED),
        Case(
            "coupled, penalties, top-p",
            0.9,
            {"presence_penalty": 1.5, "repetition_penalty": 1.5, "top_p": 0.8},
            before=presence(1.5, 1.5),
            after=top_p(0.8),
            verification=Verification.COUPLED,
        ),
    )
}
# What was asked for, and a mistake that the services might have made of it.
MISTAKES = [
    ("temperature 1", Case("another temperature", 0.85, {})),
    ("temperature 0.7", Case("another temperature", 0.8, {})),
    ("top-k", Case("one more", 1.0, {}, after=top_k(6))),
    ("top-k", Case("one less", 1.0, {}, after=top_k(4))),
    ("top-p", Case("a little more", 0.9, {}, after=top_p(0.85))),
    ("top-p", Case("no temperature", 1.0, {}, after=top_p(0.8))),
    ("penalties", Case("no presence penalty", 1.0, {}, before=presence(0.0, 1.5))),
    ("penalties", Case("no repetition penalty", 1.0, {}, before=presence(1.5, 1.0))),
    ("coupled", Case("another temperature", 0.85, {})),
    ("coupled, penalties, top-p", Case("no penalties", 0.9, {}, after=top_p(0.8))),
]


@torch.inference_mode()
def exact(model: Path, case: Case, outputs: Sequence[list[int]]) -> torch.Tensor:  # [outputs, NUM_TOKENS, VOCABULARY]
    """The model's distribution of each token, behind the prompt and the output's own tokens before it."""
    logits: torch.Tensor = load_model(model)(torch.tensor([[*PROMPT, *tokens] for tokens in outputs])).logits.double()
    shaped = logits[:, len(PROMPT) - 1 : -1].clone()
    for rows, tokens in zip(shaped, outputs, strict=True):
        for place, row in enumerate(rows):
            logit = (case.before(row, tokens[:place]) if case.before else row) / case.temperature
            rows[place] = case.after(logit, tokens[:place]) if case.after else logit
    return shaped.softmax(-1)


def p_values(tokens: torch.Tensor, probabilities: torch.Tensor, draft: torch.Tensor) -> dict[str, float]:
    """How likely tokens [outputs, n] that are as far from their probabilities [outputs, n, VOCABULARY] are by chance.

    `draft` has the draft model's probabilities, in the same shape.

    Each token is turned into a number: the share of its distribution that is more likely than it, and a random part of
    its own. Of tokens that were drawn from their distributions these numbers are uniform, whatever the distributions
    are, and know nothing of each other. A distribution too flat, too sharp or cut elsewhere crowds them at one end.
    What only moves some tokens shows in their frequencies, what lets the draft through in what its model prefers.
    """
    drawn = probabilities.gather(2, tokens[..., None])
    if not bool((drawn > 0).all()):
        return {"the impossible": 0.0}
    is_before = (probabilities > drawn) | ((probabilities == drawn) & (torch.arange(VOCABULARY) < tokens[..., None]))
    noise = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    uniform = (probabilities * is_before).sum(-1) + drawn.squeeze(-1) * noise
    sixteenths = (uniform * 16).long().clamp_max_(15)
    quarters = sixteenths // 4
    hits = torch.nn.functional.one_hot(tokens, VOCABULARY).double()
    variance = (probabilities * (1 - probabilities)).sum((0, 1))
    deviations = (hits - probabilities).sum((0, 1)).abs() / variance.sqrt()
    preference = (draft / probabilities.clamp_min(1e-9)).log().clamp_(-2, 2)
    expected = (probabilities * preference).sum(-1)
    spread = (probabilities * (preference - expected[..., None]) ** 2).sum().sqrt()
    pull = (preference.gather(2, tokens[..., None]).squeeze(-1) - expected).sum() / spread
    return {
        "first tokens": chi_squared(sixteenths[:, 0]),
        "all tokens": chi_squared(sixteenths),
        "neighbours": chi_squared(quarters[:, :-1] * 4 + quarters[:, 1:]),
        "frequencies": min(1.0, 2 * VOCABULARY * float(stats.norm.sf(float(deviations.max())))),
        "towards the draft": 2 * float(stats.norm.sf(abs(float(pull)))),
    }


def chi_squared(sixteenths: torch.Tensor) -> float:
    """The p-value of numbers of 0 to 15 that should be equally frequent."""
    return float(stats.chisquare(torch.bincount(sixteenths.flatten(), minlength=16).numpy()).pvalue)


async def sample(client: AsyncClient, case: Case, seed: int) -> list[Completion]:
    """Many requests that differ in their seed alone."""
    places = asyncio.Semaphore(64)

    async def one(index: int) -> Completion:
        async with places:
            return await client.generate(
                token_ids=PROMPT,
                max_tokens=NUM_TOKENS,
                temperature=case.temperature,
                seed=seed + index,
                max_draft_tokens=3,
                verification=case.verification,
                **case.options,  # type: ignore[arg-type]
            )

    return await asyncio.gather(*(one(index) for index in range(NUM_REQUESTS)))


def tiny_cluster(
    tiny_pair: tuple[Path, Path],
    log_directory: Path,
    *,
    max_draft_tokens: int | None = None,
    log_level: str = "WARNING",
) -> LocalCluster:
    """The three services with a pair small enough to go through all that it could say."""
    target, draft = tiny_pair
    return LocalCluster(
        Options(
            target=target,
            draft=draft,
            device=SERVICE_DEVICE,
            dtype="float32",
            max_draft_tokens=max_draft_tokens,
            log_directory=log_directory,
            log_level=log_level,
            verifier_flags=VERIFIER_FLAGS,
            drafter_flags=DRAFTER_FLAGS,
        )
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(
    tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[LocalCluster]:
    async with tiny_cluster(tiny_pair, tmp_path_factory.mktemp("logs")) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def samples(cluster: LocalCluster) -> dict[str, list[Completion]]:
    """What the services answer, by case."""
    async with AsyncClient(cluster.address) as client:
        return {
            name: await sample(client, case, seed=1_000_000 * number)
            for number, (name, case) in enumerate(CASES.items())
        }


def held_against(pair: tuple[Path, Path], case: Case, completions: Sequence[Completion]) -> dict[str, float]:
    """The p-values of the completions, had they been sampled so."""
    target, draft = pair
    outputs = [list(completion.token_ids) for completion in completions]
    drafted = exact(draft, Case("the drafter's", case.temperature, {}), outputs)
    return p_values(torch.tensor(outputs), exact(target, case, outputs), drafted)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_tokens_are_distributed_as_the_target_alone_would(
    tiny_pair: tuple[Path, Path], samples: dict[str, list[Completion]], name: str
) -> None:
    """Catches any error in q, in the acceptance test, in the residual, in the coupled draw and in the parameters on
    their way.

    Noise that drafting shares with recovering shows only in many samples of one context, as tests/services takes them.
    """
    origins = Counter(token.origin for completion in samples[name] for token in completion.tokens)
    # Without rejections and full acceptances the statistic would prove nothing.
    assert origins[TokenOrigin.RECOVERED] > NUM_REQUESTS
    assert origins[TokenOrigin.BONUS] > NUM_REQUESTS / 5
    assert {completion.speculation.verification for completion in samples[name]} == {CASES[name].verification}
    found = held_against(tiny_pair, CASES[name], samples[name])
    assert {statistic: p for statistic, p in found.items() if p < SIGNIFICANCE} == {}


@pytest.mark.parametrize(("name", "mistake"), MISTAKES, ids=[f"{name}: {mistake.name}" for name, mistake in MISTAKES])
def test_the_statistic_sees_a_mistake(
    tiny_pair: tuple[Path, Path], samples: dict[str, list[Completion]], name: str, mistake: Case
) -> None:
    """The check can fail: what was sampled as asked is not what the mistake would have made of it."""
    assert min(held_against(tiny_pair, mistake, samples[name]).values()) < SIGNIFICANCE


@pytest.mark.asyncio(loop_scope="module")
async def test_the_same_seed_gives_the_same_tokens_in_any_company(cluster: LocalCluster) -> None:
    """Catches random numbers that depend on the batch, the slot or the time, or on what was drafted."""
    async with AsyncClient(cluster.address) as client:

        async def generate(seed: int, prompt: list[int], *, speculation: bool = True) -> tuple[int, ...]:
            completion = await client.generate(
                token_ids=prompt, max_tokens=60, temperature=1.0, seed=seed, speculation=speculation
            )
            assert (completion.speculation.num_accepted_tokens > 0) == speculation
            assert completion.speculation.verification is Verification.COUPLED
            return completion.token_ids

        alone = [await generate(seed, PROMPT) for seed in (11, 12, 13)]
        assert alone == [await generate(seed, PROMPT, speculation=False) for seed in (11, 12, 13)]
        for seed, expected in zip((11, 12, 13), alone, strict=True):
            others = [generate(100 + index, PROMPT[: 1 + index % 5]) for index in range(8)]
            together = await asyncio.gather(generate(seed, PROMPT), *others)
            assert together[0] == expected
        assert len(set(alone)) == 3
