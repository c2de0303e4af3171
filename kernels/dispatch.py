"""Which implementation an operation takes: Triton on a GPU, the plain-torch reference everywhere else.

The Triton files are imported only when they are first needed, so that CPU serving works where Triton is not installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_interpreting: ContextVar[bool] = ContextVar("interpreting", default=False)


def runs_triton(tensor: torch.Tensor) -> bool:
    """Whether operations on this tensor run the Triton kernels."""
    return runs_triton_on(tensor.device)


def runs_triton_on(device: torch.device) -> bool:
    """Whether operations on this device run the Triton kernels."""
    return device.type == "cuda" or _interpreting.get()


@contextmanager
def interpreted_kernels() -> Iterator[None]:
    """For tests: run the Triton kernels on CPU tensors, through Triton's interpreter.

    TRITON_INTERPRET=1 must have been in the environment before Triton was first imported.
    """
    token = _interpreting.set(True)
    try:
        yield
    finally:
        _interpreting.reset(token)
