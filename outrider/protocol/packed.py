"""Arrays as packed little-endian bytes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from outrider.protocol.errors import InvalidArgumentError

U8 = np.dtype("u1")
U16 = np.dtype("<u2")
U32 = np.dtype("<u4")
I32 = np.dtype("<i4")
U64 = np.dtype("<u8")


def pack(values: npt.ArrayLike, dtype: np.dtype[np.integer]) -> bytes:
    """The values one behind the other, the last axis first."""
    return np.ascontiguousarray(values, dtype=dtype).tobytes()


def unpack(
    field: str, data: bytes, dtype: np.dtype[np.integer], count: int | None = None
) -> npt.NDArray[np.integer]:  # [count], a view of the bytes
    """The values of a field, `count` of them unless it is None.

    Raises InvalidArgumentError, naming the field, when the bytes are no whole number of values, or of another number.
    """
    if len(data) % dtype.itemsize:
        raise InvalidArgumentError(field, f"{len(data)} bytes are no whole number of {dtype.itemsize}-byte values")
    found = np.frombuffer(data, dtype=dtype)
    if count is not None and len(found) != count:
        raise InvalidArgumentError(field, f"has {len(found)} values, and the fields beside it go with {count}")
    return found


def unpack_rows(
    field: str, data: bytes, dtype: np.dtype[np.integer], num_rows: int
) -> npt.NDArray[np.integer]:  # [num_rows, values a row], a view of the bytes
    """The values of a field that has the same number of them, perhaps none, for each of at least one row.

    Raises InvalidArgumentError, naming the field, when the bytes are of no such number.
    """
    if len(data) % (num_rows * dtype.itemsize):
        raise InvalidArgumentError(
            field, f"{len(data)} bytes do not go with {num_rows} rows of {dtype.itemsize}-byte values"
        )
    return np.frombuffer(data, dtype=dtype).reshape(num_rows, -1)
