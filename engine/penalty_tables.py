"""Which sequences have their penalties in dense tables on the device, kept as far as their tokens are committed."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.slots import Slot
from engine.upload import upload
from kernels.penalties import TokenHistory
from kernels.penalty_tables import PenaltyTables
from outrider.protocol.sampling_parameters import SamplingParameters

logger = logging.getLogger(__name__)

NO_PLACE = -1


@dataclass(slots=True)
class _Place:
    """One sequence's row of the tables."""

    index: int
    num_outputs: int | None = None  # output tokens that it counts; None while it still has another sequence's penalties


class _Changes(NamedTuple):
    """Entries of the tables, taken as one long row, and what they become."""

    places: npt.NDArray[np.int64]  # [e]
    factors: npt.NDArray[np.float32]  # [e]
    additions: npt.NDArray[np.float32]  # [e]


class DevicePenalties:
    """The tables of penalised sequences, as many as there is room for. Belongs to the engine's thread.

    A place may be given to the next sequence while a step of its last one is in flight: the device works in order.
    """

    def __init__(self, num_places: int, *, vocab_size: int, device: torch.device) -> None:
        """Room for so many sequences; `8 * vocab_size` bytes each."""
        self.tables = PenaltyTables.empty(num_places, vocab_size, device)
        self._vocab_size = vocab_size
        self._device = device
        self._free = list(range(num_places - 1, -1, -1))
        # By the slot itself and not its index, which is soon another sequence's.
        self._places: dict[Slot, _Place] = {}
        self._num_without = 0

    @property
    def num_free(self) -> int:
        """Places that nobody has."""
        return len(self._free)

    def bring_up_to_date(self, rows: Iterable[tuple[Slot, SamplingParameters, TokenHistory | None]]) -> list[int]:
        """Write what has been committed since the last step, behind the steps that were launched before.

        Returns the place of each row, NO_PLACE for those without a history and those that find no place free. A slot
        comes with the same sequence each time, until `give_back`.
        """
        places, changes, num_without = [], [], 0
        for slot, sampling, history in rows:
            place = None if history is None else self._place_of(slot)
            places.append(NO_PLACE if place is None else place.index)
            if history is None:
                continue
            if place is None:
                num_without += 1
            elif place.num_outputs != history.num_outputs:
                changes.append(self._changes(place, sampling, history))
        if changes:
            self._write(changes)
        if num_without != self._num_without:
            self._num_without = num_without
            logger.debug("%d penalised sequences find no table free: they go on without penalties", num_without)
        return places

    def give_back(self, slot: Slot) -> None:
        """Let another sequence have the slot's place, if it has one."""
        if (place := self._places.pop(slot, None)) is not None:
            self._free.append(place.index)

    def _place_of(self, slot: Slot) -> _Place | None:
        place = self._places.get(slot)
        if place is None and self._free:
            place = self._places[slot] = _Place(self._free.pop())
        return place

    def _changes(self, place: _Place, sampling: SamplingParameters, history: TokenHistory) -> _Changes:
        """What the place has not yet of the sequence, which counts as written from now on."""
        if place.num_outputs is None:
            self.tables.factors[place.index].fill_(1.0)
            self.tables.additions[place.index].fill_(0.0)
            entries = history.entries()
        else:
            entries = history.entries_since(place.num_outputs)
        place.num_outputs = history.num_outputs
        has_output = entries.output_counts > 0
        penalties = sampling.presence_penalty * has_output + sampling.frequency_penalty * entries.output_counts
        return _Changes(
            places=place.index * self._vocab_size + entries.token_ids.astype(np.int64),
            factors=np.where(entries.in_prompt | has_output, sampling.repetition_penalty, 1.0).astype(np.float32),
            additions=(entries.biases - penalties).astype(np.float32),
        )

    def _write(self, changes: Sequence[_Changes]) -> None:
        where, factors, additions = upload(
            self._device,
            np.concatenate([change.places for change in changes]),
            np.concatenate([change.factors for change in changes]),
            np.concatenate([change.additions for change in changes]),
        )
        self.tables.factors.view(-1).index_copy_(0, where, factors)
        self.tables.additions.view(-1).index_copy_(0, where, additions)
