"""Verdicts of many sequences in one frame."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.protocol.errors import InvalidArgumentError
from outrider.protocol.verdicts import Verdict, pack_verdicts, unpack_verdicts
from outrider.v1 import drafter_pb2

VERDICTS = [
    Verdict(7, 12, [1, 2, 3]),
    Verdict(2**64 - 1, 2**40, [2**32 - 1]),
    Verdict(0, 5, [4, 5]),
]


def told(verdicts: list[Verdict]) -> list[tuple[int, int, list[int]]]:
    return [(verdict.sequence_id, verdict.num_committed, list(verdict.token_ids)) for verdict in verdicts]


@pytest.mark.parametrize("number", [0, 1, 3])
def test_they_come_back_as_they_were(number: int) -> None:
    """Catches tokens that become the next sequence's."""
    message = pack_verdicts(VERDICTS[:number])
    again = drafter_pb2.Verdicts.FromString(message.SerializeToString())
    assert told([*unpack_verdicts(again)]) == told(VERDICTS[:number])


def test_the_bytes_are_little_endian_and_without_separators() -> None:
    """What another language must write."""
    message = pack_verdicts([Verdict(1, 0x0203, [4, 5]), Verdict(6, 9, [7])])
    assert message.sequence_ids.hex() == "01000000000000000600000000000000"
    assert message.num_committed.hex() == "03020000000000000900000000000000"
    assert message.num_tokens.hex() == "0200000001000000"
    assert message.token_ids.hex() == "040000000500000007000000"


@pytest.mark.parametrize(
    ("field", "data", "problem"),
    [
        ("sequence_ids", b"\1", "whole number of 8-byte values"),
        ("sequence_ids", np.array([7, 7, 0], "<u8").tobytes(), "stands twice"),
        ("num_committed", b"\1" * 16, "go with 3"),
        ("num_tokens", b"\1" * 8, "go with 3"),
        ("num_tokens", np.array([3, 1, 1], "<u4").tobytes(), "go with 5"),
        ("num_tokens", b"\xff" * 12, "go with"),
        ("token_ids", b"\1" * 23, "whole number of 4-byte values"),
        ("token_ids", b"", "go with 6"),
    ],
)
def test_arrays_that_do_not_fit_each_other(field: str, data: bytes, problem: str) -> None:
    """Catches one that is read beyond its end, or of which a part is left over."""
    message = pack_verdicts(VERDICTS)
    setattr(message, field, data)
    with pytest.raises(InvalidArgumentError, match=problem) as caught:
        [*unpack_verdicts(message)]
    assert caught.value.field == f"verdicts.{'token_ids' if field == 'num_tokens' and len(data) == 12 else field}"


@pytest.mark.parametrize(
    ("verdict", "field"),
    [
        (Verdict(1, 4, []), "num_tokens"),
        (Verdict(1, 6, [1]), "num_committed"),
        (Verdict(1, 4, [1]), "num_committed"),
        (Verdict(1, 2**64 - 1, [1]), "num_committed"),
        (Verdict(1, 5, [64]), "token_ids"),
    ],
)
def test_what_does_not_continue_a_sequence_is_refused(verdict: Verdict, field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        verdict.check(4, 64)
    assert caught.value.field == f"verdicts.{field}"


def test_what_continues_a_sequence() -> None:
    Verdict(1, 6, [63, 0]).check(4, 64)
    Verdict(1, 5, [2**32 - 1]).check(4, 0)
