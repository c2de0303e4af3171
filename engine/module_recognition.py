"""Recognise a module by structure and behaviour, and build the fused module that may take over from it.

Modules are recognised by what they are made of (an RMSNorm has one weight, attention has q_proj, k_proj, v_proj and
o_proj, a gated MLP has gate_proj, up_proj and down_proj) and by what they do: `looks_like_*` tells which are worth a
try, `recognise_*` returns what gave the same output for the same input, or raises `MismatchError`. How the norms of a
decoder layer are wired is read from the observed tensors as well.

Weights that are read together are packed into one tensor, a module at a time. The original parameters become views of
it, so that nothing is held twice and an unfused module goes on working on the packed weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from engine.fused_modules import FusedAttention, FusedLayer, FusedMLP, FusedRotaryEmbedding, PackedLinear
from engine.module_probe import (
    MismatchError,
    ModuleCall,
    Observation,
    RecordingAttention,
    relative_error,
    require_same,
)
from kernels.rms_norm import NormParameters, rms_norm_reference
from kernels.rotary import HeadNorms, rotary_cos_sin_reference
from kernels.silu_mul import Activation

_QKV = ("q_proj", "k_proj", "v_proj")
_HEAD_NORMS = ("q_norm", "k_norm")
_GATE_UP = ("gate_proj", "up_proj")
# Inputs so many times larger than the model's own bring out what clips or saturates.
_LARGE_INPUT = {torch.float32: 1e3, torch.bfloat16: 1e3, torch.float16: 8.0}


def looks_like_norm(module: nn.Module) -> bool:
    parameters = dict(module.named_parameters())
    return (
        list(parameters) == ["weight"]
        and parameters["weight"].dim() == 1
        and not list(module.children())
        and any("eps" in name for name in vars(module))
    )


def looks_like_attention(module: nn.Module) -> bool:
    children = dict(module.named_children())
    others = set(children) - {*_QKV, "o_proj", *_HEAD_NORMS}
    return (
        _are_linear(children, (*_QKV, "o_proj"))
        and ("q_norm" in children) == ("k_norm" in children)
        and all(isinstance(children[name], nn.Dropout | nn.Identity) for name in others)
        and not list(module.parameters(recurse=False))
    )


def looks_like_mlp(module: nn.Module) -> bool:
    children = dict(module.named_children())
    return (
        _are_linear(children, (*_GATE_UP, "down_proj"))
        and set(children) <= {*_GATE_UP, "down_proj", "act_fn"}
        and callable(getattr(module, "act_fn", None))
        and not list(module.parameters(recurse=False))
    )


def looks_like_rotary_embedding(module: nn.Module, observed: Observation) -> bool:
    output = observed.calls[module][0].output
    return (
        isinstance(output, tuple)
        and len(output) == 2
        and all(isinstance(table, torch.Tensor) for table in output)
        and any(buffer.dim() == 1 for buffer in module.buffers())
        and next(module.parameters(), None) is None
    )


def has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def recognise_norm(module: Any) -> NormParameters:
    eps = [value for name, value in vars(module).items() if "eps" in name and isinstance(value, float)]
    if len(eps) != 1:
        raise MismatchError("a norm that does not tell its epsilon")
    dtype = module.weight.dtype
    generator = torch.Generator().manual_seed(0)
    # Rows from tiny, where epsilon matters, to large.
    rows = torch.randn(6, module.weight.shape[0], generator=generator) * torch.logspace(-4, 2, 6).unsqueeze(1)
    rows = rows.to(module.weight.device)
    if module(rows.to(dtype)).dtype != dtype:
        raise MismatchError("a norm that returns another type than its input's")
    # float32 inputs tell more than the model's own type could.
    expected = module(rows).float()
    for weight in (module.weight.detach(), 1.0 + module.weight.detach().float()):
        norm = NormParameters(weight, eps[0])
        got = rms_norm_reference(rows, norm)
        if all(relative_error(*pair) < 1e-4 for pair in zip(got, expected, strict=True)):
            return norm
    raise MismatchError("looks like an RMSNorm and computes something else")


def recognise_attention(
    module: Any, observed: Observation, fused_norms: Mapping[nn.Module, NormParameters]
) -> FusedAttention:
    call = observed.only_call(module)
    if not (isinstance(call.output, tuple) and len(call.output) == 2 and call.output[1] is None):
        raise MismatchError("an attention module that returns more than its output")
    norms = None
    if "q_norm" in dict(module.named_children()):
        if module.q_norm not in fused_norms or module.k_norm not in fused_norms:
            raise MismatchError("norms of queries and keys that are not RMSNorms")
        norms = HeadNorms(fused_norms[module.q_norm], fused_norms[module.k_norm])

    recording = RecordingAttention()
    call.repeat(module, paged=recording)
    if len(recording.calls) != 1:
        raise MismatchError(f"attends {len(recording.calls)} times in one forward pass")
    attention_call, query, key, value = recording.calls[0]
    num_heads, head_dim = query.shape[1:]
    num_kv_heads = key.shape[1]
    widths = (num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim)
    if key.shape != value.shape or tuple(getattr(module, name).out_features for name in _QKV) != widths:
        raise MismatchError("queries, keys and values that are not the projections' heads")
    if norms is not None and not norms.query.weight.shape == norms.key.weight.shape == (head_dim,):
        raise MismatchError("norms of queries and keys that are not over single heads")

    fused = FusedAttention(
        _pack([getattr(module, name) for name in _QKV]),
        module.o_proj,
        norms,
        num_heads,
        num_kv_heads,
        attention_call,
    )
    for scale in (1.0, _LARGE_INPUT[query.dtype]):
        expected, got = RecordingAttention(), RecordingAttention()
        expected_output = call.repeat(module, scale, expected)[0]
        output = call.repeat(fused, scale, got)[0]
        if expected.calls[0][0] != attention_call:
            raise MismatchError("attention whose scale or window depends on its input")
        for name, tensor, expected_tensor in zip(
            ("queries", "keys", "values", "output"),
            (*got.calls[0][1:], output),
            (*expected.calls[0][1:], expected_output),
            strict=True,
        ):
            require_same(f"attention's {name}", tensor, expected_tensor)
    return fused


def recognise_mlp(module: Any, observed: Observation) -> FusedMLP:
    activation = _recognised_activation(module.act_fn, module.gate_proj.weight.device)
    fused = FusedMLP(_pack([getattr(module, name) for name in _GATE_UP]), module.down_proj, activation)
    call = observed.calls[module][0]
    for scale in (1.0, _LARGE_INPUT[fused.down_proj.weight.dtype]):
        require_same("the MLP's output", call.repeat(fused, scale), call.repeat(module, scale))
    return fused


def recognise_layer(
    module: Any,
    observed: Observation,
    fused_attentions: Mapping[nn.Module, FusedAttention],
    fused_mlps: Mapping[nn.Module, FusedMLP],
    fused_norms: Mapping[nn.Module, NormParameters],
) -> FusedLayer:
    call = observed.only_call(module)
    children = list(module.children())
    attentions = [child for child in children if child in fused_attentions]
    mlps = [child for child in children if child in fused_mlps]
    norms = [child for child in children if child in fused_norms]
    for kind, found in (("attention", attentions), ("gated MLP", mlps)):
        if len(found) != 1:
            raise MismatchError(f"no {kind} that could be fused")
    attention_call, mlp_call = observed.only_call(attentions[0]), observed.only_call(mlps[0])
    norm_calls = {norm: observed.only_call(norm) for norm in norms}
    attended = attention_call.output[0]

    def place(fits: Callable[[ModuleCall], bool]) -> NormParameters | None:
        for norm, norm_call in list(norm_calls.items()):
            if fits(norm_call):
                del norm_calls[norm]
                return fused_norms[norm]
        return None

    fused = FusedLayer(
        attention=fused_attentions[attentions[0]],
        mlp=fused_mlps[mlps[0]],
        attention_norm=place(lambda norm: norm.output is attention_call.input),
        attended_norm=place(lambda norm: norm.input is attended),
        mlp_norm=place(lambda norm: norm.output is mlp_call.input),
        output_norm=place(lambda norm: norm.input is mlp_call.output),
    )
    if norm_calls or any(
        next(child.parameters(), None) is not None for child in children if child not in (*attentions, *mlps, *norms)
    ):
        raise MismatchError("a decoder layer with more parts than attention, MLP and the norms around them")
    # The stream is made as small as what the layer adds to it: beside a larger one, an error would not show.
    update = call.output - call.input
    scale = float(update.float().norm() / call.input.float().norm())
    if not scale > 0.0:
        raise MismatchError("a decoder layer that adds nothing to its input")
    hidden = (call.input * scale).clone()
    small = replace(call, args=(hidden, *call.args[1:]))
    expected = small.repeat(module, paged=RecordingAttention())
    require_same("the decoder layer's output", small.repeat(fused, paged=RecordingAttention()), expected)
    return fused


def recognise_rotary_embedding(module: Any, observed: Observation) -> FusedRotaryEmbedding:
    """Find for each type of layer the buffer of frequencies from which the module's cos and sin follow."""
    tables: dict[str | None, tuple[torch.Tensor, float]] = {}
    for call in observed.calls[module]:
        names = ("x", "position_ids", "layer_type")
        arguments = dict(zip(names, call.args, strict=False)) | dict(call.kwargs)
        if set(arguments) - set(names):
            raise MismatchError("a rotary embedding with arguments of its own")
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
            raise MismatchError("a rotary embedding whose frequencies are not one of its buffers")
    fused = FusedRotaryEmbedding(tables)
    for call in observed.calls[module]:
        for got, expected in zip(fused(*call.args, **call.kwargs), call.output, strict=True):
            require_same("the rotary embedding", got, expected)
    return fused


