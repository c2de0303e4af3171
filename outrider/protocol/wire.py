"""What holds on every stream of the speculation protocol, and token ids as its packed little-endian bytes."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

PROTOCOL_VERSION = 3
# Most candidates of one draft token: bounds what a peer can make us check.
MAX_CANDIDATES = 1024
# What travels in units of 1 / WEIGHT_TOTAL.
WEIGHT_TOTAL = 1 << 16
# Most children of an expansion of the draft tree (F).
MAX_CHILDREN = 8
# Expansions of a sequence that both sides of a stream keep (E): at least, at most, and unless told otherwise.
MIN_EXPANSIONS = 64
MAX_EXPANSIONS = 4096
NUM_EXPANSIONS = 512
# No expansion stands for a position further than this beyond the committed ones that the drafter knows of.
MAX_DEPTH = 32

_TYPE_CODE = "I"  # 32 bits wherever Python runs
_IS_SWAPPED = sys.byteorder == "big"


def pack_tokens(token_ids: Sequence[int] | npt.NDArray[np.integer]) -> bytes:
    """Token ids as little-endian uint32."""
    # A step packs a few ids for each of many sequences, where numpy takes more than twice as long.
    packed = array(_TYPE_CODE, token_ids)
    if _IS_SWAPPED:
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(data: bytes) -> list[int]:
    """The token ids of `pack_tokens`. Raises ValueError when the length is no multiple of 4 bytes."""
    if len(data) % 4:
        raise ValueError(f"{len(data)} bytes are no whole number of 4-byte token ids")
    packed = array(_TYPE_CODE, data)
    if _IS_SWAPPED:
        packed.byteswap()
    return packed.tolist()
