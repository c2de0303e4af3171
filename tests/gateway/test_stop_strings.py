"""Stop strings against a plain search, whatever the pieces, and the token that completed one."""

from __future__ import annotations

import random

import pytest

from gateway.output_text import OutputText, Piece
from gateway.stop_strings import StopStrings
from gateway.tokenizer import Tokenizer
from tests.gateway import tokenizers_for_tests


def search(text: str, stop: list[str]) -> tuple[str, str | None]:
    """The text before the stop string that is complete first, the longest of those that end there."""
    for end in range(1, len(text) + 1):
        matches = [string for string in stop if text[:end].endswith(string)]
        if matches:
            longest = max(matches, key=len)
            return text[: end - len(longest)], longest
    return text, None


def test_equals_a_plain_search_however_the_text_is_cut() -> None:
    rng = random.Random(11)
    num_matches = num_misses = 0
    for _ in range(3000):
        text = "".join(rng.choices("ab\n", k=rng.randint(0, 25)))
        stop = ["".join(rng.choices("ab\n", k=rng.randint(1, 6))) for _ in range(rng.randint(1, 4))]
        matcher, sent, match, rest = StopStrings(stop), "", None, text
        while rest and match is None:
            length = rng.randint(0, 5)
            scan = matcher.push(rest[:length])
            rest = rest[length:]
            sent, match = sent + scan.text, scan.match
            expected_now, match_now = search(text[: len(text) - len(rest)], stop)
            assert match == match_now
            if match is None:
                # Held back is exactly what may begin a stop string, no more.
                held = expected_now[len(sent) :]
                tails = {expected_now[len(expected_now) - n :] for n in range(1, len(expected_now) + 1)}
                beginnings = {string[:n] for string in stop for n in range(1, len(string))}
                assert held == max(tails & beginnings, key=len, default="")
        if match is None:
            sent += matcher.finish()
        assert (sent, match) == search(text, stop)
        num_matches += match is not None
        num_misses += match is None
    assert min(num_matches, num_misses) > 300


def test_what_cannot_match_yet_is_text() -> None:
    """Catches a stop string that is lost behind one that did not count, or found where it must not be."""
    rng = random.Random(17)
    num_late = 0
    for _ in range(2000):
        text = "".join(rng.choices("ab", k=rng.randint(1, 25)))
        stop = ["".join(rng.choices("ab", k=rng.randint(1, 5))) for _ in range(rng.randint(1, 3))]
        boundary = rng.randint(0, len(text))
        matcher = StopStrings(stop)
        first = [text[start : min(start + 3, boundary)] for start in range(0, boundary, 3)]
        sent = "".join(matcher.push(part, can_match=False).text for part in first)
        scan = matcher.push(text[boundary:])
        sent += scan.text if scan.match is not None else scan.text + matcher.finish()
        ends = [
            (end, max(found, key=len))
            for end in range(boundary + 1, len(text) + 1)
            if (found := [string for string in stop if text[:end].endswith(string)])
        ]
        if ends:
            end, match = ends[0]
            assert (sent, scan.match) == (text[: end - len(match)], match)
            num_late += end - len(match) < boundary
        else:
            assert (sent, scan.match) == (text, None)
    assert num_late > 100


def test_tokens_below_the_minimum_complete_no_stop_string() -> None:
    tokenizer = Tokenizer(tokenizers_for_tests.byte_level())
    ids = tokenizer._encode("abab abab")
    ends = [len(tokenizer.decode(ids[:count])) for count in range(len(ids) + 1)]
    for min_tokens in range(len(ids) + 2):
        for size in (1, 2, len(ids)):
            output = OutputText(tokenizer.detokenizer(), ["b"], min_tokens=min_tokens)
            text, num_tokens, match = "", 0, None
            for start in range(0, len(ids), size):
                piece = output.push(ids[start : start + size])
                text, num_tokens, match = text + piece.text, num_tokens + piece.num_tokens, piece.stop_string
                if match:
                    break
            if match is None:
                text += output.finish().text
            found = "abab abab".find("b", ends[min(min_tokens, len(ids))])
            assert text == ("abab abab" if found < 0 else "abab abab"[:found])
            assert num_tokens == (len(ids) if found < 0 else next(n for n, end in enumerate(ends) if end > found))


