"""Load a Hugging Face causal language model for paged serving, or say why it cannot be served.

Importing this module imports neither torch nor transformers: `refuse_foreign_kernels` has to run before transformers
looks around.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from engine.attention import AttentionCall
    from engine.kv_cache import LayerShape

_logger = logging.getLogger(__name__)

_MAX_HEAD_DIM = 256
_SERVED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
# Rotary embeddings that look at the longest sequence of a batch: past the length they were made for, one sequence
# would rotate the keys of its neighbours differently.
_BATCH_DEPENDENT_ROPE_TYPES = ("dynamic", "longrope")


class ModelLoadError(Exception):
    """The model cannot be served; the message says what to change and is for the operator."""


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode on its device, and what the engine needs to know of it."""

    model: torch.nn.Module
    layers: tuple[LayerShape, ...]  # what each attention layer keeps in the KV cache
    vocab_size: int  # width of a row of logits
    max_length: int  # positions that a sequence may have
    eos_token_ids: tuple[int, ...]
    keeps_chosen_logits: bool  # whether forward takes `logits_to_keep`


def refuse_foreign_kernels() -> None:
    """Raise ModelLoadError where the package `kernels` of PyPI is installed.

    transformers imports from it whatever package of that name comes first, which is ours, and fails. Call this before
    anything imports transformers.
    """
    try:
        version = metadata.version("kernels")
    except metadata.PackageNotFoundError:
        return
    raise ModelLoadError(
        f"the package kernels {version} is installed, and transformers would mix it up with Outrider's own `kernels`: "
        "run `pip uninstall kernels`, or give Outrider an environment of its own"
    )


def check_files(model_path: Path) -> None:
    """Raise ModelLoadError where there is no model at all, before anything is imported that takes time."""
    if not (model_path / "config.json").is_file():
        raise ModelLoadError(f"{model_path} has no config.json: not the directory of a Hugging Face model")
    if not any(model_path.glob("*.safetensors")):
        raise ModelLoadError(f"{model_path} has no weights (*.safetensors)")


def import_transformers() -> None:
    """Import what any model needs and make our attention known to it: seconds, where nobody has before.

    Raises ModelLoadError as `refuse_foreign_kernels` does.
    """
    refuse_foreign_kernels()

    from engine.attention import register_attention

    register_attention()


def load_model(
    model_path: Path, *, device: torch.device, dtype: torch.dtype, max_length: int | None = None
) -> LoadedModel:
    """Load the model in a local directory: config.json and safetensors, as `save_pretrained` writes them.

    `max_length` lowers the number of positions that the model's config allows. Raises ModelLoadError where something is
    missing, does not fit together, or is not attention that the paged kernels compute. Code that lies beside the
    weights is not run.
    """
    check_files(model_path)
    import_transformers()

    import transformers

    from engine.attention import ATTENTION_NAME

    if not sys.stderr.isatty():
        # A progress bar is for a person; in a log it would stand between the lines.
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    auto_model: Any = transformers.AutoModelForCausalLM  # its annotation does not know output_loading_info
    try:
        # Never asked for: left out, transformers would ask whoever sits at the terminal.
        config = transformers.AutoConfig.from_pretrained(model_path, local_files_only=True, trust_remote_code=False)
        _check_config(config)
        with _memory_for_each_weight():
            model, loading_info = auto_model.from_pretrained(
                model_path,
                config=config,
                dtype=dtype,
                # Each weight goes from the mapped file to its place: the host never holds a copy of them all.
                device_map={"": device},
                attn_implementation=ATTENTION_NAME,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,  # reported below, by name
                output_loading_info=True,
            )
        # transformers fills what a checkpoint lacks with random numbers and goes on.
        problems = [*loading_info["missing_keys"], *(str(key) for key in loading_info["mismatched_keys"])]
        if problems:
            raise ModelLoadError(f"the weights in {model_path} lack or do not fit {', '.join(sorted(problems)[:5])}")
        model = model.eval().requires_grad_(False)
    except ModelLoadError:
        raise
    except KeyError as error:
        if error.args != (ATTENTION_NAME,):
            raise ModelLoadError(f"cannot load {model_path}: KeyError: {error}") from error
        raise ModelLoadError(f"{config.model_type} does not use transformers' attention interface") from error
    except Exception as error:  # files written by others go wrong in more ways than a list of types can name
        if "trust_remote_code" in str(error):
            raise ModelLoadError(
                f"{model_path} needs code of its own, which is never run: transformers itself has to know the model"
            ) from error
        raise ModelLoadError(f"cannot load {model_path}: {type(error).__name__}: {error}") from error

    text_config = config.get_text_config(decoder=True)
    layers, vocab_size = _probe(model, text_config, device)
    return LoadedModel(
        model=model,
        layers=layers,
        vocab_size=vocab_size,
        max_length=_max_length(text_config, max_length),
        eos_token_ids=_eos_token_ids(model.generation_config, config, text_config),
        keeps_chosen_logits="logits_to_keep" in inspect.signature(model.forward).parameters,
    )


@contextmanager
def _memory_for_each_weight() -> Iterator[None]:
    """Keep transformers from cutting all weights from one piece of the device's memory, which it allocates first.

    Fusion packs some of the weights anew and gives the old ones back, one by one: of a single piece nothing would go
    back to the device before all of it was free.
    """
    from transformers import modeling_utils

    warm_up = modeling_utils.caching_allocator_warmup
    modeling_utils.caching_allocator_warmup = lambda *_: None
    try:
        yield
    finally:
        modeling_utils.caching_allocator_warmup = warm_up


