"""Random Llamas for the pair: built on the device, damped in their deeper layers, saved, and read back."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.shapes import ModelShape, PairShape
from engine.model_loader import refuse_foreign_kernels

# Standard deviations of what a layer puts out, for inputs of unit size. Attention averages its values, which shrinks
# them: its output is raised, or the next token would hang on the last one alone.
_GAINS = {"o_proj": 3.0, "down_proj": 2.4}
_GAIN = 1.28
_SHARD_BYTES = 1 << 30
_NUM_WRITERS = 4


@dataclass
class Pair:
    """Target and drafter as transformers' models; the drafter's parameters are the target's own."""

    shape: PairShape
    target: Any
    drafter: Any

    @property
    def deep_outputs(self) -> list[torch.nn.Module]:
        """The output projections of the layers that the drafter lacks."""
        layers = self.target.model.layers[self.shape.num_drafter_layers :]
        return [module for layer in layers for module in (layer.self_attn.o_proj, layer.mlp.down_proj)]

    @torch.no_grad()
    def set_norm_scale(self, scale: float) -> None:
        """Fill the final norm's weight, which sharpens both models' distributions."""
        self.target.model.norm.weight.fill_(scale)

    @torch.no_grad()
    def damp(self, damping: float) -> None:
        """Multiply the deeper layers' output projections, for good."""
        for module in self.deep_outputs:
            module.get_parameter("weight").mul_(damping)


def build_pair(shape: PairShape, *, seed: int, device: torch.device) -> Pair:
    """A target with random weights, undamped, and the drafter made of its first layers, final norm and head.

    Each tensor has random numbers of its own, drawn from the seed and its name: the same seed gives the same weights on
    the same kind of device.
    """
    target = build_model(shape.target, device)
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            _fill(name, parameter, seed, device)
    drafter = build_model(shape.drafter, device)
    state = target.state_dict()
    drafter.load_state_dict({name: state[name] for name in drafter.state_dict()}, assign=True)
    return Pair(shape, target, drafter.eval().requires_grad_(False))


def build_model(shape: ModelShape, device: torch.device, *, attention: str = "sdpa") -> Any:
    """transformers' Llama of this shape on the device, in evaluation mode, with weights that mean nothing yet."""
    refuse_foreign_kernels()
    import transformers

    auto_model: Any = transformers.AutoModelForCausalLM  # untyped
    with device:
        model = auto_model.from_config(config_of(shape), dtype=shape.dtype, attn_implementation=attention)
    return model.eval().requires_grad_(False)


def config_of(shape: ModelShape) -> Any:
    """transformers' configuration: Llama 3's rotary embedding, no special tokens."""
    from transformers import LlamaConfig

    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype=str(shape.dtype).removeprefix("torch."),
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_length,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def save_model(model: Any, directory: Path, report: Callable[[str], None]) -> None:
    """Write a Hugging Face directory: config and sharded safetensors, several shards at a time."""
    directory.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(directory)
    shards = list(_shards(model))
    names = [f"model-{index + 1:05}-of-{len(shards):05}.safetensors" for index in range(len(shards))]
    sizes = [sum(tensor.nbytes for tensor in shard.values()) for shard in shards]

    def write(index: int) -> int:
        # Only the shards being written are in host memory.
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in shards[index].items()}
        save_file(tensors, directory / names[index], metadata={"format": "pt"})
        return sizes[index]

    written = 0
    with ThreadPoolExecutor(_NUM_WRITERS) as pool:
        for size in pool.map(write, range(len(shards))):
            written += size
            report(f"{directory.name}: {written / 1e9:.2f} of {sum(sizes) / 1e9:.2f} GB written")
    index = {
        "metadata": {"total_size": sum(sizes)},
        "weight_map": {name: names[number] for number, shard in enumerate(shards) for name in shard},
    }
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def load_reference(directory: Path, shape: ModelShape, device: torch.device, *, attention: str) -> Any:
    """transformers' own model with a directory's weights, read straight to the device.

    Raises KeyError where the directory lacks a weight.
    """
    model = build_model(shape, device, attention=attention)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for path in sorted(directory.glob("*.safetensors")):
            for name, tensor in load_file(path, device=str(device)).items():
                parameters.pop(name).copy_(tensor)
    if parameters:
        raise KeyError(f"{directory} lacks {', '.join(sorted(parameters)[:3])}")
    return model


@torch.no_grad()
def _fill(name: str, parameter: torch.Tensor, seed: int, device: torch.device) -> None:
    if parameter.dim() == 1:
        parameter.fill_(1.0)  # norms
        return
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    if "embed_tokens" in name:
        parameter.normal_(0.0, 1.0, generator=generator)
        return
    gain = next((gain for part, gain in _GAINS.items() if part in name), _GAIN)
    parameter.normal_(0.0, gain / parameter.shape[1] ** 0.5, generator=generator)


def _shards(model: Any) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    num_bytes = 0
    for name, tensor in model.state_dict().items():
        if shard and num_bytes + tensor.nbytes > _SHARD_BYTES:
            yield shard
            shard, num_bytes = {}, 0
        shard[name] = tensor
        num_bytes += tensor.nbytes
    yield shard
