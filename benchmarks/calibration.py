"""How alike two models are on text that the target writes, and the search for the weights that make them so."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.pair_weights import Pair
from kernels.limits import NUM_CANDIDATES

_CANDIDATES = (NUM_CANDIDATES // 2, NUM_CANDIDATES, 2 * NUM_CANDIDATES)
_CHUNK_BYTES = 1 << 29  # of float32 logits at a time


@dataclass(frozen=True)
class Contexts:
    """What the models are compared on: random prompts, each followed by tokens that the target itself sampled."""

    num_prompts: int
    num_prompt_tokens: int
    num_sampled_tokens: int

    def draw(self, target: Any, seed: int) -> torch.Tensor:  # [num_prompts, all tokens] int64
        """Fresh contexts: the target continues random prompts at temperature 1."""
        device, vocab_size = target.device, target.config.vocab_size
        generator = torch.Generator(device).manual_seed(seed)
        shape = (self.num_prompts, self.num_prompt_tokens)
        prompts = torch.randint(vocab_size, shape, generator=generator, device=device)
        return sample_continuations(target, prompts, self.num_sampled_tokens, generator)


@dataclass(frozen=True)
class Agreement:
    """What was measured, as means over positions, at temperature 1."""

    agreement: float  # sum over the vocabulary of min(p, q)
    greedy_agreement: float  # share of positions where both have the same most likely token
    target_entropy: float  # nats
    drafter_entropy: float  # nats
    candidate_agreement: dict[str, float]  # as agreement, with q cut to so many candidates, as it travels on the wire
    num_positions: int

    def expected_acceptance_length(self, num_draft_tokens: int) -> float:
        """Tokens a step with the candidates that the drafter keeps by default, were each draft token accepted with the
        same probability whatever came before."""
        rate = self.candidate_agreement[str(NUM_CANDIDATES)]
        return sum(rate**power for power in range(num_draft_tokens + 1))


@torch.inference_mode()
def sample_continuations(
    target: Any,
    prompts: torch.Tensor,  # [batch, num_prompt_tokens] int64
    num_tokens: int,
    generator: torch.Generator,
) -> torch.Tensor:  # [batch, num_prompt_tokens + num_tokens] int64
    """Text that the target writes at temperature 1."""
    from transformers import DynamicCache

    cache = DynamicCache(config=target.config)
    columns = [prompts]
    for _ in range(num_tokens):
        logits = target(input_ids=columns[-1], past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        probabilities = logits[:, -1].float().softmax(-1)
        columns.append(torch.multinomial(probabilities, 1, generator=generator))
    return torch.cat(columns, dim=1)


@torch.inference_mode()
def measure(pair: Pair, token_ids: torch.Tensor, num_sampled_tokens: int) -> Agreement:
    """Compare target and drafter at the last `num_sampled_tokens` positions of contexts [batch, num_tokens]."""
    target_states = _last_states(pair.target, token_ids, num_sampled_tokens)
    drafter_states = _last_states(pair.drafter, token_ids, num_sampled_tokens)
    head = pair.target.lm_head
    sums = torch.zeros(4, dtype=torch.float64, device=token_ids.device)
    candidate_sums = torch.zeros(len(_CANDIDATES), dtype=torch.float64, device=token_ids.device)
    for rows in _chunks(len(target_states), head.weight.shape[0]):
        p = head(target_states[rows]).float().softmax(-1)
        q = head(drafter_states[rows]).float().softmax(-1)
        sums += torch.stack(
            [
                torch.minimum(p, q).sum(),
                (p.argmax(1) == q.argmax(1)).sum(),
                torch.special.entr(p).sum(),
                torch.special.entr(q).sum(),
            ]
        ).double()
        top = q.topk(min(_CANDIDATES[-1], q.shape[1]), dim=1)
        top_p = p.gather(1, top.indices)
        candidate_sums += torch.stack(
            [
                torch.minimum(top_p[:, :m], top.values[:, :m] / top.values[:, :m].sum(dim=1, keepdim=True)).sum()
                for m in _CANDIDATES
            ]
        ).double()
    agreement, greedy_agreement, target_entropy, drafter_entropy = (sums / len(target_states)).tolist()
    candidate_means = (candidate_sums / len(target_states)).tolist()
    return Agreement(
        agreement=agreement,
        greedy_agreement=greedy_agreement,
        target_entropy=target_entropy,
        drafter_entropy=drafter_entropy,
        candidate_agreement={str(m): mean for m, mean in zip(_CANDIDATES, candidate_means, strict=True)},
        num_positions=len(target_states),
    )


def calibrate(
    pair: Pair,
    *,
    agreement: float,
    entropy: float,
    contexts: Contexts,
    seed: int,
    num_rounds: int,
    report: Callable[[str], None],
) -> tuple[float, float]:
    """Search the damping of the deeper layers and the scale of the final norm: (damping, norm scale).

    Text depends on both, so each round writes new contexts with what the last one found.
    """
    dtype = pair.shape.target.dtype
    damping, scale = 0.1, _representable(_gaussian_scale(entropy, pair.shape.target.vocab_size), dtype)
    low, high = 1e-3, 2.0
    for number in range(num_rounds):
        pair.set_norm_scale(scale)
        with damped(pair, damping) as set_damping:
            token_ids = contexts.draw(pair.target, seed + number)
            states = _last_states(pair.target, token_ids, contexts.num_sampled_tokens) / scale

            def entropy_at(candidate: float, unscaled: torch.Tensor = states) -> float:
                return _entropy(pair.target.lm_head, unscaled * candidate)

            scale = _representable(_bisect(entropy_at, entropy, scale / 4, scale * 4, num_steps=14), dtype)
            pair.set_norm_scale(scale)

            def agreement_at(
                candidate: float, ids: torch.Tensor = token_ids, apply: Callable[[float], None] = set_damping
            ) -> float:
                apply(candidate)
                return measure(pair, ids, contexts.num_sampled_tokens).agreement

            damping = _bisect(agreement_at, agreement, low, high, num_steps=9)
            low, high = damping / 1.5, damping * 1.5
        report(f"round {number + 1} of {num_rounds}: damping {damping:.5f}, norm scale {scale:.4f}")
    return damping, scale


@contextmanager
def damped(pair: Pair, damping: float) -> Iterator[Callable[[float], None]]:
    """Act as if the deeper layers' output projections were damped; yields what changes the damping."""
    factor = damping

    def scale_output(_module: torch.nn.Module, _inputs: object, output: torch.Tensor) -> torch.Tensor:
        return output * factor

    def set_damping(value: float) -> None:
        nonlocal factor
        factor = value

    handles = [module.register_forward_hook(scale_output) for module in pair.deep_outputs]
    try:
        yield set_damping
    finally:
        for handle in handles:
            handle.remove()


