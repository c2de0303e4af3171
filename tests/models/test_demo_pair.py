"""The shipped pair: what it promises on disk, and that it is as good as its metrics say."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from models.corpus import Snippet, SourceFile, default_source, load_snippets, read_files
from models.evaluate import DEMO, evaluate_snippets

TARGET, DRAFT = DEMO / "target", DEMO / "draft"
MODEL_FILES = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture(scope="module")
def metrics() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((DEMO / "metrics.json").read_text())
    return loaded


@pytest.fixture(scope="module")
def snippets() -> list[Snippet]:
    return load_snippets(DEMO / "heldout" / "snippets.json")


def test_files_and_size() -> None:
    assert {file.name for file in TARGET.iterdir()} == MODEL_FILES
    assert {file.name for file in DRAFT.iterdir()} == MODEL_FILES
    assert sum(file.stat().st_size for file in DEMO.rglob("*") if file.is_file()) <= 24_000_000
    assert sum(file.stat().st_size for file in (DEMO / "heldout").iterdir()) <= 200_000


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_both_share_one_tokenizer(name: str) -> None:
    assert (TARGET / name).read_bytes() == (DRAFT / name).read_bytes()


@pytest.mark.parametrize(
    ("folder", "context", "parameters"),
    [(TARGET, 2048, (9_000_000, 10_000_000)), (DRAFT, 512, (900_000, 1_100_000))],
    ids=["target", "draft"],
)
def test_loads_as_an_ordinary_llama(folder: Path, context: int, parameters: tuple[int, int]) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.dtype == torch.bfloat16
    assert model.config.max_position_embeddings == context
    assert model.config.vocab_size == 4096
    assert model.config.eos_token_id == model.generation_config.eos_token_id == 0
    assert model.config.head_dim in (32, 64, 128)
    assert model.config.num_key_value_heads < model.config.num_attention_heads
    assert model.lm_head.weight is model.model.embed_tokens.weight
    low, high = parameters
    assert low <= sum(parameter.numel() for parameter in model.parameters()) <= high


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "def f(x):\n    return x\n",
        "  two leading spaces, \ttabs\tand trailing \n\n  ",
        "carriage\r\nreturn, NUL \x00, DEL \x7f",
        "naïve café e\u0301 ﬁ ½ — “quotes”",
        "漢字かな交じり文、한국어",
        "🙂🏽 👩‍👩‍👧 🏴‍☠️",
        "end <|endoftext|> of text",
    ],
)
def test_round_trip_through_the_tokenizer(text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tokenizer_adds_nothing_and_knows_every_byte() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    assert len(tokenizer) == 4096
    assert tokenizer.encode("") == []
    assert tokenizer.eos_token_id == tokenizer.bos_token_id == tokenizer.encode("<|endoftext|>")[0] == 0
    # Every character of the Basic Multilingual Plane but the surrogates: all lead and continuation bytes up to 0xEF.
    plane = "".join(chr(code) for code in range(0x10000) if not 0xD800 <= code <= 0xDFFF)
    assert tokenizer.decode(tokenizer.encode(plane)) == plane


def test_snippets_were_held_out(snippets: list[Snippet]) -> None:
    assert len(snippets) >= 30
    assert all(SourceFile(snippet.path, snippet.text).is_held_out for snippet in snippets)
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    lengths = [len(tokenizer.encode(snippet.text)) for snippet in snippets]
    assert lengths == [snippet.num_tokens for snippet in snippets]
    # Short ones, ones that just fit the drafter's context, and ones that pass it but fit the target's.
    assert min(lengths) < 64
    assert any(400 < length < 512 for length in lengths)
    assert any(1024 < length < 2048 for length in lengths)


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the pair was trained on the source of Python 3.11")
def test_snippets_do_not_occur_in_the_training_text(snippets: list[Snippet]) -> None:
    train_text = "\0".join(file.text for file in read_files(default_source()) if not file.is_held_out)
    assert [snippet.path for snippet in snippets if snippet.text in train_text] == []


def test_quality_is_what_the_metrics_say(metrics: dict[str, Any]) -> None:
    """Catches weights, tokenizer, snippets and metrics of different runs lying side by side."""
    promised = metrics["held_out_snippets"]
    measured = evaluate_snippets(DEMO, device=torch.device("cpu"))
    assert measured.num_tokens == promised["num_tokens"]
    assert measured.acceptance >= 0.55
    assert measured.acceptance == pytest.approx(promised["acceptance"], abs=0.005)
    assert measured.greedy_agreement == pytest.approx(promised["greedy_agreement"], abs=0.01)
    assert measured.target_perplexity == pytest.approx(promised["target_perplexity"], rel=0.01)
    assert measured.draft_perplexity == pytest.approx(promised["draft_perplexity"], rel=0.01)


def test_promised_quality(metrics: dict[str, Any]) -> None:
    assert metrics["held_out_files"]["acceptance"] >= 0.60
    assert metrics["target_samples"]["acceptance"] >= 0.60
    assert metrics["held_out_files"]["target_perplexity"] < metrics["held_out_files"]["draft_perplexity"]
