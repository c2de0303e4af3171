"""Fuse the modules of a loaded model by structure, and keep only what computes the same.

Nothing here knows an architecture. Modules are recognised by what they are made of (an RMSNorm has one weight,
attention has q_proj, k_proj, v_proj and o_proj, a gated MLP has gate_proj, up_proj and down_proj) and by what they do:
the model is run once on a few random tokens, every tensor that goes in and out of a module is kept, and a fused module
takes over only after it gave the same output for the same input. How the norms of a decoder layer are wired is read
from those tensors as well. What does not fit stays as it was and is named in the report, with the reason.

Weights that are read together are packed into one tensor, a module at a time. The original parameters become views of
it, so that nothing is held twice and an unfused module goes on working on the packed weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from engine.attention import AttentionCall, PagedAttention
from engine.fused_modules import (
    FusedAttention,
    FusedLayer,
    FusedMLP,
    FusedNorm,
    FusedRotaryEmbedding,
    PackedLinear,
)
from kernels.rms_norm import NormParameters, rms_norm_reference
from kernels.rotary import HeadNorms, rotary_cos_sin_reference
from kernels.silu_mul import Activation

_logger = logging.getLogger(__name__)

_QKV = ("q_proj", "k_proj", "v_proj")
_HEAD_NORMS = ("q_norm", "k_norm")
_GATE_UP = ("gate_proj", "up_proj")
_NUM_PROBE_TOKENS = 7
# Largest relative error of a fused module, as a norm: it sums in another order and, in 16 bits, rounds less often.
_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}
# Errors of the layers add up over the model.
_MODEL_TOLERANCE_FACTOR = 10.0
# Inputs so many times larger than the model's own bring out what clips or saturates.
_LARGE_INPUT = {torch.float32: 1e3, torch.bfloat16: 1e3, torch.float16: 8.0}


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
    inputs = _probe_inputs(model)
    observed = _observe(model, inputs)
    fusion = _Fusion(model, observed.calls)
    fusion.run()
    if fusion.has_fused:
        problem = _difference(_forward(model, inputs), observed.logits, _MODEL_TOLERANCE_FACTOR)
        if problem is not None:
            fusion.undo(f"the whole model's logits: {problem}")
    report = fusion.report()
    _logger.info("%s: %s", type(model).__name__, report)
    return report


@dataclass(frozen=True)
class _Call:
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
class _Observed:
    logits: torch.Tensor  # [num_tokens, vocab_size]
    calls: dict[nn.Module, list[_Call]]


@dataclass
class _RecordingAttention:
    """Stands in for attention: notes what it is given and mixes it, position by position, into an output."""

    calls: list[tuple[AttentionCall, torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def attend(
        self, call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:  # [num_tokens, num_heads, head_dim], as query
        self.calls.append((call, query, key, value))
        group_size = query.shape[1] // key.shape[1]
        key, value = (heads.repeat_interleave(group_size, dim=1) for heads in (key, value))
        return query + 0.5 * key - 0.25 * value


class _MismatchError(Exception):
    """A module is not what its structure promises; the message is the reason in the report."""


def _probe_inputs(model: Any) -> dict[str, torch.Tensor]:
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


def _forward(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:  # [num_tokens, vocab_size]
    logits: torch.Tensor = model(**inputs, use_cache=False, paged=_RecordingAttention()).logits[0]
    return logits


def _observe(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> _Observed:
    """Run the model once and keep what goes in and out of every module."""
    calls: dict[nn.Module, list[_Call]] = {}

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        calls.setdefault(module, []).append(_Call(args, kwargs, output))

    with ExitStack() as hooks:
        for module in model.modules():
            hooks.callback(module.register_forward_hook(keep, with_kwargs=True).remove)
        logits = _forward(model, inputs)
    return _Observed(logits, calls)


class _Fusion:
    """One model's fusion, from the parts to the whole."""

    def __init__(self, model: nn.Module, calls: Mapping[nn.Module, list[_Call]]) -> None:
        self._model = model
        self._calls = calls
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
        modules = [module for module in self._names if module in self._calls and not _has_hooks(module)]
        self._recognise(modules, _looks_like_norm, self._norm, self._norms)
        self._recognise(modules, _looks_like_attention, self._attention, self._attentions)
        self._recognise(modules, _looks_like_mlp, self._mlp, self._mlps)
        self._recognise(modules, self._looks_like_rotary, self._rotary_embedding, self._rotary)
        decoder_layers = set(_decoder_layers(self._model))
        self._recognise(modules, decoder_layers.__contains__, self._layer, self._layers)
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
            except _MismatchError as mismatch:
                self._left_alone[module] = str(mismatch)
            # A module that others wrote goes wrong on a fused call in more ways than a list of types can name.
            except Exception as error:
                self._left_alone[module] = f"{type(error).__name__}: {error}"

    def _norm(self, module: Any) -> NormParameters:
        eps = [value for name, value in vars(module).items() if "eps" in name and isinstance(value, float)]
        if len(eps) != 1:
            raise _MismatchError("a norm that does not tell its epsilon")
        dtype = module.weight.dtype
        generator = torch.Generator().manual_seed(0)
        # Rows from tiny, where epsilon matters, to large.
        rows = torch.randn(6, module.weight.shape[0], generator=generator) * torch.logspace(-4, 2, 6).unsqueeze(1)
        rows = rows.to(module.weight.device)
        if module(rows.to(dtype)).dtype != dtype:
            raise _MismatchError("a norm that returns another type than its input's")
        # float32 inputs tell more than the model's own type could.
        expected = module(rows).float()
        for weight in (module.weight.detach(), 1.0 + module.weight.detach().float()):
            norm = NormParameters(weight, eps[0])
            got = rms_norm_reference(rows, norm)
            if all(_relative_error(*pair) < 1e-4 for pair in zip(got, expected, strict=True)):
                return norm
        raise _MismatchError("looks like an RMSNorm and computes something else")

    def _attention(self, module: Any) -> FusedAttention:
        call = self._only_call(module)
        if not (isinstance(call.output, tuple) and len(call.output) == 2 and call.output[1] is None):
            raise _MismatchError("an attention module that returns more than its output")
        norms = None
        if "q_norm" in dict(module.named_children()):
            if module.q_norm not in self._norms or module.k_norm not in self._norms:
                raise _MismatchError("norms of queries and keys that are not RMSNorms")
            norms = HeadNorms(self._norms[module.q_norm], self._norms[module.k_norm])

        recording = _RecordingAttention()
        call.repeat(module, paged=recording)
        if len(recording.calls) != 1:
            raise _MismatchError(f"attends {len(recording.calls)} times in one forward pass")
        attention_call, query, key, value = recording.calls[0]
        num_heads, head_dim = query.shape[1:]
        num_kv_heads = key.shape[1]
        widths = (num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim)
        if key.shape != value.shape or tuple(getattr(module, name).out_features for name in _QKV) != widths:
            raise _MismatchError("queries, keys and values that are not the projections' heads")
        if norms is not None and not norms.query.weight.shape == norms.key.weight.shape == (head_dim,):
            raise _MismatchError("norms of queries and keys that are not over single heads")

        fused = FusedAttention(
            _pack([getattr(module, name) for name in _QKV]),
            module.o_proj,
            norms,
            num_heads,
            num_kv_heads,
            attention_call,
        )
        for scale in (1.0, _LARGE_INPUT[query.dtype]):
            expected, got = _RecordingAttention(), _RecordingAttention()
            expected_output = call.repeat(module, scale, expected)[0]
            output = call.repeat(fused, scale, got)[0]
            if expected.calls[0][0] != attention_call:
                raise _MismatchError("attention whose scale or window depends on its input")
            for name, tensor, expected_tensor in zip(
                ("queries", "keys", "values", "output"),
                (*got.calls[0][1:], output),
                (*expected.calls[0][1:], expected_output),
                strict=True,
            ):
                _require_same(f"attention's {name}", tensor, expected_tensor)
        return fused

    def _mlp(self, module: Any) -> FusedMLP:
        activation = _recognised_activation(module.act_fn, module.gate_proj.weight.device)
        fused = FusedMLP(_pack([getattr(module, name) for name in _GATE_UP]), module.down_proj, activation)
        call = self._calls[module][0]
        for scale in (1.0, _LARGE_INPUT[fused.down_proj.weight.dtype]):
            _require_same("the MLP's output", call.repeat(fused, scale), call.repeat(module, scale))
        return fused

    def _layer(self, module: Any) -> FusedLayer:
        call = self._only_call(module)
        children = list(module.children())
        attentions = [child for child in children if child in self._attentions]
        mlps = [child for child in children if child in self._mlps]
        norms = [child for child in children if child in self._norms]
        for kind, found in (("attention", attentions), ("gated MLP", mlps)):
            if len(found) != 1:
                raise _MismatchError(f"no {kind} that could be fused")
        attention_call, mlp_call = self._only_call(attentions[0]), self._only_call(mlps[0])
        norm_calls = {norm: self._only_call(norm) for norm in norms}
        attended = attention_call.output[0]

        def place(fits: Callable[[_Call], bool]) -> NormParameters | None:
            for norm, norm_call in list(norm_calls.items()):
                if fits(norm_call):
                    del norm_calls[norm]
                    return self._norms[norm]
            return None

        fused = FusedLayer(
            attention=self._attentions[attentions[0]],
            mlp=self._mlps[mlps[0]],
            attention_norm=place(lambda norm: norm.output is attention_call.input),
            attended_norm=place(lambda norm: norm.input is attended),
            mlp_norm=place(lambda norm: norm.output is mlp_call.input),
            output_norm=place(lambda norm: norm.input is mlp_call.output),
        )
        if norm_calls or any(
            next(child.parameters(), None) is not None
            for child in children
            if child not in (*attentions, *mlps, *norms)
        ):
            raise _MismatchError("a decoder layer with more parts than attention, MLP and the norms around them")
        # The stream is made as small as what the layer adds to it: beside a larger one, an error would not show.
        update = call.output - call.input
        scale = float(update.float().norm() / call.input.float().norm())
        if not scale > 0.0:
            raise _MismatchError("a decoder layer that adds nothing to its input")
        hidden = (call.input * scale).clone()
        small = replace(call, args=(hidden, *call.args[1:]))
        expected = small.repeat(module, paged=_RecordingAttention())
        _require_same("the decoder layer's output", small.repeat(fused, paged=_RecordingAttention()), expected)
        return fused

    def _looks_like_rotary(self, module: nn.Module) -> bool:
        output = self._calls[module][0].output
        return (
            isinstance(output, tuple)
            and len(output) == 2
            and all(isinstance(table, torch.Tensor) for table in output)
            and any(buffer.dim() == 1 for buffer in module.buffers())
            and next(module.parameters(), None) is None
        )

    def _rotary_embedding(self, module: Any) -> FusedRotaryEmbedding:
        """Find for each type of layer the buffer of frequencies from which the module's cos and sin follow."""
        tables: dict[str | None, tuple[torch.Tensor, float]] = {}
        for call in self._calls[module]:
            names = ("x", "position_ids", "layer_type")
            arguments = dict(zip(names, call.args, strict=False)) | dict(call.kwargs)
            if set(arguments) - set(names):
                raise _MismatchError("a rotary embedding with arguments of its own")
            layer_type = arguments.get("layer_type")
            positions = arguments["position_ids"]
            # Frequencies that follow the longest position of a batch differ between the two.
            spread, near = positions, torch.arange(positions.shape[1], device=positions.device).unsqueeze(0)
            buffers = [buffer.clone() for buffer in module.buffers() if buffer.dim() == 1]
            options = {} if layer_type is None else {"layer_type": layer_type}
            wide = torch.zeros(1, dtype=torch.float32, device=positions.device)
            results = [(at, module(wide, at, **options)) for at in (near, spread)]
            scale = float(results[0][1][0].flatten()[0])  # cos(0) * scale
            for buffer in buffers:
                if all(_are_angles(at, buffer.float(), scale, result) for at, result in results):
                    tables[layer_type] = (buffer.float(), scale)
                    break
            else:
                raise _MismatchError("a rotary embedding whose frequencies are not one of its buffers")
        fused = FusedRotaryEmbedding(tables)
        for call in self._calls[module]:
            for got, expected in zip(fused(*call.args, **call.kwargs), call.output, strict=True):
                _require_same("the rotary embedding", got, expected)
        return fused

    def _only_call(self, module: nn.Module) -> _Call:
        calls = self._calls[module]
        if len(calls) != 1:
            raise _MismatchError(f"runs {len(calls)} times in one forward pass")
        return calls[0]

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


