"""Verdicts on the wire: what the target committed of many sequences, packed into arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from outrider.protocol.errors import InvalidArgumentError
from outrider.protocol.packed import U32, U64, pack, unpack
from outrider.protocol.wire import pack_tokens
from outrider.v1 import drafter_pb2


@dataclass(slots=True, eq=False)
class Verdict:
    """What was committed of one sequence since the last verdict."""

    sequence_id: int
    num_committed: int  # in all, the new tokens included
    token_ids: Sequence[int]  # the new ones, at least one

    def check(self, length: int, vocabulary_size: int) -> None:
        """Raise InvalidArgumentError, naming the field, unless these are tokens that continue `length` committed ones.

        A vocabulary of size 0 has every id.
        """
        if not self.token_ids:
            raise InvalidArgumentError("verdicts.num_tokens", "must be at least 1")
        if length + len(self.token_ids) != self.num_committed:
            raise InvalidArgumentError(
                "verdicts.num_committed",
                f"is {self.num_committed}, but {length} tokens are committed and {len(self.token_ids)} are new",
            )
        if vocabulary_size and (largest := max(self.token_ids)) >= vocabulary_size:
            raise InvalidArgumentError(
                "verdicts.token_ids", f"{largest} is not below the vocabulary size {vocabulary_size}"
            )


def pack_verdicts(verdicts: Sequence[Verdict]) -> drafter_pb2.Verdicts:
    """For the wire. No sequence may stand among them twice: merge what was committed one behind the other."""
    return drafter_pb2.Verdicts(
        sequence_ids=pack([verdict.sequence_id for verdict in verdicts], U64),
        num_committed=pack([verdict.num_committed for verdict in verdicts], U64),
        num_tokens=pack([len(verdict.token_ids) for verdict in verdicts], U32),
        token_ids=pack_tokens([*chain.from_iterable(verdict.token_ids for verdict in verdicts)]),
    )


def unpack_verdicts(message: drafter_pb2.Verdicts) -> Iterator[Verdict]:
    """The verdicts, each still to be checked.

    Raises InvalidArgumentError, naming the field, when the arrays do not fit each other, or a sequence stands twice.
    """
    sequence_ids = unpack("verdicts.sequence_ids", message.sequence_ids, U64).tolist()
    if len(set(sequence_ids)) < len(sequence_ids):
        raise InvalidArgumentError("verdicts.sequence_ids", "a sequence stands twice in a frame")
    num_committed = unpack("verdicts.num_committed", message.num_committed, U64, len(sequence_ids)).tolist()
    num_tokens: npt.NDArray[np.integer] = unpack("verdicts.num_tokens", message.num_tokens, U32, len(sequence_ids))
    ends = np.cumsum(num_tokens, dtype=np.int64).tolist()
    token_ids = unpack("verdicts.token_ids", message.token_ids, U32, ends[-1] if ends else 0).tolist()
    starts = [0, *ends][: len(ends)]
    return (
        Verdict(sequence_id, committed, token_ids[start:end])
        for sequence_id, committed, start, end in zip(sequence_ids, num_committed, starts, ends, strict=True)
    )
