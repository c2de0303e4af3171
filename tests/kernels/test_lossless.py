"""Speculative sampling is lossless: chi-squared tests against the target's own distribution, and bugs they catch.

The model is a table: the logits at a position depend on the token before it, so that whole sequences can be generated
over several verify steps, 200,000 at a time, and their joint distribution is known.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypedDict

import numpy as np
import pytest
import torch
from scipy import stats

from kernels import rejection_sample_reference
from kernels.draft_sample import DraftSample, draft_sample
from kernels.limits import WEIGHT_TOTAL
from kernels.penalties import PenalizedSequence, Penalties, TokenHistory
from kernels.random import Purpose, keyed_words, random_words, target_exponentials
from kernels.rejection_sample import RejectionSample, rejection_sample
from tests.kernels.sampling_cases import shaped_probabilities

VOCAB_SIZE = 16
NUM_TRIALS = 200_000
START = 5
ALMOST_NEVER = 1e-6

Array = np.ndarray[Any, Any]


class Filters(TypedDict):
    """What cuts a distribution, a tensor [batch] each."""

    top_k: torch.Tensor | None
    top_p: torch.Tensor | None
    min_p: torch.Tensor | None


@dataclass(frozen=True)
class Setting:
    """A target, a drafter and how both sample."""

    target: torch.Tensor  # [vocab_size, vocab_size]: logits by the token before
    draft: torch.Tensor  # [vocab_size, vocab_size]
    num_draft_tokens: int = 3
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    is_one_hot: bool = False
    is_coupled: bool = False

    def probabilities(self) -> Array:  # [vocab_size, vocab_size]
        return shaped_probabilities(self.target.numpy(), self.temperature, self.top_k, self.top_p, self.min_p)

    def drafter(self, temperature: float | None = None) -> DraftSample:
        """q by the token before, its weights all the drafter's business: it does not filter."""
        n = len(self.draft)
        zeros = torch.zeros(n, dtype=torch.int64)
        heat = 0.0 if self.is_one_hot else temperature or self.temperature
        return draft_sample(self.draft, torch.full((n,), heat), zeros, zeros, num_candidates=VOCAB_SIZE)

    def filters(self, n: int, device: torch.device) -> Filters:
        return {
            "top_k": torch.full((n,), self.top_k, dtype=torch.int32, device=device) if self.top_k else None,
            "top_p": torch.full((n,), self.top_p, device=device) if self.top_p < 1 else None,
            "min_p": torch.full((n,), self.min_p, device=device) if self.min_p > 0 else None,
        }


def table(seed: int, scale: float = 1.5) -> torch.Tensor:
    return scale * torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))


SETTINGS = {
    "opposed": Setting(table(1), -table(1)),
    "cool, top-k, top-p": Setting(table(2), table(2) + table(3, 0.7), temperature=0.7, top_k=9, top_p=0.9),
    "warm, min-p": Setting(table(4), table(4) + table(5, 0.5), temperature=1.3, min_p=0.08),
    "one-hot": Setting(table(6), table(6) + table(7, 0.5), num_draft_tokens=2, is_one_hot=True),
    "plain": Setting(table(8), table(8), num_draft_tokens=0, temperature=0.8, top_p=0.95),
    "coupled, opposed": Setting(table(1), -table(1), is_coupled=True),
    "coupled, top-k, top-p": Setting(
        table(2), table(2) + table(3, 0.7), temperature=0.7, top_k=9, top_p=0.9, is_coupled=True
    ),
}