def _looks_like_norm(module: nn.Module) -> bool:
    parameters = dict(module.named_parameters())
    return (
        list(parameters) == ["weight"]
        and parameters["weight"].dim() == 1
        and not list(module.children())
        and any("eps" in name for name in vars(module))
    )


def _looks_like_attention(module: nn.Module) -> bool:
    children = dict(module.named_children())
    others = set(children) - {*_QKV, "o_proj", *_HEAD_NORMS}
    return (
        _are_linear(children, (*_QKV, "o_proj"))
        and ("q_norm" in children) == ("k_norm" in children)
        and all(isinstance(children[name], nn.Dropout | nn.Identity) for name in others)
        and not list(module.parameters(recurse=False))
    )


def _looks_like_mlp(module: nn.Module) -> bool:
    children = dict(module.named_children())
    return (
        _are_linear(children, (*_GATE_UP, "down_proj"))
        and set(children) <= {*_GATE_UP, "down_proj", "act_fn"}
        and callable(getattr(module, "act_fn", None))
        and not list(module.parameters(recurse=False))
    )


def _are_linear(children: Mapping[str, nn.Module], names: Iterable[str]) -> bool:
    # Exactly: a subclass may hold quantised weights or add an adapter's.
    return all(type(children.get(name)) is nn.Linear and not _has_hooks(children[name]) for name in names)


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _pack(linears: list[nn.Linear]) -> PackedLinear:
    """One linear layer for several. Their weights become views of the packed one."""
    weights = [linear.weight for linear in linears]
    if len({(weight.shape[1], weight.dtype, weight.device) for weight in weights}) != 1:
        raise _MismatchError("projections of different inputs or types")
    has_bias = any(linear.bias is not None for linear in linears)
    if has_bias and not all(linear.bias is not None for linear in linears):
        raise _MismatchError("projections of which some have a bias")
    packed = PackedLinear(
        torch.cat([weight.detach() for weight in weights]),
        torch.cat([linear.bias.detach() for linear in linears]) if has_bias else None,
    )
    sizes = [linear.out_features for linear in linears]
    del weights
    for linear, weight in zip(linears, torch.split(packed.weight, sizes), strict=True):
        linear.weight = nn.Parameter(weight, requires_grad=False)
    if packed.bias is not None:
        for linear, bias in zip(linears, torch.split(packed.bias, sizes), strict=True):
            linear.bias = nn.Parameter(bias, requires_grad=False)
    if packed.weight.is_cuda:
        # torch keeps freed memory in pieces that the next, larger, packed weight does not fit.
        torch.cuda.empty_cache()
    return packed


