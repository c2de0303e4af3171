"""Random draft trees of a batch of sequences, for timing passes over them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import TreeBatch


@dataclass(frozen=True)
class Forest:
    """A tree for each sequence, behind `context` tokens in blocks, with its nodes anywhere in an area of the cache."""

    token_ids: npt.NDArray[np.int64]  # [batch, num_nodes]
    places: npt.NDArray[np.int64]  # [batch, num_nodes], in the sequence's area
    depths: npt.NDArray[np.int64]  # [batch, num_nodes], 0 for a root
    sees: npt.NDArray[np.bool_]  # [batch, num_nodes, area_size], places of a node's ancestors and its own
    context: int

    @classmethod
    def grow(
        cls,
        token_ids: npt.NDArray[np.int64],  # [batch, num_nodes]
        *,
        context: int,
        area_size: int,
        reach: int,  # a node's parent is one of the so many before it: 1 makes chains
        seed: int = 0,
    ) -> Forest:
        """Trees of random shape with these tokens."""
        numbers = np.random.default_rng(seed)
        batch, num_nodes = token_ids.shape
        places = np.stack([numbers.permutation(area_size)[:num_nodes] for _ in range(batch)])
        depths = np.zeros((batch, num_nodes), np.int64)
        sees = np.zeros((batch, num_nodes, area_size), np.bool_)
        for sequence in range(batch):
            for node in range(num_nodes):
                if node > 0:
                    parent = numbers.integers(max(0, node - reach), node)
                    depths[sequence, node] = depths[sequence, parent] + 1
                    sees[sequence, node] = sees[sequence, parent]
                sees[sequence, node, places[sequence, node]] = True
        return cls(token_ids, places, depths, sees, context)

    @property
    def num_nodes(self) -> int:
        """Nodes of each sequence."""
        return int(self.token_ids.shape[1])

    def num_seen(self, first: int) -> float:
        """How many nodes, in the mean over sequences, the nodes from `first` on see between them."""
        return float(self.sees[:, first:].any(axis=1).sum(axis=1).mean())

    def batch(
        self,
        first: int,
        end: int,
        *,
        first_slot: int,  # of the cache, where the first sequence's area begins
        block_tables: torch.Tensor,  # [batch, max_blocks] int32
    ) -> TreeBatch:
        """The pass that computes nodes `first` to `end` of each tree, on the device of the block tables."""
        batch, _, area_size = self.sees.shape
        node_starts = first_slot + np.arange(batch) * area_size
        device = block_tables.device

        def upload(array: npt.NDArray[np.generic]) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        return TreeBatch(
            token_ids=upload(self.token_ids[:, first:end].reshape(-1)),
            positions=upload(self.context + self.depths[:, first:end].reshape(-1)),
            slot_mapping=upload((node_starts[:, None] + self.places[:, first:end]).reshape(-1)),
            logit_rows=None,
            prefix_lens=torch.full((batch,), self.context, dtype=torch.int32, device=device),
            block_tables=block_tables,
            node_starts=upload(node_starts),
            is_ancestor=upload(self.sees[:, first:end]),
        )
