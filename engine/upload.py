"""Small arrays on their way to the device."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch


def upload(device: torch.device, *arrays: npt.NDArray[np.generic]) -> list[torch.Tensor]:
    """One-dimensional arrays on the device, in one copy that nobody waits for, behind what was launched before."""
    num_bytes = [-(-array.nbytes // 16) * 16 for array in arrays]
    # Pinned, or the copy would wait for the device; torch keeps the memory until the copy has happened.
    buffer = torch.empty(sum(num_bytes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    host, start = buffer.numpy(), 0
    views = []
    for array, size in zip(arrays, num_bytes, strict=True):
        host[start : start + array.nbytes] = array.view(np.uint8)
        views.append((start, start + array.nbytes, torch.from_numpy(array[:0]).dtype))
        start += size
    there = buffer.to(device, non_blocking=True)
    return [there[first:last].view(dtype) for first, last, dtype in views]
