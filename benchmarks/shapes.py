"""The shapes of the benchmark's model pairs, and the bytes that a step of them has to read."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ModelShape:
    """A Llama's dimensions."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_length: int  # positions
    dtype: torch.dtype

    @property
    def qkv_size(self) -> int:
        """Width of queries, keys and values together."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def step_weight_bytes(self) -> int:
        """Bytes of weights that a forward pass reads whatever its batch: all matrices but the embedding's."""
        per_layer = self.hidden_size * (self.qkv_size + self.num_heads * self.head_dim + 3 * self.intermediate_size)
        return (self.num_layers * per_layer + self.vocab_size * self.hidden_size) * self.dtype.itemsize

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values that one token keeps in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def step_bytes(self, batch_size: int, context: int) -> int:
        """Fewest bytes that a step reads: the weights once, and each sequence's keys and values once."""
        return self.step_weight_bytes + batch_size * context * self.kv_bytes_per_token


@dataclass(frozen=True)
class PairShape:
    """A target, and how many of its first layers make the drafter."""

    target: ModelShape
    num_drafter_layers: int

    @property
    def drafter(self) -> ModelShape:
        """The drafter's dimensions: the target's, with fewer layers."""
        fields = {**self.target.__dict__, "num_layers": self.num_drafter_layers}
        return ModelShape(**fields)


SHAPES = {
    # Llama 3 8B.
    "8b": PairShape(
        ModelShape(
            num_layers=32,
            hidden_size=4096,
            intermediate_size=14336,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            vocab_size=128_256,
            max_length=8192,
            dtype=torch.bfloat16,
        ),
        num_drafter_layers=4,
    ),
    # For tests without a GPU: the same structure in a few hundred kilobytes.
    "tiny": PairShape(
        ModelShape(
            num_layers=6,
            hidden_size=64,
            intermediate_size=128,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            vocab_size=512,
            max_length=512,
            dtype=torch.float32,
        ),
        num_drafter_layers=2,
    ),
}