def _are_linear(children: Mapping[str, nn.Module], names: Iterable[str]) -> bool:
    # Exactly: a subclass may hold quantised weights or add an adapter's.
    return all(type(children.get(name)) is nn.Linear and not has_hooks(children[name]) for name in names)


def _pack(linears: list[nn.Linear]) -> PackedLinear:
    """One linear layer for several. Their weights become views of the packed one."""
    weights = [linear.weight for linear in linears]
    if len({(weight.shape[1], weight.dtype, weight.device) for weight in weights}) != 1:
        raise MismatchError("projections of different inputs or types")
    has_bias = any(linear.bias is not None for linear in linears)
    if has_bias and not all(linear.bias is not None for linear in linears):
        raise MismatchError("projections of which some have a bias")
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
    raise MismatchError("an activation that is neither SiLU nor GELU")


def _are_angles(
    positions: torch.Tensor,  # [1, num_tokens]
    frequencies: torch.Tensor,  # [any]
    scale: float,
    result: tuple[torch.Tensor, torch.Tensor],  # cos and sin, [1, num_tokens, rotary_dim]
) -> bool:
    if result[0].shape != (*positions.shape, 2 * frequencies.shape[0]):
        return False
    tables = rotary_cos_sin_reference(positions.flatten(), frequencies, scale=scale, dtype=torch.float32)
    return all(relative_error(table, want[0]) < 1e-5 for table, want in zip(tables, result, strict=True))
