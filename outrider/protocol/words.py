"""The protocol's enumerations as people read them, and as metrics label them: what comes behind the common prefix."""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol

from outrider.v1 import common_pb2


class ProtoEnum(Protocol):
    """An enumeration as protobuf generates it; the name of 0 is the common prefix and UNSPECIFIED."""

    def Name(self, number: int) -> str: ...  # protobuf's

    def values(self) -> list[int]: ...

    def __hash__(self) -> int: ...


@lru_cache(256)  # what a peer sends may be any number
def word(enum: ProtoEnum, number: int) -> str:
    """ACCEPTED for TOKEN_ORIGIN_ACCEPTED. Raises ValueError for a number that has no name."""
    return enum.Name(number).removeprefix(enum.Name(0).removesuffix("UNSPECIFIED"))


def labels(enum: ProtoEnum) -> dict[int, str]:
    """All words by their number, in lower case, but for UNSPECIFIED."""
    return {number: word(enum, number).lower() for number in enum.values() if number}


ORIGINS = labels(common_pb2.TokenOrigin)
FALLBACKS = labels(common_pb2.FallbackReason)
