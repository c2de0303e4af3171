"""Token ids as the packed little-endian bytes of the protocol."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

PROTOCOL_VERSION = 3
# Most candidates of one draft token: bounds what a peer can make us check.
MAX_CANDIDATES = 1024

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
