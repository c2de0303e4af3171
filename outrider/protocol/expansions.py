"""The expansions of draft trees on the wire: many sequences', packed into arrays and checked as a whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from outrider.protocol.candidates import BadRows, find_bad_candidates
from outrider.protocol.errors import InvalidArgumentError
from outrider.protocol.handshake import DraftLimits
from outrider.protocol.packed import I32, U8, U16, U32, U64, pack, unpack, unpack_rows
from outrider.v1 import drafter_pb2

# The parent of an expansion that stands for the last committed token.
ROOT = -1
# Ids fit into 32 bits with a sign, as parents do.
_MAX_ID = (1 << 31) - 1


def _no_candidates(dtype: type[np.integer]) -> npt.NDArray[np.integer]:
    return np.empty((0, 0), dtype)


@dataclass(slots=True, eq=False)
class Expansions:
    """New expansions of S sequences, N of them, with F children each: `drafter_pb2.Expansions` as arrays."""

    sequence_ids: npt.NDArray[np.uint64]  # [S]
    num_committed: npt.NDArray[np.int64]  # [S], as the drafter knew when it made them
    num_expansions: npt.NDArray[np.int64]  # [S]
    first_ids: npt.NDArray[np.int64]  # [S]
    parents: npt.NDArray[np.int32]  # [N], ids, ROOT for a root
    ranks: npt.NDArray[np.uint8]  # [N]
    child_ids: npt.NDArray[np.int32]  # [N, F], the first child first
    probabilities: npt.NDArray[np.uint16]  # [N, F], in units of 1/65,536
    candidate_ids: npt.NDArray[np.int32]  # [N, m], of q of the first child; m is 0 where it is certain
    candidate_weights: npt.NDArray[np.uint16]  # [N, m], in units of 1/65,536
    ends: npt.NDArray[np.int64] = field(init=False)  # [S], where each sequence's expansions end

    def __post_init__(self) -> None:
        self.ends = np.cumsum(self.num_expansions)

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """[N], the expansions' own ids."""
        starts = self.ends - self.num_expansions
        return np.repeat(self.first_ids - starts, self.num_expansions) + np.arange(len(self.parents))


def pack_expansions(expansions: Expansions) -> drafter_pb2.Expansions:
    """For the wire. A weight of 65,536 must have become 0, as one that takes everything needs no candidates."""
    return drafter_pb2.Expansions(
        sequence_ids=pack(expansions.sequence_ids, U64),
        num_committed=pack(expansions.num_committed, U64),
        num_expansions=pack(expansions.num_expansions, U32),
        first_ids=pack(expansions.first_ids, U32),
        parents=pack(expansions.parents, I32),
        ranks=pack(expansions.ranks, U8),
        # Signed, as they come: the bits are the same, and no copy is made.
        child_ids=pack(expansions.child_ids, I32),
        probabilities=pack(expansions.probabilities, U16),
        candidate_ids=pack(expansions.candidate_ids, I32),
        candidate_weights=pack(expansions.candidate_weights, U16),
    )


