"""Fuse the modules of a loaded model by structure, and keep only what computes the same.

Nothing here knows an architecture. The model is run once on a few random tokens (`engine.module_probe`), its modules
are recognised by what they are made of and by what they did (`engine.module_recognition`), and a fused module takes
over only after it gave the same output for the same input. What does not fit stays as it was and is named in the
report, with the reason; where the whole model's logits differ, everything is undone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from engine.fused_modules import FusedAttention, FusedLayer, FusedMLP, FusedNorm, FusedRotaryEmbedding
from engine.module_probe import MismatchError, Observation, difference, observe, probe_inputs, probe_logits
from engine.module_recognition import (
    has_hooks,
    looks_like_attention,
    looks_like_mlp,
    looks_like_norm,
    looks_like_rotary_embedding,
    recognise_attention,
    recognise_layer,
    recognise_mlp,
    recognise_norm,
    recognise_rotary_embedding,
)
from kernels.rms_norm import NormParameters

_logger = logging.getLogger(__name__)

# Errors of the layers add up over the model.
_MODEL_TOLERANCE_FACTOR = 10.0


@dataclass(frozen=True)
class LeftAlone:
    """A module that was not fused."""

    module: str  # its name in the model
    reason: str


@dataclass(frozen=True)
class FusionReport:
    """What `fuse` did, by the modules' names; a module inside a fused one is not named again."""

    layers: tuple[str, ...]  # whole decoder layers
    attentions: tuple[str, ...]
    mlps: tuple[str, ...]
    norms: tuple[str, ...]
    rotary_embeddings: tuple[str, ...]
    left_alone: tuple[LeftAlone, ...]

    @property
    def is_complete(self) -> bool:
        """Whether nothing was left alone."""
        return not self.left_alone

    def __str__(self) -> str:
        counts = (
            (len(self.layers), "decoder layers"),
            (len(self.attentions), "attentions"),
            (len(self.mlps), "MLPs"),
            (len(self.norms), "norms"),
            (len(self.rotary_embeddings), "rotary embeddings"),
        )
        fused = ", ".join(f"{count} {kind}" for count, kind in counts if count) or "nothing"
        # Layers of a model usually fail alike: one line for each reason.
        reasons: dict[str, list[str]] = {}
        for left in self.left_alone:
            reasons.setdefault(left.reason, []).append(left.module)
        alone = "; ".join(
            f"{modules[0]}{f' and {len(modules) - 1} more' if len(modules) > 1 else ''}: {reason}"
            for reason, modules in reasons.items()
        )
        return f"fused {fused}" + (f"; left alone: {alone}" if alone else "")


@torch.no_grad()
def fuse(model: nn.Module) -> FusionReport:
    """Let fused modules take over in a causal language model of transformers, in place.

    The model is in evaluation mode on its final device, in float32, bfloat16 or float16, with attention plugged in by
    `engine.attention`, and was not fused before. Of the packed weights only one module's at a time is in memory twice.
    On a GPU this compiles kernels and waits for the device; what it installs does not. Raises what the model's own
    forward raises.
    """
    inputs = probe_inputs(model)
    observed = observe(model, inputs)
    fusion = _Fusion(model, observed)
    fusion.run()
    if fusion.has_fused:
        problem = difference(probe_logits(model, inputs), observed.logits, _MODEL_TOLERANCE_FACTOR)
        if problem is not None:
            fusion.undo(f"the whole model's logits: {problem}")
    report = fusion.report()
    _logger.info("%s: %s", type(model).__name__, report)
    return report


class _Fusion:
    """One model's fusion, from the parts to the whole."""

    def __init__(self, model: nn.Module, observed: Observation) -> None:
        self._model = model
        self._observed = observed
        self._names = {module: name for name, module in model.named_modules()}
        self._norms: dict[nn.Module, NormParameters] = {}
        self._attentions: dict[nn.Module, FusedAttention] = {}
        self._mlps: dict[nn.Module, FusedMLP] = {}
        self._layers: dict[nn.Module, FusedLayer] = {}
        self._rotary: dict[nn.Module, FusedRotaryEmbedding] = {}
        self._left_alone: dict[nn.Module, str] = {}

    @property
    def has_fused(self) -> bool:
        return any((self._norms, self._attentions, self._mlps, self._layers, self._rotary))

    def run(self) -> None:
        observed = self._observed
        modules = [module for module in self._names if module in observed.calls and not has_hooks(module)]
        self._recognise(modules, looks_like_norm, recognise_norm, self._norms)
        self._recognise(
            modules,
            looks_like_attention,
            lambda module: recognise_attention(module, observed, self._norms),
            self._attentions,
        )
        self._recognise(modules, looks_like_mlp, lambda module: recognise_mlp(module, observed), self._mlps)
        self._recognise(
            modules,
            lambda module: looks_like_rotary_embedding(module, observed),
            lambda module: recognise_rotary_embedding(module, observed),
            self._rotary,
        )
        decoder_layers = set(_decoder_layers(self._model))
        self._recognise(
            modules,
            decoder_layers.__contains__,
            lambda module: recognise_layer(module, observed, self._attentions, self._mlps, self._norms),
            self._layers,
        )
        self._forget_inner_modules()
        for fused in (self._attentions, self._mlps, self._layers, self._rotary):
            _install(fused)
        _install({module: FusedNorm(norm) for module, norm in self._norms.items()})

    def undo(self, reason: str) -> None:
        """Give the model its own modules back."""
        for fused in (self._norms, self._attentions, self._mlps, self._layers, self._rotary):
            for module in fused:
                del module.forward
                self._left_alone[module] = reason
            fused.clear()

    def report(self) -> FusionReport:
        def names(modules: Iterable[nn.Module]) -> tuple[str, ...]:
            return tuple(self._names[module] for module in modules)

        return FusionReport(
            layers=names(self._layers),
            attentions=names(self._attentions),
            mlps=names(self._mlps),
            norms=names(self._norms),
            rotary_embeddings=names(self._rotary),
            left_alone=tuple(LeftAlone(self._names[module], reason) for module, reason in self._left_alone.items()),
        )

    def _recognise(
        self,
        modules: Iterable[nn.Module],
        looks_right: Callable[[nn.Module], bool],
        build: Callable[[Any], Any],
        fused: dict[nn.Module, Any],
    ) -> None:
        for module in modules:
            if not looks_right(module):
                continue
            try:
                fused[module] = build(module)
            except MismatchError as mismatch:
                self._left_alone[module] = str(mismatch)
            # A module that others wrote goes wrong on a fused call in more ways than a list of types can name.
            except Exception as error:
                self._left_alone[module] = f"{type(error).__name__}: {error}"

    def _forget_inner_modules(self) -> None:
        """Leave out of the report, and as they are, the parts of what is fused as a whole."""
        for outer in (*self._layers, *self._attentions):
            for inner in outer.modules():
                if inner is outer:
                    continue
                self._attentions.pop(inner, None)
                self._mlps.pop(inner, None)
                self._norms.pop(inner, None)


def _install(fused: Mapping[nn.Module, Callable[..., Any]]) -> None:
    """Give each module a forward pass of its own, which hides its class's; `del module.forward` undoes it."""
    module: Any
    for module, forward in fused.items():
        module.forward = forward


def _decoder_layers(model: Any) -> Iterator[nn.Module]:
    num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            yield from module
