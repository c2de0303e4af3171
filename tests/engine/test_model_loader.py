"""What cannot be served is refused when it is loaded, with the reason."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import modeling_utils

import kernels
from engine.model_loader import LoadedModel, ModelLoadError, load_model, refuse_foreign_kernels
from tests.engine.small_models import FAMILIES, MAX_LENGTH, save_model

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 99,
    "max_position_embeddings": MAX_LENGTH,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


@pytest.fixture
def llama_path(tmp_path: Path) -> Path:
    return save_model(FAMILIES["llama"](), tmp_path / "llama")


def load(path: Path, **options: Any) -> LoadedModel:
    return load_model(path, device=torch.device("cpu"), dtype=torch.float32, **options)


def change_config(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))


def test_our_kernels_package_is_none_that_transformers_uses() -> None:
    """transformers decides by the version whether a package of this name is the one it knows."""
    assert kernels.__version__ == "0.0.0"
    refuse_foreign_kernels()
    assert not transformers.utils.import_utils.is_kernels_available()


def test_foreign_kernels_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, llama_path: Path) -> None:
    installed = tmp_path / "site" / "kernels-0.11.0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.11.0\n")
    monkeypatch.syspath_prepend(str(installed.parent))
    assert metadata.version("kernels") == "0.11.0"
    with pytest.raises(ModelLoadError, match=r"kernels 0\.11\.0 is installed.*pip uninstall kernels"):
        refuse_foreign_kernels()
    with pytest.raises(ModelLoadError, match="pip uninstall kernels"):
        load(llama_path)


def test_loader_imports_nothing_heavy() -> None:
    """The check for the foreign package has to come before transformers; the gateway has no torch at all."""
    program = (
        "import sys, engine, engine.model_loader, outrider.protocol.fingerprint; "
        "sys.exit(bool({'torch', 'transformers', 'triton'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_directory_without_weights(llama_path: Path) -> None:
    (llama_path / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="has no weights"):
        load(llama_path)


def test_damaged_weights(llama_path: Path) -> None:
    (llama_path / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ModelLoadError, match="cannot load"):
        load(llama_path)


def test_damaged_config(llama_path: Path) -> None:
    (llama_path / "config.json").write_text('{"model_type": "no such model"}')
    with pytest.raises(ModelLoadError, match="cannot load"):
        load(llama_path)


def test_a_model_with_code_of_its_own(llama_path: Path) -> None:
    """Catches advice to set what cannot be set here, and a question at the terminal."""
    (llama_path / "own.py").write_text("raise SystemExit('it was run')")
    change_config(
        llama_path, model_type="own", auto_map={"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Own"}
    )
    with pytest.raises(ModelLoadError, match="code of its own, which is never run") as caught:
        load(llama_path)
    assert "trust_remote_code" not in str(caught.value)


def test_weights_that_lack_a_tensor_are_not_made_up(llama_path: Path) -> None:
    weights = load_file(llama_path / "model.safetensors")
    del weights["model.layers.2.mlp.up_proj.weight"]
    save_file(weights, llama_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"lack.*model\.layers\.2\.mlp\.up_proj\.weight"):
        load(llama_path)


def test_weights_of_another_shape(llama_path: Path) -> None:
    change_config(llama_path, vocab_size=98)
    with pytest.raises(ModelLoadError, match="embed_tokens"):
        load(llama_path)


REFUSED: dict[str, tuple[Any, str]] = {
    "attention sinks": (
        lambda: transformers.GptOssConfig(**SMALL, num_key_value_heads=2, num_local_experts=2, head_dim=16),
        "attention sinks",
    ),
    "state-space": (
        lambda: transformers.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=99),
        "layers of type linear_attention|recurrent state",
    ),
    "chunked attention": (
        lambda: transformers.Llama4TextConfig(
            **SMALL, num_key_value_heads=2, head_dim=16, num_local_experts=2, intermediate_size_mlp=64
        ),
        "layers of type chunked_attention",
    ),
    "shared keys and values": (
        lambda: transformers.Gemma3nTextConfig(
            **SMALL, num_key_value_heads=2, head_dim=16, num_kv_shared_layers=2, vocab_size_per_layer_input=99
        ),
        "shares keys and values between layers",
    ),
    "position bias": (
        lambda: transformers.BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=99),
        "each layer has to, once",
    ),
    "attention of its own": (
        lambda: transformers.FalconConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=99),
        "does not use transformers' attention interface|each layer has to, once",
    ),
}


@pytest.mark.parametrize("kind", list(REFUSED))
def test_attention_that_cannot_be_served(kind: str, tmp_path: Path) -> None:
    config, problem = REFUSED[kind]
    path = save_model(config(), tmp_path)
    with pytest.raises(ModelLoadError, match=problem):
        load(path)


def test_encoder_decoder(tmp_path: Path) -> None:
    config = transformers.T5Config(d_model=16, d_ff=16, num_layers=1, vocab_size=99)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match="encoder-decoder"):
        load(tmp_path)


def test_bidirectional_attention(tmp_path: Path) -> None:
    path = save_model(FAMILIES["gemma3"](), tmp_path)
    change_config(path, use_bidirectional_attention=True)
    with pytest.raises(ModelLoadError, match="both directions"):
        load(path)


def test_window_that_layers_leave_to_the_mask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No mask is built, so a layer that does not pass its window would see too much."""
    path = save_model(FAMILIES["gemma3"](), tmp_path)
    attention = transformers.models.gemma3.modeling_gemma3.Gemma3Attention
    plain_init = attention.__init__

    def forgetful_init(self: Any, *args: Any, **kwargs: Any) -> None:
        plain_init(self, *args, **kwargs)
        self.sliding_window = None

    monkeypatch.setattr(attention, "__init__", forgetful_init)
    with pytest.raises(ModelLoadError, match="do not pass to attention"):
        load(path)


@pytest.mark.parametrize(
    ("in_generation_config", "in_config", "expected"),
    [([7, 9], 5, (7, 9)), (7, 5, (7,)), (None, 5, (5,)), (None, None, ())],
)
def test_eos_tokens(llama_path: Path, in_generation_config: Any, in_config: Any, expected: tuple[int, ...]) -> None:
    change_config(llama_path, eos_token_id=in_config)
    generation = {} if in_generation_config is None else {"eos_token_id": in_generation_config}
    (llama_path / "generation_config.json").write_text(json.dumps(generation))
    assert load(llama_path).eos_token_ids == expected


def test_rotary_embeddings_that_depend_on_the_batch_are_kept_below_their_threshold(tmp_path: Path) -> None:
    """Past the original length, one long sequence of a batch would rotate the keys of all."""
    factors = [1.0] * 8
    config = transformers.Phi3Config(
        **SMALL,
        num_key_value_heads=2,
        original_max_position_embeddings=64,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": factors,
            "long_factor": [4.0 * factor for factor in factors],
            "original_max_position_embeddings": 64,
        },
    )
    path = save_model(config, tmp_path)
    assert load(path).max_length == 64
    assert load(path, max_length=50).max_length == 50


def test_weights_are_not_cut_from_one_piece_of_memory(llama_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches memory of a GPU that fusion frees and that stays reserved, out of the KV cache's reach."""

    def warm_up(*_: object) -> None:
        raise AssertionError("transformers reserves the whole model's memory at once")

    monkeypatch.setattr(modeling_utils, "caching_allocator_warmup", warm_up)
    load(llama_path)
    assert modeling_utils.caching_allocator_warmup is warm_up