def _check_config(config: Any) -> None:
    """Refuse before the weights are read what the config already tells."""
    text_config = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        raise ModelLoadError(f"{config.model_type} is an encoder-decoder; only decoders can be served")
    foreign = set(getattr(text_config, "layer_types", None) or ()) - _SERVED_LAYER_TYPES
    if foreign:
        raise ModelLoadError(
            f"{config.model_type} has layers of type {', '.join(sorted(foreign))}; "
            f"only {' and '.join(sorted(_SERVED_LAYER_TYPES))} can be served"
        )
    if getattr(text_config, "num_kv_shared_layers", 0):
        raise ModelLoadError(f"{config.model_type} shares keys and values between layers (num_kv_shared_layers)")
    if getattr(text_config, "use_bidirectional_attention", False) or not getattr(text_config, "is_causal", True):
        raise ModelLoadError(f"{config.model_type} attends in both directions; only causal models can be served")


@dataclass
class _RecordingAttention:
    """Stands in for attention in one forward pass and notes what each layer asks for."""

    calls: list[tuple[AttentionCall, LayerShape]] = field(default_factory=list)

    def attend(
        self, call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:  # [num_tokens, num_heads, head_dim], as query
        from engine.attention import UnsupportedAttentionError
        from engine.kv_cache import LayerShape

        num_kv_heads, head_dim = key.shape[1:]
        if not query.shape[2] == head_dim == value.shape[2]:
            raise UnsupportedAttentionError(
                f"layer {call.layer_index} has queries, keys and values of different sizes "
                f"({query.shape[2]}, {head_dim}, {value.shape[2]})"
            )
        if head_dim > _MAX_HEAD_DIM or query.shape[1] % num_kv_heads:
            raise UnsupportedAttentionError(
                f"layer {call.layer_index} has {query.shape[1]} heads of size {head_dim} over {num_kv_heads} kv heads"
            )
        self.calls.append((call, LayerShape(num_kv_heads, head_dim)))
        return query


def _probe(model: Any, text_config: Any, device: torch.device) -> tuple[tuple[LayerShape, ...], int]:
    """Forward one token to see what the model really asks of attention: its layers' shapes and its vocabulary."""
    import torch

    from engine.attention import UnsupportedAttentionError

    name = type(model).__name__
    if getattr(model, "_is_stateful", False):
        raise ModelLoadError(f"{name} keeps a recurrent state; only attention over a KV cache can be served")
    recording = _RecordingAttention()
    token = torch.zeros(1, 1, dtype=torch.int64, device=device)
    try:
        with torch.inference_mode():
            logits = model(input_ids=token, position_ids=token, use_cache=False, paged=recording).logits
    except UnsupportedAttentionError as error:
        raise ModelLoadError(f"{name} cannot be served: {error}") from error

    num_layers = text_config.num_hidden_layers
    seen = sorted(call.layer_index for call, _ in recording.calls)
    if seen != list(range(num_layers)):
        raise ModelLoadError(
            f"{name} has {num_layers} layers, and those that attended through transformers' attention interface are "
            f"{seen}: each layer has to, once"
        )
    layer_types = getattr(text_config, "layer_types", None) or [None] * num_layers
    windowless = [call.layer_index for call, _ in recording.calls if call.sliding_window is None]
    # A model that leaves the window to its mask would attend to everything, since no mask is built.
    if any(layer_types[index] == "sliding_attention" for index in windowless) or (
        len(windowless) == num_layers
        and set(layer_types) == {None}
        and getattr(text_config, "sliding_window", None)
        and getattr(text_config, "use_sliding_window", True)
    ):
        raise ModelLoadError(f"{name} has a sliding window that its layers do not pass to attention")
    shapes = {call.layer_index: shape for call, shape in recording.calls}
    return tuple(shapes[index] for index in range(num_layers)), logits.shape[-1]


def _max_length(text_config: Any, limit: int | None) -> int:
    lengths = [] if limit is None else [limit]
    trained = getattr(text_config, "max_position_embeddings", None)
    if trained is not None:
        lengths.append(trained)
    for rope in _rope_parameters(text_config):
        original = rope.get("original_max_position_embeddings")
        if rope.get("rope_type") in _BATCH_DEPENDENT_ROPE_TYPES and original is not None:
            _logger.info("%s rotary embeddings: sequences end at %d tokens", rope["rope_type"], original)
            lengths.append(original)
    if not lengths:
        raise ModelLoadError("the model's config has no max_position_embeddings: set max_model_len")
    return int(min(lengths))


def _rope_parameters(text_config: Any) -> Iterator[Mapping[str, Any]]:
    """The rotary embedding's parameters, which some models have once for each type of layer."""
    parameters = getattr(text_config, "rope_parameters", None) or {}
    if "rope_type" in parameters:
        yield parameters
    else:
        yield from (nested for nested in parameters.values() if isinstance(nested, Mapping))


def _eos_token_ids(*configs: Any) -> tuple[int, ...]:
    """The end-of-sequence tokens of the first config that names any."""
    for config in configs:
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return (ids,) if isinstance(ids, int) else tuple(ids)
    return ()
