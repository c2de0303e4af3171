"""Passes of a drafting round on their way back from the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.step import Drafted, PassKind


class GraphPass:
    """A graph that the device works on."""

    kind = PassKind.GRAPH

    def __init__(
        self,
        rows: Sequence[int],
        num_draft_tokens: Sequence[int],  # what each row asked for, of the K that the graph makes
        # token_ids [K, width], candidate_ids and candidate_weights [K, width, m]: by draft token, filled by the device.
        host: Mapping[str, npt.NDArray[Any]],
        event: torch.cuda.Event | None,  # of the device's having come so far; None: it is over
    ) -> None:
        self.rows = rows
        self._num_draft_tokens = num_draft_tokens
        self._host = host
        self._event = event

    @property
    def is_done(self) -> bool:
        """Whether `collect` would not wait."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def collect(self) -> list[Drafted]:
        """What was drafted for each of its rows. Waits; raises what the device raised."""
        if self._event is not None:
            self._event.synchronize()
        host, num_rows = self._host, len(self.rows)
        all_token_ids = host["token_ids"][:, :num_rows].T.tolist()
        # By sequence, and copies: the buffer is filled anew by the next round.
        all_ids = host["candidate_ids"][:, :num_rows].swapaxes(0, 1).copy()
        all_weights = host["candidate_weights"][:, :num_rows].view(np.uint16).swapaxes(0, 1).copy()
        return [
            Drafted(token_ids[:count], ids[:count], weights[:count])
            for count, token_ids, ids, weights in zip(
                self._num_draft_tokens, all_token_ids, all_ids, all_weights, strict=True
            )
        ]


class EagerPass:
    """A pass that was over when it had been submitted."""

    is_done = True

    def __init__(self, rows: Sequence[int], kind: PassKind, drafted: Sequence[Drafted | None]) -> None:
        self.rows = rows
        self.kind = kind
        self._drafted = drafted

    def collect(self) -> Sequence[Drafted | None]:
        """What was drafted for each of its rows."""
        return self._drafted
