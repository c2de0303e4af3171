"""Digests that tell two services whether they hold the same model and speak the same tokens."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

# Keys of config.json that say who wrote the file, not what the model is.
_BOOKKEEPING_KEYS = ("_name_or_path", "transformers_version")
# So much of every tensor is hashed: two fine-tunings of one model differ nowhere but in their weights.
_SAMPLE_BYTES = 1024


def model_revision(model_path: Path) -> str:
    """Digest of a model: its config, its tensors' names, types and shapes, and the first bytes of each tensor.

    Reads a few kilobytes a tensor, whatever the model's size. `model_path` is a directory with config.json and
    safetensors files. Raises OSError where a file cannot be read and ValueError where one is damaged.
    """
    digest = hashlib.sha256()
    config = json.loads((model_path / "config.json").read_bytes())
    kept = {key: value for key, value in config.items() if key not in _BOOKKEEPING_KEYS}
    digest.update(json.dumps(kept, sort_keys=True).encode())
    for path in sorted(model_path.glob("*.safetensors")):
        _add_safetensors(digest, path)
    return digest.hexdigest()


@dataclass(frozen=True)
class TokenizerDigest:
    """What tells two tokenizers apart."""

    fingerprint: str = ""
    """Digest of the vocabulary, added tokens included; empty without a tokenizer. Where it is equal, each token id
    stands for the same token."""
    num_token_ids: int = 0
    """The largest id plus 1: a model's ids beyond are padding."""


def tokenizer_digest(model_path: Path) -> TokenizerDigest:
    """Of the model's tokenizer.json. Raises ValueError for a damaged file."""
    path = model_path / "tokenizer.json"
    if not path.is_file():
        return TokenizerDigest()
    # Here and not above: a service without a tokenizer need not load the library.
    from tokenizers import Tokenizer

    try:
        vocabulary = Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"cannot read {path}: {error}") from error
    fingerprint = hashlib.sha256(json.dumps(sorted(vocabulary.items())).encode()).hexdigest()
    return TokenizerDigest(fingerprint, max(vocabulary.values(), default=-1) + 1)


def _add_safetensors(digest: hashlib._Hash, path: Path) -> None:
    size = path.stat().st_size
    digest.update(f"{path.name} {size}".encode())
    with path.open("rb") as file:
        # The format: header length as 8 bytes little-endian, header as JSON, then the tensors' bytes.
        header_size = int.from_bytes(file.read(8), "little")
        if header_size > size:
            raise ValueError(f"{path} is not a safetensors file")
        header_bytes = file.read(header_size)
        digest.update(header_bytes)
        header = json.loads(header_bytes)
        header.pop("__metadata__", None)
        for begin, end in sorted(tuple(tensor["data_offsets"]) for tensor in header.values()):
            file.seek(8 + header_size + begin)
            digest.update(file.read(min(_SAMPLE_BYTES, end - begin)))
