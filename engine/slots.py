"""Places on the device, one for each running sequence, that hold what every step would otherwise bring along anew."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from engine.batch import Batch
from engine.block_manager import BlockTable
from engine.upload import upload
from kernels.step_rows import SlotState
from outrider.protocol.sampling_parameters import SamplingParameters


@dataclass(slots=True, eq=False)
class Slot:
    """One sequence's place for as long as it runs. A sequence that is preempted gets another one later."""

    index: int
    # What the device has: whether its sampling row was written, and up to which version its blocks.
    is_written: bool = False
    version: int = 0
    # A step with it did not get to the device, whose length of the sequence may be that of the slot's last one.
    is_lost: bool = False


class OfSlot(Protocol):
    """What a row of a step says of its slot."""

    slot: Slot
    sampling: SamplingParameters
    blocks: BlockTable


class SlotPool:
    """Hands out the slots of one executor. Belongs to the engine's thread.

    A slot may be given to the next sequence while a step of its last one is still in flight: the device works in order.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Slots that nobody has."""
        return len(self._free)

    def take(self) -> Slot:
        """A slot of which the device knows nothing. There must be one."""
        return Slot(self._free.pop())

    def give_back(self, slot: Slot) -> None:
        """Let the next sequence have it."""
        self._free.append(slot.index)


class DeviceSlots:
    """The slots' side on the device, written where something has changed since the last step, and not anew."""

    def __init__(self, num_slots: int, *, max_blocks: int, vocab_size: int, device: torch.device) -> None:
        """Room for so many slots and one more, `padding`, which no sequence has."""
        self.padding = num_slots
        self._vocab_size = vocab_size
        self._device = device

        def room(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.zeros((num_slots + 1, *shape), dtype=dtype, device=device)

        self.state = SlotState(
            lengths=room(torch.int64),
            last_tokens=room(torch.int32),
            temperature=room(torch.float32),
            seeds=room(torch.int64),
            top_k=room(torch.int32),
            top_p=room(torch.float32),
            min_p=room(torch.float32),
            block_tables=room(torch.int32, max_blocks),
        )
        self._tables = self.state.block_tables.view(-1)
        self.max_blocks = max_blocks

    def bring_up_to_date(self, rows: Iterable[OfSlot]) -> None:
        """Write what the device does not know yet of these sequences, behind the steps that were launched before."""
        # Lists: mostly a few sequences have one block more each, for which arrays of their own would take longer.
        places: list[int] = []
        blocks: list[int] = []
        new: list[tuple[Slot, SamplingParameters]] = []
        for row in rows:
            slot, table = row.slot, row.blocks
            if slot.version != table.version:
                first = table.changed_since(slot.version)
                start = slot.index * self.max_blocks
                places += range(start + first, start + len(table))
                blocks += table[first:]
                slot.version = table.version
            if not slot.is_written:
                slot.is_written = True
                new.append((slot, row.sampling))
        if places:
            where, what = upload(self._device, np.array(places, np.int64), np.array(blocks, np.int32))
            self._tables.index_copy_(0, where, what)
        if new:
            self._write_sampling(new)

    def continue_in(self, batch: Batch, rows: Sequence[int], slots: Sequence[Slot], *, block_size: int) -> None:
        """Let some rows of a batch, a single token each, begin with the last tokens of their slots, where these stand.

        What the batch has instead of them, and as their lengths, is written over; its block tables reach as far as the
        slots may have come.
        """
        where, indexes = upload(self._device, np.array(rows, np.int64), np.array([slot.index for slot in slots]))
        lengths = self.state.lengths[indexes]
        positions = lengths - 1
        blocks = batch.block_tables[where, positions // block_size].long()
        places = batch.cu_query_lens[where].long()
        batch.token_ids[places] = self.state.last_tokens[indexes].long()
        batch.positions[places] = positions
        batch.slot_mapping[places] = blocks * block_size + positions % block_size
        batch.context_lens[where] = lengths.int()

    def _write_sampling(self, new: list[tuple[Slot, SamplingParameters]]) -> None:
        state, parameters = self.state, [sampling for _, sampling in new]
        where, temperature, seeds, top_k, top_p, min_p = upload(
            self._device,
            np.array([slot.index for slot, _ in new]),
            np.array([p.temperature for p in parameters], np.float32),
            np.array([p.seed for p in parameters], np.uint64).view(np.int64),
            # A top_k beyond the vocabulary keeps everything, and need not fit into 32 bits.
            np.array([min(p.top_k, self._vocab_size) for p in parameters], np.int32),
            np.array([p.top_p for p in parameters], np.float32),
            np.array([p.min_p for p in parameters], np.float32),
        )
        state.temperature.index_copy_(0, where, temperature)
        state.seeds.index_copy_(0, where, seeds)
        state.top_k.index_copy_(0, where, top_k)
        state.top_p.index_copy_(0, where, top_p)
        state.min_p.index_copy_(0, where, min_p)
