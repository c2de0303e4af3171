"""Token ids and weights as the packed little-endian bytes of the protocol."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

PROTOCOL_VERSION = 2
# Most candidates of one draft token: bounds what a peer can make us check.
MAX_CANDIDATES = 1024

_TYPE_CODE = "I"  # 32 bits wherever Python runs
_IS_SWAPPED = sys.byteorder == "big"
# How numpy reads packed token ids: those from 2**31 on come out below zero, which no vocabulary has.
SIGNED_TOKEN = np.dtype("<i4")
_WEIGHT = np.dtype("<u2")


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


def pack_candidates(
    candidate_ids: npt.NDArray[np.integer],  # [num_tokens, m]
    candidate_weights: npt.NDArray[np.integer],  # [num_tokens, m], rows sum to 65,536 or are all zero
) -> tuple[bytes, bytes]:
    """q of a proposal for the wire: (ids, weights).

    A weight of 65,536 does not fit 16 bits and becomes 0; a row that has one is certain, which all zeros say.
    """
    weights = candidate_weights.astype(_WEIGHT, copy=False)
    # Signed, as they come: the bits are the same, and no copy is made.
    return candidate_ids.astype(SIGNED_TOKEN, copy=False).tobytes(), weights.tobytes()


def unpack_candidates(
    ids: bytes, weights: bytes, num_tokens: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint16]]:
    """(candidate ids, candidate weights), views of the bytes, both [num_tokens, m], m = 0 when both are empty.

    Raises ValueError as `candidates_per_token` does.
    """
    shape = (num_tokens, candidates_per_token(len(ids), len(weights), num_tokens))
    return (
        np.frombuffer(ids, dtype=SIGNED_TOKEN).reshape(shape),
        np.frombuffer(weights, dtype=_WEIGHT).reshape(shape),
    )


def candidates_per_token(num_id_bytes: int, num_weight_bytes: int, num_tokens: int) -> int:
    """How many candidates, m, each of the draft tokens has in so many packed bytes.

    Raises ValueError when the two lengths do not fit `num_tokens` or each other, or m is above MAX_CANDIDATES.
    """
    per_token, remainder = divmod(num_weight_bytes, 2 * num_tokens)
    if remainder or num_id_bytes != 2 * num_weight_bytes:
        raise ValueError(
            f"{num_id_bytes} bytes of ids and {num_weight_bytes} of weights do not fit {num_tokens} draft tokens"
        )
    if per_token > MAX_CANDIDATES:
        raise ValueError(f"{per_token} candidates a draft token, at most {MAX_CANDIDATES} are taken")
    return per_token
