"""Fingerprints are equal for equal models and tokenizers and differ for others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, models

from outrider.protocol.fingerprint import TokenizerDigest, model_revision, tokenizer_digest

VOCABULARY = {"a": 0, "b": 1, "ab": 2, "é 🙂": 3}


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def write_model(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 64}))
    weights = {"head": torch.arange(4000.0).view(40, 100), "tail": torch.ones(7), "nothing": torch.ones(0)}
    save_file(weights, path / "model.safetensors")
    return path


def test_revision_is_that_of_a_copy(model_path: Path, tmp_path: Path) -> None:
    copy = write_model(tmp_path / "copy")
    (copy / "config.json").write_text(
        json.dumps({"hidden_size": 64, "transformers_version": "9", "model_type": "llama"}, indent=2)
    )
    assert model_revision(copy) == model_revision(model_path)
    assert len(model_revision(model_path)) == 64


def test_revision_sees_config_weights_and_files(model_path: Path) -> None:
    revisions = {model_revision(model_path)}
    weights = load_file(model_path / "model.safetensors")
    weights["tail"][6] = 2.0
    save_file(weights, model_path / "model.safetensors")
    revisions.add(model_revision(model_path))
    save_file({**weights, "tail": torch.ones(7, 1)}, model_path / "model.safetensors")
    revisions.add(model_revision(model_path))
    save_file(weights, model_path / "more.safetensors")
    revisions.add(model_revision(model_path))
    (model_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 65}))
    revisions.add(model_revision(model_path))
    assert len(revisions) == 5


def test_damaged_weights(model_path: Path) -> None:
    (model_path / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(ValueError, match="not a safetensors file"):
        model_revision(model_path)


def test_missing_config(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"config\.json"):
        model_revision(tmp_path)


def write_tokenizer(path: Path, vocabulary: dict[str, int], added: tuple[str, ...] = ()) -> Path:
    path.mkdir()
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    tokenizer.add_special_tokens([AddedToken(token) for token in added])
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def test_tokenizer(tmp_path: Path) -> None:
    plain = tokenizer_digest(write_tokenizer(tmp_path / "plain", VOCABULARY))
    reordered = dict(reversed(VOCABULARY.items()))
    assert tokenizer_digest(write_tokenizer(tmp_path / "reordered", reordered)) == plain
    swapped = VOCABULARY | {"a": 1, "b": 0}
    others = [
        write_tokenizer(tmp_path / "swapped", swapped),
        write_tokenizer(tmp_path / "added", VOCABULARY, ("<eos>",)),
        write_tokenizer(tmp_path / "another", VOCABULARY, ("<end>",)),
    ]
    found = [tokenizer_digest(other) for other in others]
    assert len({plain.fingerprint, *(digest.fingerprint for digest in found)}) == 4
    assert [digest.num_token_ids for digest in (plain, *found)] == [len(VOCABULARY)] * 2 + [len(VOCABULARY) + 1] * 2


def test_no_tokenizer(tmp_path: Path) -> None:
    assert tokenizer_digest(tmp_path) == TokenizerDigest()


def test_damaged_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="cannot read"):
        tokenizer_digest(tmp_path)
