"""Prompts whose whole continuation is known, whatever it is decoded beside."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from outrider.v1 import common_pb2
from tests.services.reference import logprobs, shaped_greedy

# Where the two most likely tokens are nearer to each other, another order of summing could swap them.
MIN_MARGIN = 1e-3

PENALTIES: tuple[Mapping[str, Any], ...] = (
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.9, "frequency_penalty": 0.4},
    {"repetition_penalty": 0.8, "logit_bias": {5: 3.0, 7: -100.0}},
)
SAMPLINGS: tuple[Mapping[str, Any], ...] = (
    {"temperature": 1.0, "seed": 11},
    {"temperature": 0.7, "seed": 12, "top_p": 0.9},
    {"temperature": 1.3, "seed": 13, "top_k": 8, "presence_penalty": 0.5},
)


@dataclass(frozen=True)
class Answer:
    """What the target alone makes of a prompt, up to its last position or to the first near tie."""

    prompt: list[int]
    sampling: common_pb2.SamplingParameters
    token_ids: list[int]
    logprobs: torch.Tensor  # [len(prompt) + len(token_ids), vocab_size], each of the next token
    # Nothing of the first `min_tokens` is one of these, which end the sequence later.
    min_tokens: int = 0
    ending: frozenset[int] = frozenset()

    @property
    def text(self) -> list[int]:
        """Prompt and continuation."""
        return [*self.prompt, *self.token_ids]


# Prompt, sampling parameters and number of tokens to what one engine gives to this sequence alone.
DecodeAlone = Callable[[Sequence[int], common_pb2.SamplingParameters, int], list[int]]


def known_answers(path: Path, *, vocab_size: int, max_length: int, decode_alone: DecodeAlone) -> list[Answer]:
    """Answers for prompts of 1 to 40 tokens: greedy ones with and without penalties by transformers, some sampled."""
    chance = random.Random(3)
    prompts = [chance.choices(range(vocab_size), k=num) for num in (1, 2, 3, 5, 8, 13, 15, 16, 17, 21, 27, 33, 36, 40)]
    answers = [_greedy(path, prompt, {}, max_length) for prompt in prompts]
    for plain in answers[::4]:
        ending = frozenset(plain.token_ids[3:5])
        answers.append(_greedy(path, plain.prompt, {}, max_length, min_tokens=9, ending=ending))
    for index, penalties in enumerate(PENALTIES):
        answers += [_greedy(path, prompt, penalties, max_length) for prompt in prompts[index::4]]
    for index, fields in enumerate(SAMPLINGS):
        for prompt in prompts[1 + index :: 5]:
            sampling = common_pb2.SamplingParameters(**fields)
            tokens = decode_alone(prompt, sampling, max_length - len(prompt))
            answers.append(Answer(prompt, sampling, tokens, logprobs(path, [*prompt, *tokens])))
    return answers


def _greedy(
    path: Path,
    prompt: list[int],
    penalties: Mapping[str, Any],
    max_length: int,
    *,
    min_tokens: int = 0,
    ending: frozenset[int] = frozenset(),
) -> Answer:
    margins: list[float] = []

    def shape(logits: torch.Tensor, tokens: list[int]) -> torch.Tensor:
        shaped = penalized(logits, tokens, len(prompt), penalties)
        if len(tokens) < len(prompt) + min_tokens:
            shaped[list(ending)] = -torch.inf
        first, second = shaped.topk(2).values.tolist()
        margins.append(first - second)
        return shaped

    tokens = shaped_greedy(path, prompt, max_length - len(prompt), shape)
    end = next((index for index, margin in enumerate(margins) if margin < MIN_MARGIN), len(tokens))
    sampling = common_pb2.SamplingParameters(temperature=0.0, seed=0, **penalties)
    text = [*prompt, *tokens[:end]]
    return Answer(prompt, sampling, tokens[:end], logprobs(path, text), min_tokens, ending)


def penalized(
    logits: torch.Tensor,  # [vocab_size]
    tokens: list[int],
    num_prompt_tokens: int,
    penalties: Mapping[str, Any],
) -> torch.Tensor:  # [vocab_size]
    """Logits behind all tokens so far, as transformers and the definitions of OpenAI's penalties shape them."""
    so_far, scores = torch.tensor([tokens]), logits.clone().unsqueeze(0)
    if "repetition_penalty" in penalties:
        scores = RepetitionPenaltyLogitsProcessor(penalties["repetition_penalty"])(so_far, scores)
    counts = torch.bincount(torch.tensor(tokens[num_prompt_tokens:], dtype=torch.int64), minlength=len(logits))
    scores = scores - penalties.get("frequency_penalty", 0.0) * counts
    scores = scores - penalties.get("presence_penalty", 0.0) * (counts > 0)
    if bias := penalties.get("logit_bias"):
        biases = {(token,): value for token, value in bias.items()}
        scores = SequenceBiasLogitsProcessor(biases)(so_far, scores)  # type: ignore[arg-type]  # a dict will do
    shaped: torch.Tensor = scores[0]
    return shaped