def generate(
    setting: Setting,
    num_tokens: int,
    device: torch.device,
    *,
    num_trials: int = NUM_TRIALS,
    reported: DraftSample | None = None,
    draws_with_target_noise: bool = False,
) -> tuple[torch.Tensor, list[int]]:  # [num_trials, num_tokens], accepted counts
    """Tokens behind START of many sequences, and how many draft tokens the first step accepted of each.

    Two bugs can be planted: the verifier is told the q of `reported` instead of the one that the tokens were drawn
    from; tokens that are tested by p and q are drawn with TARGET noise.
    """
    k = setting.num_draft_tokens
    target = setting.target.to(device)
    q = setting.drafter()
    told = reported or q
    ids, weights = q.candidate_ids.to(device), q.candidate_weights.to(device)
    told_ids, told_weights = told.candidate_ids.to(device), told.candidate_weights.to(device)
    ends = weights.cumsum(dim=1)
    tokens = torch.full((num_trials, num_tokens + k + 1), -1, dtype=torch.int64, device=device)
    tokens[:, 0] = START
    lengths = torch.ones(num_trials, dtype=torch.int64, device=device)
    seeds = torch.arange(num_trials, device=device) * 977 - 2**62
    first_accepted: list[int] = []
    while True:
        alive = torch.nonzero(lengths <= num_tokens).squeeze(1)
        n = len(alive)
        if n == 0:
            return tokens[:, 1 : num_tokens + 1], first_accepted
        before = [tokens[alive, lengths[alive] - 1]]
        for step in range(k):
            if setting.is_coupled or draws_with_target_noise:
                logits = setting.draft.to(device)[before[-1]] / setting.temperature
                before.append(drawn_with_target_noise(logits, seeds[alive], lengths[alive] + step))
                continue
            # What draft_sample does with these weights and this noise, of which test_draft_sample makes sure.
            draws = random_words(seeds[alive], lengths[alive] + step, Purpose.DRAFT)[:, :1] >> 16
            places = (ends[before[-1]] <= draws).sum(dim=1).clamp_max_(VOCAB_SIZE - 1)
            places[ends[before[-1], -1] == 0] = 0
            before.append(ids[before[-1], places].long())
        prefix = torch.stack(before, dim=1)  # [n, k + 1]
        output = rejection_sample(
            target[prefix].view(n * (k + 1), VOCAB_SIZE),
            torch.arange(n + 1, dtype=torch.int32, device=device) * k,
            prefix[:, 1:].reshape(-1).int(),
            told_ids[prefix[:, :-1]].reshape(n * k, VOCAB_SIZE),
            told_weights[prefix[:, :-1]].reshape(n * k, VOCAB_SIZE),
            torch.full((n,), setting.temperature, device=device),
            seeds[alive],
            lengths[alive],
            max_num_draft_tokens=k,
            is_coupled=torch.full((n,), int(setting.is_coupled), dtype=torch.int32, device=device),
            **setting.filters(n, device),
        )
        first_accepted = first_accepted or output.num_accepted.tolist()
        for step in range(k + 1):
            emits = output.num_accepted >= step
            tokens[alive[emits], lengths[alive[emits]] + step] = output.token_ids[emits, step].long()
        lengths[alive] += output.num_accepted + 1


def drawn_with_target_noise(
    logits: torch.Tensor,  # [n, VOCAB_SIZE], over temperature
    seeds: torch.Tensor,  # [n] int64
    positions: torch.Tensor,  # [n] int64
) -> torch.Tensor:  # [n] int64
    """The best of log q + g."""
    noise = target_exponentials(seeds.cpu(), positions.cpu(), VOCAB_SIZE).to(logits.device)
    return (logits - noise.log()).argmax(dim=1)


