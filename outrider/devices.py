"""What the models of a local cluster run on."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import dataclass

# Of the memory that is left on a GPU after loading, where a target and draft models share it.
_TARGETS_SHARE = 0.8
_DRAFTS_SHARE = 0.1
# Where draft models share one among themselves.
_ALL = 0.9


@dataclass(frozen=True)
class Devices:
    """cpu or cuda:N, of the verifier and of each drafter."""

    verifier: str
    drafters: tuple[str, ...] = ()

    @property
    def verifier_memory(self) -> float | None:
        """The share of its GPU's memory that the verifier's cache may take; None: all that a service takes alone."""
        return _TARGETS_SHARE if self.verifier != "cpu" and self.verifier in self.drafters else None

    def drafter_memory(self, number: int) -> float | None:
        """The same for a drafter, counted from 0."""
        device = self.drafters[number]
        num_sharing = self.drafters.count(device)
        if device == "cpu" or (device != self.verifier and num_sharing == 1):
            return None
        return round((_DRAFTS_SHARE if device == self.verifier else _ALL) / num_sharing, 4)


async def find_devices(target: str, draft: str, num_drafters: int) -> Devices:
    """What the models run on where `target` and `draft` are wanted: auto, cpu, cuda or cuda:N.

    `auto` is a GPU where there are any: the first for the target, the others in turn for the drafters.
    """
    num_gpus = await _num_gpus() if "auto" in (target, draft) else 0
    there = [f"cuda:{number}" for number in range(num_gpus)] or ["cpu"]
    verifier = _numbered(target) if target != "auto" else there[0]
    others = [device for device in there if device != verifier] or there
    drafters = (_numbered(draft) if draft != "auto" else others[number % len(others)] for number in range(num_drafters))
    return Devices(verifier, tuple(drafters))


def _numbered(device: str) -> str:
    return "cuda:0" if device == "cuda" else device


async def _num_gpus() -> int:
    if not any(os.path.exists(node) for node in ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")):  # noqa: ASYNC240
        return 0
    # PyTorch is the one to ask, as it is what will use them; in another process, as this one needs no CUDA context.
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "import torch; print(torch.cuda.device_count())",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    output, _ = await process.communicate()
    return int(output) if process.returncode == 0 else 0
