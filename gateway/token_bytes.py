"""The bytes that a single token stands for, which one token's text cannot always show."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# How vocabularies made by SentencePiece write a space.
_SPACE = "▁"


def _byte_characters() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for, as GPT-2 introduced it."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    characters = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return characters | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _byte_characters()


def token_bytes(token: str, *, is_added: bool, decoders: Collection[str], decode: Callable[[], str]) -> bytes:
    """What `token`, as the vocabulary writes it, contributes to a text in UTF-8.

    `decoders` are the types of the tokenizer's decoders. A token added to the vocabulary stands for itself. `decode`
    decodes the token alone, for vocabularies that write their tokens in another way.
    """
    if is_added:
        return token.encode()
    if "ByteLevel" in decoders and all(character in _BYTE_OF for character in token):
        return bytes(_BYTE_OF[character] for character in token)
    if "ByteFallback" in decoders and (match := _BYTE_TOKEN.fullmatch(token)):
        return bytes([int(match[1], 16)])
    if "Metaspace" in decoders or _SPACE in token:
        return token.replace(_SPACE, " ").encode()
    return decode().encode()


def token_text(data: bytes) -> str:
    """A token's bytes for people: its text, or `bytes:\\xe2\\x80` where they are no whole characters."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
