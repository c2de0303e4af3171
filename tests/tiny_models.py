"""Small random models, saved as Hugging Face directories, for tests that need exact distributions and no quality."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM


def save_tiny_llama(
    path: Path,
    *,
    vocab_size: int = 64,
    hidden_size: int = 32,
    num_layers: int = 2,
    max_length: int = 256,
    seed: int = 0,
    scale: float = 1.0,
    eos_token_id: int | None = None,
) -> Path:
    """Write a random Llama with grouped queries to `path`; `scale` sharpens its distributions."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=max_length,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=eos_token_id,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        # Random weights of the usual size give nearly uniform distributions, in which every error hides.
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, 0.2)
        model.lm_head.weight.mul_(scale * 3)
    model.save_pretrained(path)
    return path


def save_padded(source: Path, path: Path, *, num_rows: int, num_token_ids: int, is_loud: bool = False) -> Path:
    """Write a copy of a model with so many rows of input and output, and a tokenizer that knows fewer ids.

    `is_loud`: the rows beyond the tokenizer's are like those of tokens and three times as loud, so that the model, left
    to itself, takes hardly anything else. Otherwise they are silent: their logits are 0.
    """
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    model.resize_token_embeddings(num_rows, mean_resizing=False)
    with torch.no_grad():
        weight = model.lm_head.weight
        weight[num_token_ids:] = 3 * weight[: num_rows - num_token_ids] if is_loud else 0
    model.save_pretrained(path)
    words = {f"t{token_id}": token_id for token_id in range(num_token_ids)}
    Tokenizer(WordLevel(words, unk_token="t0")).save(str(path / "tokenizer.json"))
    return path
