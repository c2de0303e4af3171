"""Small random models of several families, each with what is particular about its attention."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

VOCAB_SIZE = 99
MAX_LENGTH = 160


def _config(config_class: Callable[..., PreTrainedConfig], **options: Any) -> PreTrainedConfig:
    shared = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": MAX_LENGTH,
        # Weights of the usual size give nearly uniform distributions, in which every error hides.
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "tie_word_embeddings": False,  # tied random weights repeat their input
    }
    return config_class(**(shared | options))


FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: _config(transformers.LlamaConfig),
    # Heads of 32 whose sum is not the hidden size, and norms on queries and keys.
    "qwen3": lambda: _config(transformers.Qwen3Config, head_dim=32),
    # Biases, and a window on the later layers only.
    "qwen2": lambda: _config(transformers.Qwen2Config, use_sliding_window=True, sliding_window=16, max_window_layers=1),
    "mistral": lambda: _config(transformers.MistralConfig, sliding_window=16),
    # Softcapped scores, a window on every other layer, a scale that is not the head size's.
    "gemma2": lambda: _config(
        transformers.Gemma2Config,
        head_dim=16,
        sliding_window=16,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=5.0,
    ),
    # Rotary embeddings that differ between layers.
    "gemma3": lambda: _config(transformers.Gemma3TextConfig, head_dim=16, sliding_window=16, query_pre_attn_scalar=16),
    # Positions that are learnt, not rotated.
    "gpt2": lambda: transformers.GPT2Config(
        n_embd=64,
        n_layer=3,
        n_head=4,
        vocab_size=VOCAB_SIZE,
        n_positions=MAX_LENGTH,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    ),
}


def save_model(config: PreTrainedConfig, path: Path, seed: int = 0) -> Path:
    """Write a random model of this config to `path`."""
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model.save_pretrained(path)
    return path
