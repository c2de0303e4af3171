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
    """Named tensors in one buffer on the device and their mirror on the host.

    `host` are numpy views of pinned memory, `device` the tensors at fixed addresses. The caller keeps a copy in one
    direction from overlapping the use of its source: a step ends with a wait, which is enough.
    """

    def __init__(self, specs: Mapping[str, TensorSpec], device: torch.device) -> None:
        num_bytes = sum(spec.num_bytes for spec in specs.values())
        self._host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self.host: dict[str, npt.NDArray[Any]] = {}
        self.device: dict[str, torch.Tensor] = {}
        host = self._host.numpy()
        start = 0
        for name, spec in specs.items():
            end = start + math.prod(spec.shape) * spec.dtype.itemsize
            self.host[name] = host[start:end].view(_NUMPY[spec.dtype]).reshape(spec.shape)
            self.device[name] = self._device[start:end].view(spec.dtype).view(spec.shape)
            start += spec.num_bytes

    def upload(self) -> None:
        """Copy all of the host's side to the device, without waiting."""
        self._device.copy_(self._host, non_blocking=True)

    def download(self) -> None:
        """Copy all of the device's side to the host, without waiting."""
        self._host.copy_(self._device, non_blocking=True)
