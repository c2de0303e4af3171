"""Device tensors that keep their addresses, filled from the host by one copy: the inputs of a CUDA graph."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

# Triton compiles a second variant of a kernel for pointers that are not so aligned.
_ALIGNMENT = 16

_NUMPY: dict[torch.dtype, np.dtype[Any]] = {
    torch.int64: np.dtype(np.int64),
    torch.int32: np.dtype(np.int32),
    torch.int16: np.dtype(np.int16),
    torch.float32: np.dtype(np.float32),
}


@dataclass(frozen=True)
class TensorSpec:
    """Shape and type of one input."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Size, rounded up so that the next tensor starts aligned."""
        size = math.prod(self.shape) * self.dtype.itemsize
        return -(-size // _ALIGNMENT) * _ALIGNMENT


class StaticTensors:
    """Named tensors in one buffer on the device and their mirrors on the host.

    `host` are numpy views of pinned memory, `device` the tensors at fixed addresses. The caller keeps a copy in one
    direction from overlapping the use of its source: by a wait, or by taking the next mirror with `turn`.
    """

    def __init__(self, specs: Mapping[str, TensorSpec], device: torch.device, *, num_mirrors: int = 1) -> None:
        num_bytes = sum(spec.num_bytes for spec in specs.values())
        self._device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self.device: dict[str, torch.Tensor] = {}
        start = 0
        for name, spec in specs.items():
            end = start + math.prod(spec.shape) * spec.dtype.itemsize
            self.device[name] = self._device[start:end].view(spec.dtype).view(spec.shape)
            start += spec.num_bytes
        self._mirrors = [_Mirror(specs, num_bytes, is_pinned=device.type == "cuda") for _ in range(num_mirrors)]
        self.index = 0  # of the mirror in use

    @property
    def host(self) -> dict[str, npt.NDArray[Any]]:
        """The mirror in use, by name."""
        return self._mirrors[self.index].arrays

    def turn(self) -> None:
        """Use the mirror that has rested longest."""
        self.index = (self.index + 1) % len(self._mirrors)

    def upload(self) -> None:
        """Copy all of the host's side to the device, without waiting."""
        self._device.copy_(self._mirrors[self.index].buffer, non_blocking=True)

    def download(self) -> None:
        """Copy all of the device's side to the host, without waiting."""
        self._mirrors[self.index].buffer.copy_(self._device, non_blocking=True)


class _Mirror:
    """One copy of all tensors on the host."""

    def __init__(self, specs: Mapping[str, TensorSpec], num_bytes: int, *, is_pinned: bool) -> None:
        self.buffer = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
        self.arrays: dict[str, npt.NDArray[Any]] = {}
        host = self.buffer.numpy()
        start = 0
        for name, spec in specs.items():
            end = start + math.prod(spec.shape) * spec.dtype.itemsize
            self.arrays[name] = host[start:end].view(_NUMPY[spec.dtype]).reshape(spec.shape)
            start += spec.num_bytes
