"""The bytes of single tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tokenizers import Tokenizer as HuggingFaceTokenizer

from gateway.token_bytes import token_text
from gateway.tokenizer import Tokenizer
from tests.gateway import tokenizers_for_tests as kinds


@pytest.mark.parametrize("make", [kinds.byte_level, kinds.byte_fallback, kinds.metaspace])
def test_the_bytes_of_all_tokens_are_the_text(make: Callable[[], HuggingFaceTokenizer]) -> None:
    """Catches a space, or a part of a character, that is lost where tokens are shown one by one."""
    tokenizer = Tokenizer(make())
    text = "a the x中é" if make is not kinds.byte_level else kinds.TEXT + "\N{OGHAM SPACE MARK}⟨tool⟩"
    ids = tokenizer._encode(text)
    assert b"".join(tokenizer.token_bytes(token_id) for token_id in ids).decode().lstrip(" ") == text


def test_special_unknown_and_unfinished_tokens() -> None:
    tokenizer = Tokenizer(kinds.byte_level())
    assert tokenizer.token_bytes(0) == b"<s>"
    assert tokenizer.token_bytes(99_999) == b""
    assert token_text("é".encode()) == "é"
    assert token_text("é".encode()[:1]) == "bytes:\\xc3"