def test_a_stop_string_that_is_included_ends_the_text() -> None:
    tokenizer = Tokenizer(tokenizers_for_tests.byte_level())
    ids = tokenizer._encode("return x\n    return")
    for size in (1, 3, len(ids)):
        output = OutputText(tokenizer.detokenizer(), ["x\n  "], includes_stop=True)
        pieces = []
        for start in range(0, len(ids), size):
            pieces.append(output.push_each(ids[start : start + size]))
            if pieces[-1][0].stop_string:
                break
        assert "".join(piece.text for piece, _ in pieces) == "return x\n  "
        assert "".join(text for _, texts in pieces for text in texts) == "return x\n  "


@pytest.mark.parametrize(("min_tokens", "is_stopped"), [(0, True), (1, True), (2, False)])
def test_what_was_held_back_may_end_the_text(min_tokens: int, is_stopped: bool) -> None:
    """An unfinished character shows only at the end, when its tokens are long gone."""
    tokenizer = Tokenizer(tokenizers_for_tests.byte_level())
    stop = "\N{REPLACEMENT CHARACTER}"
    output = OutputText(tokenizer.detokenizer(), [stop], min_tokens=min_tokens, includes_stop=True)
    piece = output.push(tokenizer._encode("ß")[:1])
    last = output.finish()
    assert piece.text + last.text == stop
    assert last.stop_string == (stop if is_stopped else None)


def test_long_repeating_stop_string_is_found() -> None:
    """The fall back from a failed partial match must not skip a match that began inside it."""
    stop = "a" * 600 + "b"
    matcher = StopStrings([stop])
    assert matcher.push("a" * 1000).text == "a" * 400
    scan = matcher.push("b tail")
    assert (scan.text, scan.match) == ("", stop)


def test_tokens_of_a_block_are_kept_up_to_the_one_that_completes_the_stop_string() -> None:
    tokenizer = Tokenizer(tokenizers_for_tests.byte_level())
    ids = tokenizer._encode("return x\n    return")
    for cut in range(len(ids)):
        text = OutputText(tokenizer.detokenizer(), ["x\n  ", "never"])
        first = text.push(ids[:cut])
        second = text.push(ids[cut:]) if first.stop_string is None else Piece("", 0)
        assert first.text + second.text == "return "
        assert {first.stop_string, second.stop_string} - {None} == {"x\n  "}
        num_tokens = first.num_tokens + second.num_tokens
        assert "x\n  " in tokenizer.decode(ids[:num_tokens])
        assert "x\n  " not in tokenizer.decode(ids[: num_tokens - 1])
        assert num_tokens < len(ids)


def test_random_tokens_equal_a_plain_search_of_the_full_text() -> None:
    """Detokenizer and stop strings together, bad bytes included."""
    rng = random.Random(5)
    num_matches = 0
    for make in (tokenizers_for_tests.byte_level, tokenizers_for_tests.byte_fallback):
        raw = make()
        tokenizer = Tokenizer(raw)
        for _ in range(300):
            ids = [rng.randrange(raw.get_vocab_size()) for _ in range(30)]
            full = tokenizer.decode(ids)
            start = rng.randrange(max(1, len(full)))
            stop = [full[start : start + rng.randint(1, 3)] or "a", "ab"]
            output, text, match, rest = OutputText(tokenizer.detokenizer(), stop), "", None, ids
            while rest and match is None:
                length = rng.randint(1, 5)
                piece = output.push(rest[:length])
                rest = rest[length:]
                text, match = text + piece.text, piece.stop_string
            if match is None:
                piece = output.finish()
                text, match = text + piece.text, piece.stop_string
            assert (text, match) == search(full, stop)
            num_matches += match is not None
    assert num_matches > 400


def test_without_a_detokenizer_there_is_no_text() -> None:
    output = OutputText(None, [])
    assert output.push([1, 2, 3]) == Piece("", 3)
    assert output.finish() == Piece("", 0)
