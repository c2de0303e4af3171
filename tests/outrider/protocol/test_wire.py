"""Token ids as packed bytes, and the protocol's limits."""

from __future__ import annotations

import numpy as np
import pytest

from kernels import draft_trees, limits
from outrider.protocol import wire
from outrider.protocol.wire import pack_tokens, unpack_tokens


def test_tokens_are_little_endian() -> None:
    assert pack_tokens([1, 0x01020304]) == b"\1\0\0\0\4\3\2\1"
    assert pack_tokens([]) == b""
    assert unpack_tokens(b"\1\0\0\0\xff\xff\xff\xff") == [1, 2**32 - 1]
    assert unpack_tokens(pack_tokens(np.array([7, 8], dtype=np.int32))) == [7, 8]


def test_bytes_that_are_no_tokens() -> None:
    with pytest.raises(ValueError, match="5 bytes"):
        unpack_tokens(b"12345")


@pytest.mark.parametrize(
    ("ours", "kernels"),
    [
        pytest.param(wire.WEIGHT_TOTAL, limits.WEIGHT_TOTAL, id="units of probabilities"),
        pytest.param(wire.MAX_CHILDREN, limits.MAX_OUTCOMES, id="children of an expansion"),
        pytest.param(wire.MAX_DEPTH, draft_trees.MAX_DEPTH, id="depth of a draft tree"),
    ],
)
def test_the_wire_and_the_kernels_have_the_same_limits(ours: int, kernels: int) -> None:
    """Neither knows of the other."""
    assert ours == kernels
