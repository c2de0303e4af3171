"""Draft trees as frames bring them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from outrider.protocol.expansions import ROOT, Expansions
from verifier_service.draft_tree import SequenceExpansions
from verifier_service.frames import split_expansions


class Node(NamedTuple):
    """An expansion: the child of its parent that it continues, and its own children."""

    parent: int
    rank: int
    children: Sequence[int]


def expansions(
    *nodes: Node,
    num_committed: int,
    first_id: int = 0,
    sequence_id: int = 1,
    candidates: tuple[npt.NDArray[np.int32], npt.NDArray[np.uint16]] | None = None,
) -> SequenceExpansions:
    """Of one sequence, as if alone in a frame; `candidates` are ids and weights of q, [number of nodes, m]."""
    none = (np.empty((len(nodes), 0), np.int32), np.empty((len(nodes), 0), np.uint16))
    frame = Expansions(
        np.array([sequence_id], np.uint64),
        np.array([num_committed], np.int64),
        np.array([len(nodes)], np.int64),
        np.array([first_id], np.int64),
        np.array([node.parent for node in nodes], np.int32),
        np.array([node.rank for node in nodes], np.uint8),
        np.array([node.children for node in nodes], np.int32),
        np.zeros((len(nodes), len(nodes[0].children)), np.uint16),
        *(candidates or none),
    )
    (part,) = split_expansions(frame)
    return part


def chain(tokens: Sequence[int], first_id: int) -> list[Node]:
    """A root whose first child is the first token, that child with the second one as its own, and so on."""
    return [Node(first_id + place - 1 if place else ROOT, 0, [token_id]) for place, token_id in enumerate(tokens)]