def unpack_expansions(
    message: drafter_pb2.Expansions, *, vocabulary_size: int, limits: DraftLimits
) -> tuple[Expansions, Mapping[int, InvalidArgumentError]]:
    """The arrays, views of the message's bytes, and for each sequence that is bad, by its index, what is wrong with it.

    Everything is checked that a frame alone can show, so that what is not bad may be written into arrays of the agreed
    size: whether ids and counts are in range, parents came before, children are tokens and different, and q is a
    distribution of the first child. Whether a parent exists, or anything stands at its place, only the tree knows.

    Raises InvalidArgumentError, naming the field, when the arrays do not fit each other.
    """
    sequence_ids = unpack("sequence_ids", message.sequence_ids, U64)
    num_sequences = len(sequence_ids)
    num_committed = unpack("num_committed", message.num_committed, U64, num_sequences)
    num_expansions = unpack("num_expansions", message.num_expansions, U32, num_sequences).astype(np.int64)
    first_ids = unpack("first_ids", message.first_ids, U32, num_sequences).astype(np.int64)
    num_nodes = int(num_expansions.sum())
    parents = unpack("parents", message.parents, I32, num_nodes)
    ranks = unpack("ranks", message.ranks, U8, num_nodes)
    if num_nodes:
        child_ids = unpack_rows("child_ids", message.child_ids, I32, num_nodes)
        probabilities = unpack_rows("probabilities", message.probabilities, U16, num_nodes)
        candidate_ids = unpack_rows("candidate_ids", message.candidate_ids, I32, num_nodes)
        candidate_weights = unpack_rows("candidate_weights", message.candidate_weights, U16, num_nodes)
    else:
        child_ids, probabilities = _no_candidates(np.int32), _no_candidates(np.uint16)
        candidate_ids, candidate_weights = child_ids, probabilities
    for name, rows, beside in (
        ("probabilities", probabilities, child_ids),
        ("candidate_weights", candidate_weights, candidate_ids),
    ):
        if rows.shape != beside.shape:
            raise InvalidArgumentError(name, f"has {rows.shape[1]} values a row, and there are {beside.shape[1]} ids")
    expansions = Expansions(
        sequence_ids,  # type: ignore[arg-type]
        num_committed.view(np.int64),
        num_expansions,
        first_ids,
        parents,  # type: ignore[arg-type]
        ranks,  # type: ignore[arg-type]
        child_ids,  # type: ignore[arg-type]
        probabilities,  # type: ignore[arg-type]
        candidate_ids,  # type: ignore[arg-type]
        candidate_weights,  # type: ignore[arg-type]
    )
    errors: dict[int, InvalidArgumentError] = {}
    for name, is_bad, problem in _bad_sequences(expansions, limits):
        _note(errors, np.flatnonzero(is_bad), name, problem)
    if num_nodes and len(errors) < num_sequences:
        for name, is_bad, problem in _bad_nodes(expansions, vocabulary_size, limits):
            _note(errors, np.searchsorted(expansions.ends, np.flatnonzero(is_bad), side="right"), name, problem)
    return expansions, errors


def _note(errors: dict[int, InvalidArgumentError], indexes: npt.NDArray[np.intp], name: str, problem: str) -> None:
    for index in indexes.tolist():
        errors.setdefault(index, InvalidArgumentError(name, problem))


def _bad_sequences(expansions: Expansions, limits: DraftLimits) -> Iterator[BadRows]:
    """Of the arrays with a value for each sequence."""
    num_sequences = len(expansions.sequence_ids)
    num_expansions = expansions.num_expansions
    everywhere = np.ones(num_sequences, np.bool_)
    if not 1 <= (num_children := expansions.child_ids.shape[1]) <= limits.num_children:
        yield "child_ids", everywhere, f"{num_children} children, must be 1 to {limits.num_children}"
    if (num_candidates := expansions.candidate_ids.shape[1]) > limits.max_candidates:
        most = limits.max_candidates
        yield "candidate_ids", everywhere, f"{num_candidates} candidates, at most {most} were agreed upon"
    is_bad = (num_expansions < 1) | (num_expansions > limits.max_expansions)
    yield "num_expansions", is_bad, f"must be 1 to {limits.max_expansions}"
    yield "first_ids", expansions.first_ids > _MAX_ID - num_expansions, f"an id is above {_MAX_ID}"
    yield "num_committed", expansions.num_committed < 1, "must be at least 1, and no more than fits 63 bits"
    in_order = np.sort(expansions.sequence_ids)
    if (in_order[1:] == in_order[:-1]).any():
        _, places, counts = np.unique(expansions.sequence_ids, return_inverse=True, return_counts=True)
        yield "sequence_ids", counts[places] > 1, "stands twice in a frame"


def _bad_nodes(expansions: Expansions, vocabulary_size: int, limits: DraftLimits) -> Iterator[BadRows]:
    """Of the arrays with a value, or a row of them, for each expansion."""
    parents, ranks, child_ids = expansions.parents, expansions.ranks, expansions.child_ids
    is_bad = (parents < ROOT) | (parents >= expansions.ids)
    yield "parents", is_bad, "must be an id below the expansion's own, or -1"
    is_bad = ranks >= np.where(parents == ROOT, 1, limits.num_children)
    yield "ranks", is_bad, f"must be below {limits.num_children}, and 0 for a root"
    is_unknown = child_ids.view(np.uint32) >= vocabulary_size
    yield "child_ids", np.any(is_unknown, axis=1), f"an id is not below the vocabulary size {vocabulary_size}"
    if child_ids.shape[1] > 1:
        in_order = np.sort(child_ids, axis=1)
        yield "child_ids", np.any(in_order[:, 1:] == in_order[:, :-1], axis=1), "a child stands twice"
    yield from find_bad_candidates(
        child_ids[:, 0], expansions.candidate_ids, expansions.candidate_weights, vocabulary_size
    )
