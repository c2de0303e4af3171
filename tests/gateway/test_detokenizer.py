"""Incremental detokenization equals decoding everything at once, for every kind of decoder."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from tokenizers import Tokenizer as HuggingFaceTokenizer

from gateway.detokenizer import REPLACEMENT
from gateway.tokenizer import Tokenizer
from tests.gateway import tokenizers_for_tests
from tests.gateway.tokenizers_for_tests import TEXT, id_of


def pieces_of(
    tokenizer: Tokenizer, token_ids: list[int], rng: random.Random, *, shows_special: bool = False
) -> list[str]:
    """The pieces that come out when the tokens go in by steps of one to six."""
    detokenizer = tokenizer.detokenizer(shows_special=shows_special)
    pieces, start = [], 0
    while start < len(token_ids):
        length = rng.randint(1, 6)
        pieces.append(detokenizer.push(token_ids[start : start + length]))
        start += length
    return [*pieces, detokenizer.finish()]


def random_ids(raw: HuggingFaceTokenizer, rng: random.Random) -> list[int]:
    """Tokens of any kind: special ones, raw bytes (mostly no UTF-8), text, ids past the vocabulary."""
    size = raw.get_vocab_size()
    ids: list[int] = []
    while len(ids) < 60:
        match rng.randrange(5):
            case 0:
                ids += [rng.randrange(3)] * rng.randint(1, 2)
            case 1:
                ids += [rng.randrange(size) for _ in range(rng.randint(1, 4))]
            case 2:
                ids += [size - 1 - rng.randrange(min(size, 20)) for _ in range(3)]
            case 3:
                # One character as its bytes, sometimes cut short.
                token_ids = [raw.token_to_id(f"<0x{byte:02X}>") for byte in "👧".encode()[: rng.randint(2, 4)]]
                ids += [token_id for token_id in token_ids if token_id is not None]
            case _:
                ids.append(size + rng.randrange(10))
    return ids


@pytest.mark.parametrize("shows_special", [False, True])
@pytest.mark.parametrize("name", tokenizers_for_tests.ALL)
def test_pieces_join_to_the_full_decode(name: str, shows_special: bool) -> None:
    """Catches lost leading spaces, characters split between steps, byte runs that turn out bad, and unflushed ends."""
    raw = tokenizers_for_tests.ALL[name]()
    tokenizer = Tokenizer(raw)
    rng = random.Random(7)
    num_with_replacements = num_with_spaces = 0
    for _ in range(400):
        ids = random_ids(raw, rng)
        expected = raw.decode(ids, skip_special_tokens=not shows_special)
        assert "".join(pieces_of(tokenizer, ids, rng, shows_special=shows_special)) == expected
        num_with_replacements += REPLACEMENT in expected
        num_with_spaces += " " in expected
    assert num_with_spaces > 100
    if name.startswith("byte"):
        assert num_with_replacements > 100


@pytest.mark.parametrize("make", [tokenizers_for_tests.byte_level, tokenizers_for_tests.byte_fallback])
def test_no_piece_shows_part_of_a_character(make: Callable[[], HuggingFaceTokenizer]) -> None:
    raw = make()
    tokenizer, rng = Tokenizer(raw), random.Random(3)
    if raw.token_to_id("<0x41>") is None:
        ids = raw.encode(TEXT * 3).ids
    else:
        ids = [id_of(raw, f"<0x{byte:02X}>") for byte in (TEXT * 3).encode()]
    text = raw.decode(ids)
    assert "👩‍👩‍👧" in text
    for _ in range(20):
        pieces = pieces_of(tokenizer, ids, rng)
        assert "".join(pieces) == text
        assert not any(REPLACEMENT in piece for piece in pieces)


def test_text_is_handed_out_as_soon_as_it_is_certain() -> None:
    tokenizer = Tokenizer(tokenizers_for_tests.byte_level())
    detokenizer = tokenizer.detokenizer()
    assert [detokenizer.push([token_id]) for token_id in tokenizer._encode("fox")] != ["", "", ""]
    emoji = [id_of(tokenizers_for_tests.byte_level(), c) for c in "ðŁĳ§"]  # the bytes f0 9f 91 a7
    assert [detokenizer.push([token_id]) for token_id in emoji] == ["", "", "", "👧"]
    assert detokenizer.finish() == ""


def test_a_run_of_byte_tokens_waits_for_its_end() -> None:
    """One bad byte turns its whole run into replacements, so none of a run is certain before the run ends."""
    raw = tokenizers_for_tests.byte_fallback()
    detokenizer = Tokenizer(raw).detokenizer()
    run = [id_of(raw, f"<0x{byte:02X}>") for byte in "é".encode()]
    assert detokenizer.push(run) == ""
    assert detokenizer.push([id_of(raw, "a")]) == "éa"
    assert detokenizer.push(run) == ""
    assert detokenizer.push([id_of(raw, "<0xFF>"), id_of(raw, "▁a")]) == REPLACEMENT * 3 + " a"


def test_leading_space_goes_once_and_only_at_the_start() -> None:
    for make in (tokenizers_for_tests.byte_fallback, tokenizers_for_tests.metaspace):
        raw = make()
        detokenizer = Tokenizer(raw).detokenizer()
        the, special = id_of(raw, "▁the"), id_of(raw, "</s>")
        assert [detokenizer.push([token_id]) for token_id in (special, the, special, the)] == ["", "the", "", " the"]


def test_endless_bad_bytes_cost_the_same_each_step() -> None:
    """A model that repeats a lone byte must not make each step decode all of them again."""
    raw = tokenizers_for_tests.byte_level()
    tokenizer = Tokenizer(raw)
    detokenizer = tokenizer.detokenizer()
    lone = id_of(raw, "Ł")  # the byte 9f
    text = ""
    for _ in range(500):
        text += detokenizer.push([lone])
        assert len(detokenizer._window) <= 6
    assert text + detokenizer.finish() == REPLACEMENT * 500


def test_a_copy_goes_its_own_way() -> None:
    raw = tokenizers_for_tests.byte_level()
    detokenizer = Tokenizer(raw).detokenizer()
    first, second = id_of(raw, "Ã"), id_of(raw, "©")  # the bytes of é
    detokenizer.push([first])
    twin = detokenizer.copy()
    assert twin.push([second]) == "é"
    assert detokenizer.finish() == REPLACEMENT