def _representable(value: float, dtype: torch.dtype) -> float:
    """What a weight that is filled with the value holds."""
    return float(torch.tensor(value, dtype=dtype))


def _gaussian_scale(entropy: float, vocab_size: int) -> float:
    """A first guess: independent normal logits of deviation s have entropy ln(vocabulary) - s * s / 2."""
    return math.sqrt(max(2 * (math.log(vocab_size) - entropy), 0.1)) / 1.28


@torch.inference_mode()
def _entropy(head: torch.nn.Linear, states: torch.Tensor) -> float:
    """Mean entropy in nats of what the head makes of states [num_positions, hidden_size]."""
    total = 0.0
    for rows in _chunks(len(states), head.out_features):
        total += float(torch.special.entr(head(states[rows]).float().softmax(-1)).sum())
    return total / len(states)


@torch.inference_mode()
def _last_states(model: Any, token_ids: torch.Tensor, num_last: int) -> torch.Tensor:  # [batch * num_last, hidden]
    """What the head sees at the positions that decide the last `num_last` tokens, normed."""
    states: torch.Tensor = model.model(input_ids=token_ids, use_cache=False).last_hidden_state
    return states[:, -num_last - 1 : -1].flatten(0, 1)


def _chunks(num_rows: int, vocab_size: int) -> Iterator[slice]:
    step = max(1, _CHUNK_BYTES // (4 * vocab_size))
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def _bisect(function: Callable[[float], float], wanted: float, low: float, high: float, *, num_steps: int) -> float:
    """Where a falling function of a positive number takes the value, by bisection of the logarithm."""
    for _ in range(num_steps):
        middle = math.sqrt(low * high)
        if function(middle) > wanted:
            low = middle
        else:
            high = middle
    return math.sqrt(low * high)