def _recognised_activation(function: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> Activation:
    x = torch.linspace(-12.0, 12.0, 1001, device=device)
    expected = function(x)
    for activation in Activation:
        if torch.allclose(activation(x), expected, rtol=1e-6, atol=1e-6):
            return activation
    raise _MismatchError("an activation that is neither SiLU nor GELU")


def _are_angles(
    positions: torch.Tensor,  # [1, num_tokens]
    frequencies: torch.Tensor,  # [any]
    scale: float,
    result: tuple[torch.Tensor, torch.Tensor],  # cos and sin, [1, num_tokens, rotary_dim]
) -> bool:
    if result[0].shape != (*positions.shape, 2 * frequencies.shape[0]):
        return False
    tables = rotary_cos_sin_reference(positions.flatten(), frequencies, scale=scale, dtype=torch.float32)
    return all(_relative_error(table, want[0]) < 1e-5 for table, want in zip(tables, result, strict=True))


def _require_same(what: str, got: Any, expected: Any) -> None:
    if not isinstance(expected, torch.Tensor) or not isinstance(got, torch.Tensor):
        raise _MismatchError(f"{what} is no tensor")
    problem = _difference(got, expected)
    if problem is not None:
        raise _MismatchError(f"{what}: {problem}")


def _difference(got: torch.Tensor, expected: torch.Tensor, factor: float = 1.0) -> str | None:
    """How the two differ by more than rounding explains, in words, or None."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return f"{tuple(got.shape)} of {got.dtype} instead of {tuple(expected.shape)} of {expected.dtype}"
    tolerance = factor * _TOLERANCES[expected.dtype]
    error = _relative_error(got, expected)
    return (
        None if error <= tolerance else f"differs by {error:.1e} from the unfused, at most {tolerance:.1e} is allowed"
    )


def _relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    got, expected = got.double(), expected.double()
    return float((got - expected).norm() / expected.norm().clamp_min(1e-30))
