"""The matrix products of a step and nothing else: what is left of a forward pass when all besides them is free."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from benchmarks.shapes import ModelShape
from benchmarks.timing import graph_milliseconds


class MatrixProducts:
    """Weights of a whole model's products, query/key/value and gate/up fused, all different so that no cache helps."""

    def __init__(self, shape: ModelShape, device: torch.device) -> None:
        self._shape = shape
        self._device = device
        attention_size = shape.num_heads * shape.head_dim
        sizes = [
            (shape.qkv_size, shape.hidden_size),
            (shape.hidden_size, attention_size),
            (2 * shape.intermediate_size, shape.hidden_size),
            (shape.hidden_size, shape.intermediate_size),
        ] * shape.num_layers
        sizes.append((shape.vocab_size, shape.hidden_size))
        self._weights = [self._random(size) for size in sizes]

    def milliseconds(self, num_rows: int) -> float:
        """Time of all products over so many tokens, replayed from a CUDA graph."""
        inputs = {
            size: self._random((num_rows, size))
            for size in {
                self._shape.hidden_size,
                self._shape.num_heads * self._shape.head_dim,
                self._shape.intermediate_size,
            }
        }

        def multiply() -> None:
            for weight in self._weights:
                linear(inputs[weight.shape[1]], weight)

        with torch.inference_mode():
            return graph_milliseconds(multiply, self._device, num_replays=8, num_runs=5)

    def _random(self, size: tuple[int, int]) -> torch.Tensor:
        return torch.empty(size, dtype=self._shape.dtype, device=self._device).normal_(0.0, 0.02)
