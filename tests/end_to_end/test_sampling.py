"""Sampling through client, gateway, verifier and drafter against the target's exact distribution."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from scipy import stats

from outrider.client import AsyncClient
from outrider.completion import TokenOrigin
from outrider.local import LocalCluster, Options
from tests.end_to_end.conftest import load_model
from tests.service_device import DRAFTER_FLAGS, SERVICE_DEVICE, VERIFIER_FLAGS

VOCABULARY = 16
PROMPT = [3, 1, 4, 1, 5]
NUM_TOKENS = 6
NUM_CHECKED = 4
NUM_REQUESTS = 2500
# With a dozen tests a run, one false alarm in several thousand runs.
SIGNIFICANCE = 1e-5

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


CASES = [
    Case("temperature 1", 1.0, {}),
    Case("temperature 0.7", 0.7, {}),
    Case("top-k", 1.0, {"top_k": 5}, after=top_k(5)),
    Case("top-p", 0.9, {"top_p": 0.8}, after=top_p(0.8)),
    Case(
        "penalties",
        1.0,
        {"presence_penalty": 0.8, "repetition_penalty": 1.3},
        before=presence(0.8, 1.3),
    ),
]


@torch.inference_mode()
def exact_marginals(target: Path, case: Case) -> list[torch.Tensor]:
    """The target's distribution at each of the first positions, by going through every continuation up to there."""
    model = load_model(target)
    marginals = []
    weights: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(NUM_CHECKED):
        prefixes = [prefix for prefix, weight in weights.items() if weight > 0]
        logits = model(torch.tensor([[*PROMPT, *prefix] for prefix in prefixes])).logits[:, -1].double()
        following: dict[tuple[int, ...], float] = {}
        marginal = torch.zeros(VOCABULARY, dtype=torch.float64)
        for prefix, row in zip(prefixes, logits, strict=True):
            shaped = case.before(row, list(prefix)) if case.before else row
            shaped = shaped / case.temperature
            shaped = case.after(shaped, list(prefix)) if case.after else shaped
            probabilities = shaped.softmax(0) * weights[prefix]
            marginal += probabilities
            for token_id, weight in enumerate(probabilities.tolist()):
                following[(*prefix, token_id)] = weight
        marginals.append(marginal)
        weights = following
    return marginals


def p_value(counts: Counter[int], expected: torch.Tensor, total: int) -> float:
    """Of a chi-squared test with tokens of fewer than ten expected hits in one bin; 0 where the impossible happened."""
    if any(expected[token_id] == 0 for token_id in counts):
        return 0.0
    observed: list[float] = []
    wanted: list[float] = []
    rest_observed, rest_wanted = 0.0, 0.0
    for token_id in range(VOCABULARY):
        hits = float(expected[token_id]) * total
        if hits >= 10:
            observed.append(counts[token_id])
            wanted.append(hits)
        else:
            rest_observed += counts[token_id]
            rest_wanted += hits
    if rest_wanted >= 1:
        observed.append(rest_observed)
        wanted.append(rest_wanted)
    scale = sum(observed) / sum(wanted)
    return float(stats.chisquare(observed, [value * scale for value in wanted]).pvalue)


async def sample(
    client: AsyncClient, case: Case, num_requests: int, seed: int
) -> list[tuple[list[int], list[TokenOrigin]]]:
    """The tokens and origins of many requests that differ in their seed alone."""
    places = asyncio.Semaphore(64)

    async def one(index: int) -> tuple[list[int], list[TokenOrigin]]:
        async with places:
            completion = await client.generate(
                token_ids=PROMPT,
                max_tokens=NUM_TOKENS,
                temperature=case.temperature,
                seed=seed + index,
                max_draft_tokens=3,
                **case.options,  # type: ignore[arg-type]
            )
        return list(completion.token_ids), [token.origin for token in completion.tokens]

    return await asyncio.gather(*(one(index) for index in range(num_requests)))


def tiny_cluster(
    tiny_pair: tuple[Path, Path], log_directory: Path, *, max_draft_tokens: int | None = None
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
            log_level="WARNING",
            verifier_flags=VERIFIER_FLAGS,
            drafter_flags=DRAFTER_FLAGS,
        )
    )


@pytest.mark.slow
async def test_tokens_are_distributed_as_the_target_alone_would(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Catches any error in q, in the acceptance test, in the residual and in their random numbers."""
    target, _ = tiny_pair
    failures = []
    async with tiny_cluster(tiny_pair, tmp_path) as cluster, AsyncClient(cluster.address) as client:
        for number, case in enumerate(CASES):
            outputs = await sample(client, case, NUM_REQUESTS, seed=1_000_000 * number)
            origins = Counter(origin for _, found in outputs for origin in found)
            # Without rejections and full acceptances the statistic would prove nothing.
            assert origins[TokenOrigin.RECOVERED] > NUM_REQUESTS / 20, f"{case.name}: {origins}"
            assert origins[TokenOrigin.BONUS] > NUM_REQUESTS / 20, f"{case.name}: {origins}"
            for position, expected in enumerate(exact_marginals(target, case)):
                counts = Counter(tokens[position] for tokens, _ in outputs)
                p = p_value(counts, expected, NUM_REQUESTS)
                if p < SIGNIFICANCE:
                    failures.append(f"{case.name}, position {position}: p = {p:.2g}")
    assert not failures


async def test_the_statistic_sees_a_wrong_temperature(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    """The check can fail: output sampled at temperature 1 is not that of temperature 0.85."""
    target, _ = tiny_pair
    async with tiny_cluster(tiny_pair, tmp_path) as cluster, AsyncClient(cluster.address) as client:
        outputs = await sample(client, CASES[0], NUM_REQUESTS, seed=7)
    expected = exact_marginals(target, Case("another temperature", 0.85, {}))
    p_values = [
        p_value(Counter(tokens[position] for tokens, _ in outputs), expected[position], NUM_REQUESTS)
        for position in range(NUM_CHECKED)
    ]
    assert min(p_values) < SIGNIFICANCE


async def test_the_same_seed_gives_the_same_tokens_in_any_company(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Catches random numbers that depend on the batch, the slot or the time."""

    async with tiny_cluster(tiny_pair, tmp_path) as cluster, AsyncClient(cluster.address) as client:

        async def generate(seed: int, prompt: list[int]) -> tuple[int, ...]:
            completion = await client.generate(token_ids=prompt, max_tokens=60, temperature=1.0, seed=seed)
            assert completion.speculation.num_accepted_tokens > 0
            return completion.token_ids

        alone = [await generate(seed, PROMPT) for seed in (11, 12, 13)]
        for seed, expected in zip((11, 12, 13), alone, strict=True):
            others = [generate(100 + index, PROMPT[: 1 + index % 5]) for index in range(8)]
            together = await asyncio.gather(generate(seed, PROMPT), *others)
            assert together[0] == expected
        assert len(set(alone)) == 3
