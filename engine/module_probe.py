"""Observe a model's modules: run it once on a few random tokens, keep every tensor that goes in and out, and compare.

A recording stands in for attention, so that no KV cache is needed and what a module hands to attention is seen as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from engine.attention import AttentionCall, PagedAttention

_NUM_PROBE_TOKENS = 7
# Largest relative error of a fused module, as a norm: it sums in another order and, in 16 bits, rounds less often.
_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}


class MismatchError(Exception):
    """A module is not what its structure promises; the message is the reason in the report."""


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module during the observed forward pass."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any

    @property
    def input(self) -> Any:
        """The hidden states, which come first or by name."""
        return self.args[0] if self.args else self.kwargs.get("hidden_states", self.kwargs.get("x"))

    def repeat(self, forward: Callable[..., Any], scale: float = 1.0, paged: PagedAttention | None = None) -> Any:
        """Call `forward` the same way, with the input scaled and another `paged`."""
        kwargs = dict(self.kwargs)
        if "paged" in kwargs:
            kwargs["paged"] = paged
        if self.args:
            return forward(self.args[0] * scale, *self.args[1:], **kwargs)
        name = "hidden_states" if "hidden_states" in kwargs else "x"
        kwargs[name] = kwargs[name] * scale
        return forward(**kwargs)


@dataclass(frozen=True)
class Observation:
    """What a model and its modules did on the random tokens."""

    logits: torch.Tensor  # [num_tokens, vocab_size]
    calls: dict[nn.Module, list[ModuleCall]]

    def only_call(self, module: nn.Module) -> ModuleCall:
        """The call of a module that runs once in a forward pass; raises `MismatchError` for others."""
        calls = self.calls[module]
        if len(calls) != 1:
            raise MismatchError(f"runs {len(calls)} times in one forward pass")
        return calls[0]


@dataclass
class RecordingAttention:
    """Stands in for attention: notes what it is given and mixes it, position by position, into an output."""

    calls: list[tuple[AttentionCall, torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def attend(
        self, call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:  # [num_tokens, num_heads, head_dim], as query
        self.calls.append((call, query, key, value))
        group_size = query.shape[1] // key.shape[1]
        key, value = (heads.repeat_interleave(group_size, dim=1) for heads in (key, value))
        return query + 0.5 * key - 0.25 * value


def probe_inputs(model: Any) -> dict[str, torch.Tensor]:
    """A few random tokens at positions from the first to the last that the model knows."""
    config = model.config.get_text_config(decoder=True)
    last = (getattr(config, "max_position_embeddings", None) or 512) - 1
    positions = [min(position, last) for position in (0, 1, 2, 5, last // 3, last // 2, last)]
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(config.vocab_size, (1, _NUM_PROBE_TOKENS), generator=generator)
    return {
        "input_ids": token_ids.to(model.device),
        "position_ids": torch.tensor([positions], device=model.device),
    }


def probe_logits(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:  # [num_tokens, vocab_size]
    logits: torch.Tensor = model(**inputs, use_cache=False, paged=RecordingAttention()).logits[0]
    return logits


def observe(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> Observation:
    """Run the model once and keep what goes in and out of every module."""
    calls: dict[nn.Module, list[ModuleCall]] = {}

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        calls.setdefault(module, []).append(ModuleCall(args, kwargs, output))

    with ExitStack() as hooks:
        for module in model.modules():
            hooks.callback(module.register_forward_hook(keep, with_kwargs=True).remove)
        logits = probe_logits(model, inputs)
    return Observation(logits, calls)


def require_same(what: str, got: Any, expected: Any) -> None:
    """Raise `MismatchError` where the two differ by more than rounding explains."""
    if not isinstance(expected, torch.Tensor) or not isinstance(got, torch.Tensor):
        raise MismatchError(f"{what} is no tensor")
    problem = difference(got, expected)
    if problem is not None:
        raise MismatchError(f"{what}: {problem}")


def difference(got: torch.Tensor, expected: torch.Tensor, factor: float = 1.0) -> str | None:
    """How the two differ by more than rounding explains, in words, or None."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return f"{tuple(got.shape)} of {got.dtype} instead of {tuple(expected.shape)} of {expected.dtype}"
    tolerance = factor * _TOLERANCES[expected.dtype]
    error = relative_error(got, expected)
    return (
        None if error <= tolerance else f"differs by {error:.1e} from the unfused, at most {tolerance:.1e} is allowed"
    )


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference in terms of the norm of what is expected."""
    got, expected = got.double(), expected.double()
    return float((got - expected).norm() / expected.norm().clamp_min(1e-30))
