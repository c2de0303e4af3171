"""The target's tokenizer, read from tokenizer.json.

Uses the `tokenizers` package alone: `transformers` would bring torch into a service that has no use for it.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as HuggingFaceTokenizer

from gateway.detokenizer import Detokenizer, TokenKind
from gateway.served_model import ServedModel
from gateway.token_bytes import token_bytes
from outrider.protocol.errors import FailedPreconditionError
from outrider.protocol.fingerprint import tokenizer_digest
from outrider.service.settings import BadSettingsError

# Characters that are tokenized on the event loop: about 1 ms. A thread costs less than a longer text holds up others.
MAX_CHARACTERS_ON_LOOP = 2048

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Tokenizer:
    """Text to token ids and back."""

    def __init__(self, tokenizer: HuggingFaceTokenizer, *, fingerprint: str = "") -> None:
        # A tokenizer.json may carry the truncation and padding of its training: prompts are never cut in silence.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._fingerprint = fingerprint
        added = tokenizer.get_added_tokens_decoder()
        self._added = frozenset(added)
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        self._kinds: dict[int, TokenKind] = {}
        self._bytes: dict[int, bytes] = {}
        decoder = json.loads(tokenizer.to_str())["decoder"] or {}
        self._decoders = frozenset(part["type"] for part in (decoder, *decoder.get("decoders", ())))
        self.has_byte_fallback = "ByteFallback" in self._decoders

    @classmethod
    def from_directory(cls, directory: Path) -> Tokenizer:
        """The tokenizer of a model directory. Raises BadSettingsError when there is none."""
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise BadSettingsError(f"tokenizer: no file at {file}")
        try:
            return cls(HuggingFaceTokenizer.from_file(str(file)), fingerprint=tokenizer_digest(directory).fingerprint)
        except Exception as error:  # the package raises bare Exception for a file that does not parse
            raise BadSettingsError(f"tokenizer: {file} is no tokenizer: {error}") from error

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt, with the special tokens that the tokenizer's own template adds unless told not to."""
        if len(text) <= MAX_CHARACTERS_ON_LOOP:
            return self._encode(text, add_special_tokens)
        return await asyncio.to_thread(self._encode, text, add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, shows_special: bool = False) -> str:
        """The text of token ids, special tokens skipped unless they are to be shown."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=not shows_special)
        return text

    def is_special(self, token_id: int) -> bool:
        """Whether a token stands for itself and not for text."""
        return token_id in self._special

    def kind(self, token_id: int) -> TokenKind:
        """What a token means to the detokenizer."""
        kind = self._kinds.get(token_id)
        if kind is None:
            kind = self._kinds[token_id] = self._classify(token_id)
        return kind

    def token_bytes(self, token_id: int) -> bytes:
        """What one token contributes to a text, in UTF-8; a special token stands for itself, an unknown id is empty."""
        data = self._bytes.get(token_id)
        if data is None:
            token = self._tokenizer.id_to_token(token_id)
            data = self._bytes[token_id] = (
                b""
                if token is None
                else token_bytes(
                    token,
                    is_added=token_id in self._added,
                    decoders=self._decoders,
                    decode=lambda: self._tokenizer.decode([token_id]),
                )
            )
        return data

    def detokenizer(self, *, shows_special: bool = False) -> Detokenizer:
        """A detokenizer for one sequence."""
        return Detokenizer(_WithSpecialTokens(self) if shows_special else self)

    def check_fits(self, model: ServedModel) -> None:
        """Raise FailedPreconditionError when the model was made for another tokenizer."""
        if self._fingerprint and model.tokenizer_fingerprint and self._fingerprint != model.tokenizer_fingerprint:
            raise FailedPreconditionError(
                f"tokenizer_fingerprint: the gateway's tokenizer has {self._fingerprint}, "
                f"the verifier's {model.tokenizer_fingerprint}"
            )
        num_ids = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        if num_ids > model.vocabulary_size:
            raise FailedPreconditionError(
                f"vocabulary_size: the gateway's tokenizer has {num_ids} token ids, the model {model.vocabulary_size}"
            )

    def _encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def _classify(self, token_id: int) -> TokenKind:
        token = self._tokenizer.id_to_token(token_id)
        if not token or token_id in self._special:
            return TokenKind.SILENT
        if self.has_byte_fallback and _BYTE_TOKEN.fullmatch(token):
            return TokenKind.BYTE
        return TokenKind.TEXT


class _WithSpecialTokens:
    """The same vocabulary, special tokens being text like any other."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.has_byte_fallback = tokenizer.has_byte_fallback

    def kind(self, token_id: int) -> TokenKind:
        return TokenKind.TEXT if self._tokenizer.is_special(token_id) else self._tokenizer.kind(token_id)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, shows_special=True)
