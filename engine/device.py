"""Which device and number format a service uses, and the runner on it."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from engine.cores import usable_cores
from engine.model_runner import ModelRunner


class RunnerSettings(Protocol):
    """The settings of drafter and verifier that concern the model."""

    @property
    def device(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def block_size(self) -> int: ...
    @property
    def num_blocks(self) -> int | None: ...
    @property
    def memory_fraction(self) -> float: ...
    @property
    def cpu_cache_bytes(self) -> int: ...
    @property
    def max_model_len(self) -> int | None: ...
    @property
    def max_num_batched_tokens(self) -> int: ...
    @property
    def num_threads(self) -> int: ...


def make_runner(settings: RunnerSettings, model_path: Path, *, num_reserved_slots: int = 0) -> ModelRunner:
    """Load a model where the settings say, with so many cache slots beside its blocks; to be called on the thread that
    will own it.

    Raises ModelLoadError for a model that cannot be served and ValueError for a device that is not there.
    """
    device = resolve_device(settings.device)
    if device.type == "cpu":
        # Where none are asked for: PyTorch's own number, which OMP_NUM_THREADS can set, within what there is.
        torch.set_num_threads(settings.num_threads or min(torch.get_num_threads(), usable_cores()))
    return ModelRunner(
        model_path,
        device=device,
        dtype=resolve_dtype(settings.dtype, device),
        block_size=settings.block_size,
        num_blocks=settings.num_blocks,
        num_reserved_slots=num_reserved_slots,
        memory_fraction=settings.memory_fraction,
        cpu_cache_bytes=settings.cpu_cache_bytes,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_length=settings.max_model_len,
    )


def resolve_device(name: str) -> torch.device:
    """The device that `name` (auto, cpu, cuda, cuda:N) means here. Raises ValueError when it is not there."""
    num_gpus = torch.cuda.device_count()
    if name == "auto":
        name = "cuda" if num_gpus else "cpu"
    device = torch.device(name)
    if device.type == "cuda":
        # A bare "cuda" would follow the current device of whatever thread asks.
        device = torch.device("cuda", device.index or 0)
        if (device.index or 0) >= num_gpus:
            raise ValueError(f"device: {name} is not there, this machine has {num_gpus} GPUs")
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The number format that `name` (auto or a torch dtype's name) means on `device`."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
