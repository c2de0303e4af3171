"""What nobody would send: messages of extreme fields, cut and bent bytes; the same for the same seed."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

_INTEGERS = (0, 0, 1, 2, 3, 4, 16, 63, 64, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1)
_FLOATS = (0.0, 1.0, -1.0, 0.5, 0.7, 1e-30, 1e30, math.inf, -math.inf, math.nan, 2.0, 100.0)
_STRINGS = (
    "",
    "a",
    "127.0.0.1:1",
    "00-" + "1" * 32 + "-" + "2" * 16 + "-01",
    "\0",
    "ü\u2028\ufeff",
    "x" * 3000,
    "%s%n",
)
_BITS = {
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
}


class Fuzzer:
    """Draws messages and bytes; `ids` are small numbers that fields of integers often take, to hit what exists."""

    def __init__(self, seed: int, *, ids: Sequence[int] = (1, 2, 3)) -> None:
        self.chance = random.Random(seed)
        self._ids = ids

    def message(self, kind: type[Message], *, fill: float = 0.5, depth: int = 4) -> Any:
        """A message of this type, each field set with the probability `fill`, seldom to anything sensible."""
        message: Any = kind()
        for field in message.DESCRIPTOR.fields:
            if self.chance.random() < fill and (field.message_type is None or depth > 0):
                self._set(message, field, fill, depth)
        return message

    def bent(self, data: bytes) -> bytes:
        """Bytes of a good message, cut, lengthened, flipped, doubled or mixed with noise."""
        changed = bytearray(data)
        for _ in range(self.chance.randint(1, 4)):
            place = self.chance.randint(0, len(changed))
            match self.chance.randrange(6):
                case 0:
                    del changed[place:]
                case 1:
                    changed[place:place] = self.chance.randbytes(self.chance.randint(1, 9))
                case 2:
                    if place < len(changed):
                        changed[place] ^= 1 << self.chance.randrange(8)
                case 3:
                    changed += changed[place:]
                case 4:
                    # A length that promises more than there is.
                    changed[place:place] = b"\x0a\xff\xff\xff\xff\x07"
                case _:
                    del changed[place : place + self.chance.randint(1, 9)]
        return bytes(changed[: 1 << 14])

    def noise(self) -> bytes:
        """Random bytes, few or many."""
        return self.chance.randbytes(self.chance.choice((0, 1, 2, 3, 7, 20, 100, 5000)))

    def wire(self, kind: type[Message], good: Sequence[Message]) -> bytes:
        """Bytes for a method that takes messages of this type: noise, a bent good message or one of extreme fields."""
        match self.chance.randrange(4):
            case 0:
                return self.noise()
            case 1 | 2:
                return self.bent(self.chance.choice(good).SerializeToString())
            case _:
                data: bytes = self.message(kind, fill=self.chance.choice((0.2, 0.5, 0.9))).SerializeToString()
                return data

    def _set(self, message: Any, field: FieldDescriptor, fill: float, depth: int) -> None:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            for _ in range(self.chance.choice((1, 2, 301))):
                key, value = field.message_type.fields
                getattr(message, field.name)[self._scalar(key)] = self._scalar(value)
        elif field.is_repeated:
            values = getattr(message, field.name)
            for _ in range(self.chance.choice((1, 2, 3))):
                if field.message_type is not None:
                    values.append(self.message(GetMessageClass(field.message_type), fill=fill, depth=depth - 1))
                else:
                    values.append(self._scalar(field))
        elif field.message_type is not None:
            inner = self.message(GetMessageClass(field.message_type), fill=fill, depth=depth - 1)
            getattr(message, field.name).CopyFrom(inner)
        else:
            setattr(message, field.name, self._scalar(field))

    def _scalar(self, field: FieldDescriptor) -> Any:
        match field.cpp_type:
            case FieldDescriptor.CPPTYPE_BOOL:
                return self.chance.random() < 0.5
            case FieldDescriptor.CPPTYPE_FLOAT:
                return self.chance.choice(_FLOATS)
            case FieldDescriptor.CPPTYPE_DOUBLE:
                return self.chance.choice(_FLOATS)
            case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
                return self._packed()
            case FieldDescriptor.CPPTYPE_STRING:
                return self.chance.choice(_STRINGS)
            case FieldDescriptor.CPPTYPE_ENUM:
                return self.chance.choice((0, 1, 2, 3, 7, 99, -1))
            case kind:
                low, high = _BITS[kind]
                value = self.chance.choice(self._ids if self.chance.random() < 0.5 else _INTEGERS)
                return min(max(value, low), high)

    def _packed(self) -> bytes:
        """What stands for token ids, candidates or weights."""
        ids = [self.chance.choice((0, 1, 5, 15, 63, 64, 2**31, 2**32 - 1)) for _ in range(self.chance.randint(0, 6))]
        return self.chance.choice((struct.pack(f"<{len(ids)}I", *ids), struct.pack("<3I", 1, 2, 3), self.noise()))
