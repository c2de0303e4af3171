"""Passes of a step on their way back from the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.step import PassKind, PositionLogprobs, Sampled


@dataclass(frozen=True)
class RowLogprobs:
    """Log-probabilities of some rows of a pass, all of their positions behind each other."""

    # By row of the pass: its first position, and how many tokens it wants beside the chosen one.
    where: Mapping[int, tuple[int, int]]
    chosen: npt.NDArray[Any]  # [num_positions] float32
    top_token_ids: npt.NDArray[Any]  # [num_positions, n] int32
    top_logprobs: npt.NDArray[Any]  # [num_positions, n] float32

    def give(self, sampled: Sequence[Sampled | None]) -> None:
        """Give each row those of the tokens that it commits."""
        for row, (first, num_top) in self.where.items():
            found = sampled[row]
            assert found is not None
            end = first + len(found.token_ids)
            found.logprobs = [
                PositionLogprobs(chosen, ids[:num_top], logprobs[:num_top])
                for chosen, ids, logprobs in zip(
                    self.chosen[first:end].tolist(),
                    self.top_token_ids[first:end].tolist(),
                    self.top_logprobs[first:end].tolist(),
                    strict=True,
                )
            ]


class DevicePass:
    """A pass that the device works on, or will when it has done what came before."""

    def __init__(
        self,
        rows: Sequence[int],
        kind: PassKind,
        results: npt.NDArray[np.int32],  # [at least len(rows), n]: the number of accepted draft tokens, then the tokens
        is_sampled: Sequence[bool],  # for each row; where not, nothing was wanted
        logprobs: RowLogprobs | None,
        event: torch.cuda.Event | None,  # of the device's having come so far; None: it is over
    ) -> None:
        self.rows = rows
        self.kind = kind
        self._results = results
        self._is_sampled = is_sampled
        self._logprobs = logprobs
        self._event = event

    @property
    def is_done(self) -> bool:
        """Whether `collect` would not wait."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def collect(self) -> list[Sampled | None]:
        """What was sampled for each of its rows. Waits; raises what the device raised."""
        if self._event is not None:
            self._event.synchronize()
        sampled = [
            Sampled(row[1 : row[0] + 2], row[0]) if is_sampled else None
            for row, is_sampled in zip(self._results[: len(self.rows)].tolist(), self._is_sampled, strict=True)
        ]
        if self._logprobs is not None:
            self._logprobs.give(sampled)
        return sampled
