"""Where the kernel tests run: the references on the CPU, the Triton kernels interpreted or on a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch

from kernels.dispatch import interpreted_kernels

TritonDevice = Callable[[], AbstractContextManager[torch.device]]

GPU = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(params=["cpu", GPU])
def device(request: pytest.FixtureRequest) -> torch.device:
    """A device as callers use it: the reference on the CPU, Triton on the GPU."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    return torch.device(request.param)


@pytest.fixture(params=["interpreter", GPU])
def triton_device(request: pytest.FixtureRequest) -> TritonDevice:
    """A context inside which the yielded device runs the Triton kernels; memory that nobody has written is NaN."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    if request.param == "interpreter" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton interprets only where there is no GPU")

    @contextmanager
    def run() -> Iterator[torch.device]:
        with poisoned_memory():
            if request.param == "cuda":
                yield torch.device("cuda")
            else:
                with interpreted_kernels():
                    yield torch.device("cpu")

    return run


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill what torch.empty returns with NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]  # the module is an object
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
