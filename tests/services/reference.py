"""What transformers makes of the target alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

# Logits of the next token and the sequence so far to the logits that are sampled from.
Shape = Callable[[torch.Tensor, list[int]], torch.Tensor]


@cache
def load_model(path: Path) -> PreTrainedModel:
    """A model in float32, as transformers runs it."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.train(False)
    return model


def disturbed(source: Path, path: Path, scale: float) -> Path:
    """A copy of a model whose weights are a little wrong: a drafter that is often right."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(scale * torch.randn_like(parameter))
    model.save_pretrained(path)
    return path


def prompts(count: int, *, vocab_size: int = 64, step: int = 7) -> list[list[int]]:
    """Random prompts of 3, 3 + step, 3 + 2 * step ... tokens."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, vocab_size, (3 + step * i,), generator=generator).tolist() for i in range(count)]


def greedy(path: Path, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What `generate(do_sample=False)` continues the prompt with, end of sequence ignored."""
    return list(_greedy(path, tuple(prompt), num_tokens))


@cache
@torch.inference_mode()
def _greedy(path: Path, prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    inputs = torch.tensor([list(prompt)])
    output = load_model(path).generate(  # type: ignore[operator]  # every causal language model has it
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return tuple(output[0, len(prompt) :].tolist())


@torch.inference_mode()
def shaped_greedy(path: Path, prompt: Sequence[int], num_tokens: int, shape: Shape) -> list[int]:
    """The most likely tokens after `shape` has had its way with the logits."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        logits = load_model(path)(torch.tensor([tokens])).logits[0, -1]
        tokens.append(int(shape(logits, tokens).argmax()))
    return tokens[len(prompt) :]


@torch.inference_mode()
def logprobs(path: Path, tokens: Sequence[int]) -> torch.Tensor:  # [len(tokens), vocab_size]
    """Log-probabilities of each next token."""
    logits: torch.Tensor = load_model(path)(torch.tensor([list(tokens)])).logits[0]
    return logits.log_softmax(dim=1)
