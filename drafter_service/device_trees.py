"""The host's side of the draft trees on the device: new ones and what was committed, brought between two passes."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch

from engine.upload import upload
from kernels.draft_trees import NUM_RECENT, TreeState


@dataclass(slots=True)
class NewTree:
    """A tree without expansions, for a sequence whose keys are in its blocks up to `prefix_lens`."""

    prefix_lens: int
    next_ids: int  # of the first expansion
    ring_sizes: int
    num_children: int
    max_depths: int
    stands: int = -1


_FIELDS = [field.name for field in fields(NewTree)]


class DeviceTrees:
    """Trees by slot. Belongs to the engine's thread.

    A slot may be given to the next sequence while a pass of its last one is in flight: the device works in order.
    """

    def __init__(self, num_slots: int, *, max_expansions: int, num_children: int, device: torch.device) -> None:
        self.state = TreeState.empty(num_slots, max_expansions, num_children, device)
        self._device = device
        self._new: dict[int, NewTree] = {}
        self._lengths: dict[int, int] = {}
        # Lists: mostly a few sequences have a few tokens each, for which arrays of their own would take longer.
        self._places: list[int] = []
        self._tokens: list[int] = []

    def begin(self, slot: int, tree: NewTree) -> None:
        """Give the slot a new tree; what was brought for the one before is forgotten."""
        self._new[slot] = tree

    def bring(self, slot: int, token_ids: list[int], length: int) -> None:
        """These are the last of `length` committed tokens, at most NUM_RECENT behind where the tree stands."""
        start = slot * NUM_RECENT
        self._places += [start + position % NUM_RECENT for position in range(length - len(token_ids), length)]
        self._tokens += token_ids
        self._lengths[slot] = length

    def bring_up_to_date(self) -> None:
        """Write what the device does not know yet, behind the passes that were launched before."""
        state = self.state
        if self._new:
            columns = [np.array([getattr(tree, name) for tree in self._new.values()], np.int64) for name in _FIELDS]
            where, *values = upload(self._device, np.array([*self._new], np.int64), *columns)
            for name, column in zip(_FIELDS, values, strict=True):
                getattr(state, name).index_copy_(0, where, column)
            self._new = {}
        if self._places:
            # Of a slot that had two sequences since, the last one's tokens count: each place is written once.
            tokens = dict(zip(self._places, self._tokens, strict=True))
            slots, lengths, places, what = upload(
                self._device,
                np.array([*self._lengths], np.int64),
                np.array([*self._lengths.values()], np.int64),
                np.array([*tokens], np.int64),
                np.array([*tokens.values()], np.int32),
            )
            state.lengths.index_copy_(0, slots, lengths)
            state.recent_tokens.view(-1).index_copy_(0, places, what)
            self._lengths, self._places, self._tokens = {}, [], []
