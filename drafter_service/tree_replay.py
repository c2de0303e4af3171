"""What a replay of passes over draft trees has made, on its way back from the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True)
class PassArrays:
    """One pass's part of the arrays that a device fills: `kernels.draft_trees.TreePass` says what they mean."""

    OF_SEQUENCES: ClassVar = ("lengths", "stand_positions", "num_new", "first_places", "num_told", "first_ids")
    OF_PLACES: ClassVar = ("parents", "ranks")

    arrays: Mapping[str, npt.NDArray[Any]]
    index: int

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self.arrays[f"{name}.{self.index}"]

    def __contains__(self, name: str) -> bool:
        return f"{name}.{self.index}" in self.arrays


@dataclass(slots=True)
class Grown:
    """What a replay made of its trees; S are its sequences, N the expansions that verifiers are told of.

    These stand together by sequence, in the order of the sequences and of their ids, which are consecutive.
    """

    lengths: npt.NDArray[np.int64]  # [S], committed tokens that the passes knew of
    stand_positions: npt.NDArray[np.int64]  # [S], where the trees stand; below lengths - 1: tokens are missing
    is_idle: npt.NDArray[np.bool_]  # [S], nothing was worth a row any more
    last_ids: npt.NDArray[np.int64]  # [S], no expansion has a higher one
    num_told: npt.NDArray[np.int64]  # [S]
    first_ids: npt.NDArray[np.int64]  # [S], where there are any
    parents: npt.NDArray[np.int32]  # [N]
    ranks: npt.NDArray[np.uint8]  # [N]
    child_ids: npt.NDArray[np.int32]  # [N, F]
    probabilities: npt.NDArray[np.uint16]  # [N, F]
    candidate_ids: npt.NDArray[np.int32] | None  # [N, m]; None where nobody wanted them
    candidate_weights: npt.NDArray[np.uint16] | None  # [N, m]


class TreeReplay:
    """A replay that the device works on, or has done."""

    def __init__(
        self,
        num_rows: int,
        passes: Sequence[PassArrays],
        event: torch.cuda.Event | None,  # of the device's having come so far; None: it is over
    ) -> None:
        self._num_rows = num_rows
        self._passes = passes
        self._event = event

    @property
    def is_done(self) -> bool:
        """Whether `collect` would not wait."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def collect(self) -> Grown:
        """What was made, as copies: the arrays are filled anew by the replay after the next. Waits for the device;
        raises what it raised."""
        if self._event is not None:
            self._event.synchronize()
        num_rows, passes = self._num_rows, self._passes
        rows = slice(num_rows)

        def each(name: str) -> npt.NDArray[np.int64]:  # [num_passes, S]
            return np.stack([part[name][rows] for part in passes]).astype(np.int64)

        first, num_new, num_told, first_ids = each("first_places"), each("num_new"), each("num_told"), each("first_ids")
        is_told = np.concatenate(
            [
                (place >= first[index, :, None]) & (place < (first[index] + num_told[index])[:, None])
                for index, part in enumerate(passes)
                for place in (np.arange(part["parents"].shape[1]),)
            ],
            axis=1,
        )

        def told(name: str) -> npt.NDArray[Any]:  # [N, ...]
            # By sequence, then by pass and place, which is the order of the ids.
            widths = [part["parents"].shape[1] for part in passes]
            # Values of places stand either by sequence and place or by token, which is the same order.
            parts = [
                part[name].reshape(len(part["lengths"]), width, -1)[rows]
                for part, width in zip(passes, widths, strict=True)
            ]
            values: npt.NDArray[Any] = np.concatenate(parts, axis=1)[is_told]
            return values

        has_candidates = "candidate_ids" in passes[0]
        return Grown(
            lengths=each("lengths")[-1],
            stand_positions=each("stand_positions")[-1],
            is_idle=num_new[-1] == 0,
            last_ids=first_ids[-1] - first[-1] + num_new[-1] - 1,
            num_told=num_told.sum(axis=0),
            first_ids=np.take_along_axis(first_ids, (num_told > 0).argmax(axis=0)[None], axis=0)[0],
            parents=told("parents")[:, 0],
            ranks=told("ranks")[:, 0].astype(np.uint8),
            child_ids=told("child_ids"),
            probabilities=told("probabilities").view(np.uint16),
            candidate_ids=told("candidate_ids") if has_candidates else None,
            candidate_weights=told("candidate_weights").view(np.uint16) if has_candidates else None,
        )
