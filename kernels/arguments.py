"""Checks of tensor arguments on the host, from shapes and types alone: nothing here waits for a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    shape: Sequence[int | None],  # None: any size
    dtypes: Sequence[torch.dtype],
    device: torch.device,
) -> None:
    """Raise ValueError naming the argument when its shape, type or device is not the expected one."""
    fits = tensor.dim() == len(shape) and all(
        want is None or size == want for size, want in zip(tensor.shape, shape, strict=True)
    )
    if not fits:
        expected = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected ({expected})")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} has type {tensor.dtype}, expected {' or '.join(map(str, dtypes))}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, expected {device}")


def check_logits(name: str, logits: torch.Tensor) -> None:
    """Raise ValueError unless this is a [num_rows, vocab_size] matrix whose rows are contiguous."""
    check_tensor(name, logits, (None, None), FLOAT_DTYPES, logits.device)
    if logits.shape[1] == 0 or logits.stride(1) != 1:
        raise ValueError(f"{name} must have at least one column and contiguous rows")


def check_shaping(
    batch_size: int,
    device: torch.device,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
) -> None:
    """Raise ValueError unless the per-sequence sampling parameters fit the batch."""
    check_tensor("temperature", temperature, (batch_size,), (torch.float32,), device)
    if top_k is not None:
        check_tensor("top_k", top_k, (batch_size,), (torch.int32,), device)
    if top_p is not None:
        check_tensor("top_p", top_p, (batch_size,), (torch.float32,), device)
    if min_p is not None:
        check_tensor("min_p", min_p, (batch_size,), (torch.float32,), device)
