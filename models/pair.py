"""Building, saving and loading the two Llamas, and letting one write text."""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import nn
from transformers import AttentionInterface, DynamicCache, GenerationConfig, LlamaConfig, LlamaForCausalLM

from models.corpus import END_OF_TEXT, END_OF_TEXT_ID
from models.recipe import Shape

_ATTENTION = "models_causal"
_TOKENIZER_CONFIG = {
    "add_prefix_space": False,
    "bos_token": END_OF_TEXT,
    "clean_up_tokenization_spaces": False,
    "eos_token": END_OF_TEXT,
    "tokenizer_class": "PreTrainedTokenizerFast",
}


def _causal_attention(
    module: nn.Module,
    query: torch.Tensor,  # [batch, num_heads, num_queries, head_dim]
    key: torch.Tensor,  # [batch, num_kv_heads, num_keys, head_dim]
    value: torch.Tensor,  # [batch, num_kv_heads, num_keys, head_dim]
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **_: object,
) -> tuple[torch.Tensor, None]:  # [batch, num_queries, num_heads, head_dim]
    """Full windows need no mask: without one the fast kernels are always taken and the graph never breaks."""
    is_causal = query.shape[2] > 1
    out = F.scaled_dot_product_attention(query, key, value, scale=scaling, is_causal=is_causal, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(_ATTENTION, _causal_attention)


def build_model(shape: Shape, *, vocab_size: int, dropout: float = 0.0) -> LlamaForCausalLM:
    """A fresh Llama in float32; ``dropout`` acts on the embeddings and on what each block adds, in training only."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.context,
        tie_word_embeddings=True,
        bos_token_id=END_OF_TEXT_ID,
        eos_token_id=END_OF_TEXT_ID,
    )
    model = LlamaForCausalLM(config)
    model.set_attn_implementation(_ATTENTION)
    if dropout:
        for name, module in model.named_modules():
            if name.endswith(("embed_tokens", "o_proj", "down_proj")):
                module.register_forward_hook(lambda self, _, out: F.dropout(out, dropout, training=self.training))
    return model


def num_parameters(model: LlamaForCausalLM) -> int:
    """Parameters, the tied embedding counted once."""
    return sum(parameter.numel() for parameter in model.parameters())


def save_model(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a plain Hugging Face directory: configs, bfloat16 weights, tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig.from_model_config(model.config)
    model.bfloat16().save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(_TOKENIZER_CONFIG, indent=2) + "\n")


def load_model(folder: Path, *, dtype: torch.dtype, device: torch.device) -> LlamaForCausalLM:
    """Load what ``save_model`` wrote, ready to evaluate."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=_ATTENTION)
    return model.to(device).eval()  # type: ignore[no-any-return, arg-type]


@torch.no_grad()
def sample_continuations(
    model: LlamaForCausalLM,
    prompts: torch.Tensor,  # int64 [batch, prompt_length]
    num_tokens: int,
    generator: torch.Generator,
) -> torch.Tensor:  # int64 [batch, prompt_length + num_tokens]
    """Text that the model writes at temperature 1, on through ends of text as in the packed training windows."""
    cache = DynamicCache(config=model.config)
    columns = [prompts]
    for _ in range(num_tokens):
        logits = model(input_ids=columns[-1], past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        probabilities = logits[:, -1].float().softmax(-1)
        columns.append(torch.multinomial(probabilities, 1, generator=generator))
    return torch.cat(columns, dim=1)
