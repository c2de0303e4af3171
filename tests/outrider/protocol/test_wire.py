"""Token ids and q as packed bytes."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.protocol.wire import MAX_CANDIDATES, pack_candidates, pack_tokens, unpack_candidates, unpack_tokens


def test_tokens_are_little_endian() -> None:
    assert pack_tokens([1, 0x01020304]) == b"\1\0\0\0\4\3\2\1"
    assert pack_tokens([]) == b""
    assert unpack_tokens(b"\1\0\0\0\xff\xff\xff\xff") == [1, 2**32 - 1]
    assert unpack_tokens(pack_tokens(np.array([7, 8], dtype=np.int32))) == [7, 8]


def test_bytes_that_are_no_tokens() -> None:
    with pytest.raises(ValueError, match="5 bytes"):
        unpack_tokens(b"12345")


def test_candidates_come_back_as_they_were() -> None:
    ids = np.array([[5, 6, 0], [70000, 1, 2]], dtype=np.int32)
    weights = np.array([[65535, 1, 0], [30000, 30000, 5536]], dtype=np.int32)
    packed = pack_candidates(ids, weights)
    assert [len(part) for part in packed] == [24, 12]
    found_ids, found_weights = unpack_candidates(*packed, 2)
    np.testing.assert_array_equal(found_ids, ids)
    np.testing.assert_array_equal(found_weights, weights)


def test_a_certain_token_is_all_zeros() -> None:
    """Catches 65,536 wrapping around to 0 beside other weights, or being cut to 65,535."""
    ids = np.array([[5, 6]], dtype=np.int32)
    _, weights = unpack_candidates(*pack_candidates(ids, np.array([[1 << 16, 0]])), 1)
    assert weights.tolist() == [[0, 0]]


def test_no_candidates_at_all() -> None:
    ids, weights = unpack_candidates(b"", b"", 3)
    assert ids.shape == weights.shape == (3, 0)


@pytest.mark.parametrize(
    ("num_ids", "num_weights", "num_tokens"),
    [(1, 0, 1), (0, 1, 1), (3, 3, 2), (4, 2, 2), (MAX_CANDIDATES + 1, MAX_CANDIDATES + 1, 1)],
)
def test_candidates_that_do_not_fit(num_ids: int, num_weights: int, num_tokens: int) -> None:
    with pytest.raises(ValueError, match=r"candidates|fit"):
        unpack_candidates(b"\0" * 4 * num_ids, b"\0" * 2 * num_weights, num_tokens)
    with pytest.raises(ValueError, match="fit"):
        unpack_candidates(b"\0" * (4 * num_ids + 1), b"\0" * 2 * num_weights, num_tokens)