def chi_squared(outcomes: torch.Tensor, probabilities: Array) -> tuple[float, float]:
    """The statistic, and the limit that it passes once in a million times. Rare outcomes share a bin."""
    observed = np.bincount(outcomes.cpu().numpy(), minlength=probabilities.size).astype(np.float64)
    expected = probabilities.reshape(-1) * observed.sum()
    assert observed[expected == 0].sum() == 0, "an impossible token was emitted"
    is_rare = expected < 10
    observed = np.append(observed[~is_rare], observed[is_rare].sum())
    expected = np.append(expected[~is_rare], expected[is_rare].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    return float(((observed - expected) ** 2 / expected).sum()), float(stats.chi2.isf(ALMOST_NEVER, len(expected) - 1))


def worst_ratio(setting: Setting, tokens: torch.Tensor) -> float:
    """The largest statistic as a share of its limit: each position, and each pair of neighbours."""
    p = setting.probabilities()
    marginal = np.eye(VOCAB_SIZE)[START]
    ratios = []
    for position in range(tokens.shape[1]):
        pairs = marginal[:, None] * p
        marginal = pairs.sum(axis=0)
        ratios.append(np.divide(*chi_squared(tokens[:, position], marginal)))
        if position:
            neighbours = tokens[:, position - 1] * VOCAB_SIZE + tokens[:, position]
            ratios.append(np.divide(*chi_squared(neighbours, pairs)))
    return float(max(ratios))


@pytest.mark.parametrize("name", SETTINGS)
def test_output_is_distributed_as_the_target(device: torch.device, name: str) -> None:
    """Catches errors in acceptance, residual, bonus or filters that shift a probability by about one part in 100."""
    setting = SETTINGS[name]
    tokens, accepted = generate(setting, 3, device)
    assert worst_ratio(setting, tokens) < 1
    assert {0, setting.num_draft_tokens} <= set(accepted)  # both rejections and full acceptances happened


@pytest.mark.parametrize("name", ["coupled, opposed", "coupled, top-k, top-p"])
def test_coupled_output_is_the_plain_one(device: torch.device, name: str) -> None:
    """Token for token, whatever the drafter does."""
    setting = SETTINGS[name]
    plain = replace(setting, num_draft_tokens=0, is_coupled=False)
    expected, _ = generate(plain, 5, device, num_trials=5000)
    for draft in (setting.draft, torch.zeros_like(setting.draft)):
        tokens, accepted = generate(replace(setting, draft=draft), 5, device, num_trials=5000)
        assert torch.equal(tokens, expected)
        assert {0, setting.num_draft_tokens} <= set(accepted)


def test_each_branch_has_its_distribution(device: torch.device) -> None:
    """Recovered tokens follow the positive part of p - q, bonus tokens p behind the draft: errors of one branch that
    the others would water down."""
    setting = replace(SETTINGS["opposed"], num_draft_tokens=1)
    tokens, accepted = generate(setting, 2, device)
    q = setting.drafter()
    row = np.zeros(VOCAB_SIZE)
    row[q.candidate_ids[START].numpy()] = q.candidate_weights[START].numpy() / WEIGHT_TOTAL
    p = setting.probabilities()
    is_accepted = torch.tensor(accepted) == 1
    residual = np.maximum(p[START] - row, 0)
    statistic, limit = chi_squared(tokens.cpu()[~is_accepted, 0], residual / residual.sum())
    assert statistic < limit
    overlap = np.minimum(p[START], row)
    pairs = tokens.cpu()[is_accepted, 0] * VOCAB_SIZE + tokens.cpu()[is_accepted, 1]
    statistic, limit = chi_squared(pairs, overlap[:, None] / overlap.sum() * p)
    assert statistic < limit


def test_catches_recovery_from_the_drafts_own_noise(device: torch.device) -> None:
    """Planted bug: TARGET noise draws the draft token that p and q test, and what is recovered in its place."""
    setting = SETTINGS["opposed"]
    tokens, _ = generate(setting, 1, device, num_trials=NUM_TRIALS // 4, draws_with_target_noise=True)
    assert worst_ratio(setting, tokens) > 5


def test_catches_acceptance_by_the_drafts_own_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bug: the test of p and q reuses the noise that drew the draft token."""

    def words(seeds: torch.Tensor, positions: torch.Tensor, purpose: Purpose) -> torch.Tensor:
        return keyed_words(seeds, positions, Purpose.DRAFT if purpose == Purpose.ACCEPT else purpose)

    monkeypatch.setattr(rejection_sample_reference, "keyed_words", words)
    setting = SETTINGS["opposed"]
    tokens, _ = generate(setting, 1, torch.device("cpu"), num_trials=NUM_TRIALS // 4)
    assert worst_ratio(setting, tokens) > 5


def test_catches_a_q_that_was_not_sampled_from(device: torch.device) -> None:
    """Planted bug: the verifier is told the draft's distribution at another temperature."""
    setting = SETTINGS["warm, min-p"]
    tokens, _ = generate(setting, 1, device, num_trials=NUM_TRIALS // 4, reported=setting.drafter(2.0))
    assert worst_ratio(setting, tokens) > 5


def test_catches_a_flattened_q(device: torch.device) -> None:
    """Planted bug: the verifier is told a uniform q, as if the drafter's weights had been lost on the way."""
    setting = SETTINGS["opposed"]
    q = setting.drafter()
    flat = DraftSample(q.token_ids, q.candidate_ids, torch.full_like(q.candidate_weights, WEIGHT_TOTAL // VOCAB_SIZE))
    tokens, _ = generate(setting, 1, device, num_trials=NUM_TRIALS // 4, reported=flat)
    assert worst_ratio(setting, tokens) > 5


def test_acceptance_rate_is_the_overlap(device: torch.device) -> None:
    """A draft token is accepted with probability sum(min(p, q)): less would be lossless too, but slow."""
    for name in ("opposed", "warm, min-p"):
        setting = SETTINGS[name]
        q = setting.drafter()
        row = np.zeros(VOCAB_SIZE)
        row[q.candidate_ids[START].numpy()] = q.candidate_weights[START].numpy() / WEIGHT_TOTAL
        expected = np.minimum(setting.probabilities()[START], row).sum()
        _, accepted = generate(setting, 1, device)
        rate = np.mean(np.array(accepted) > 0)
        assert abs(rate - expected) < 5 * (expected * (1 - expected) / NUM_TRIALS) ** 0.5


def test_ragged_batch_of_greedy_random_and_coupled_sequences(device: torch.device) -> None:
    """0 to 3 drafts and neighbours of other kinds: a random sequence's first token follows p, a greedy one's is argmax.

    Coupled and tested ones differ in which token of p it is.
    """
    n = NUM_TRIALS
    setting = SETTINGS["opposed"]
    num_draft = torch.arange(n) % 4
    is_greedy = torch.arange(n) % 3 == 0
    is_coupled = (torch.arange(n) % 5 < 2).int()
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), num_draft.cumsum(0)]).int()
    total = int(cu[-1])
    sequences = torch.arange(n).repeat_interleave(num_draft)
    steps = torch.arange(total) - cu[sequences]
    drafts = draft_sample(
        setting.draft[START].expand(total, -1),
        torch.where(is_greedy[sequences], 0.0, 1.0),
        sequences,
        steps + 9,
        num_candidates=VOCAB_SIZE,
        is_coupled=is_coupled[sequences],
    )
    output = rejection_sample(
        setting.target[START].expand(total + n, -1).to(device),
        cu.to(device),
        drafts.token_ids.to(device),
        drafts.candidate_ids.to(device),
        drafts.candidate_weights.to(device),
        torch.where(is_greedy, 0.0, 1.0).to(device),
        torch.arange(n, device=device),
        torch.full((n,), 9, device=device),
        max_num_draft_tokens=3,
        is_coupled=is_coupled.to(device),
    )
    first = output.token_ids[:, 0].cpu()
    assert bool((first[is_greedy] == int(setting.target[START].argmax())).all())
    own = drawn_with_target_noise(setting.target[START].expand(n, -1), torch.arange(n), torch.full((n,), 9))
    for count in range(4):
        for coupled in (0, 1):
            is_chosen = ~is_greedy & (num_draft == count) & (is_coupled == coupled)
            statistic, limit = chi_squared(first[is_chosen], setting.probabilities()[START])
            assert statistic < limit
            share = float((first[is_chosen] == own[is_chosen]).float().mean())
            assert (share > 0.9999) == (coupled == 1 or count == 0)


@pytest.mark.parametrize("is_coupled", [0, 1])
def test_wide_vocabulary_over_several_blocks(device: torch.device, is_coupled: int) -> None:
    """9,000 tokens in three blocks, of which 64 candidates of q cover a part: the best of the blocks follows p."""
    vocab_size, n, rounds = 9000, 2000, 8
    generator = torch.Generator().manual_seed(8)
    target = 2 * torch.randn(vocab_size, generator=generator)
    target[:20] += 5
    draft = target + 0.5 * torch.randn(vocab_size, generator=generator)
    bins = torch.randint(0, 30, (vocab_size,), generator=generator) + 30 * (torch.arange(vocab_size) // 4096)
    firsts, accepted = [], 0
    for turn in range(rounds):
        seeds = torch.arange(n, device=device) + turn * n
        positions = torch.full((n,), 70, device=device)
        coupling = torch.full((n,), is_coupled, dtype=torch.int32, device=device)
        drafts = draft_sample(
            draft.to(device).expand(n, -1),
            torch.ones(n, device=device),
            seeds,
            positions,
            num_candidates=64,
            is_coupled=coupling,
        )
        output = rejection_sample(
            target.to(device).expand(2 * n, -1),
            torch.arange(n + 1, dtype=torch.int32, device=device),
            drafts.token_ids,
            drafts.candidate_ids,
            drafts.candidate_weights,
            torch.ones(n, device=device),
            seeds,
            positions,
            max_num_draft_tokens=1,
            is_coupled=coupling,
        )
        firsts.append(output.token_ids[:, 0].long().cpu())
        accepted += int(output.num_accepted.sum())
    assert 0.2 < accepted / (n * rounds) < 0.9
    first = torch.cat(firsts)
    p = shaped_probabilities(target[None].numpy(), 1.0)[0]
    statistic, limit = chi_squared(bins[first], np.bincount(bins.numpy(), weights=p))
    assert statistic < limit
    head = torch.where(first < 20, first, 20)
    statistic, limit = chi_squared(head, np.append(p[:20], p[20:].sum()))
    assert statistic < limit


@pytest.mark.parametrize("is_coupled", [0, 1])
def test_penalties_count_the_accepted_drafts(device: torch.device, is_coupled: int) -> None:
    """The second token's distribution depends on the first through its presence penalty, accepted or recovered."""
    n, presence, repetition = 20_000, 1.2, 1.5
    setting = SETTINGS["warm, min-p"]
    logits = setting.target[START]
    prompt = [2, 11]

    def step(histories: list[TokenHistory], position: int, num_draft: int) -> RejectionSample:
        count = len(histories)
        cu = np.arange(count + 1) * num_draft
        seeds = torch.arange(count) * 31 + position
        drafts = draft_sample(
            setting.draft[START].expand(count * num_draft, -1),
            torch.ones(count * num_draft),
            seeds.repeat_interleave(num_draft),
            torch.arange(num_draft).repeat(count) + position,
            num_candidates=VOCAB_SIZE,
            is_coupled=torch.full((count * num_draft,), is_coupled, dtype=torch.int32),
        )
        sequences = [
            PenalizedSequence(index, history, presence_penalty=presence, repetition_penalty=repetition)
            for index, history in enumerate(histories)
        ]
        return rejection_sample(
            logits.expand(count * (num_draft + 1), -1).to(device),
            torch.from_numpy(cu).int().to(device),
            drafts.token_ids.to(device),
            drafts.candidate_ids.to(device),
            drafts.candidate_weights.to(device),
            torch.ones(count, device=device),
            seeds.to(device),
            torch.full((count,), position, device=device),
            max_num_draft_tokens=num_draft,
            is_coupled=torch.full((count,), is_coupled, dtype=torch.int32, device=device),
            penalties=Penalties.build(sequences, cu, drafts.token_ids.numpy(), device),
        )

    output = step([TokenHistory(prompt) for _ in range(n)], 3, 1)
    first = output.token_ids[:, 0].cpu().long()
    second = output.token_ids[:, 1].cpu().long()
    missing = second < 0
    assert 0 < int(missing.sum()) < n
    later = step([TokenHistory(prompt, [token]) for token in first[missing].tolist()], 4, 1)
    second[missing] = later.token_ids[:, 0].cpu().long()

    def penalized(output_ids: list[int]) -> Array:
        row = logits.numpy().astype(np.float64)
        for token in {*prompt, *output_ids}:
            row[token] = row[token] / repetition if row[token] > 0 else row[token] * repetition
        row[list(set(output_ids))] -= presence
        p: Array = shaped_probabilities(row[None], 1.0)[0]
        return p

    p_first = penalized([])
    joint = np.stack([p_first[token] * penalized([token]) for token in range(VOCAB_SIZE)])
    statistic, limit = chi_squared(first * VOCAB_SIZE + second, joint)
    assert statistic < limit
