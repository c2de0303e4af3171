"""The memory of a GPU, for metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def gpu_memory(device: torch.device) -> dict[tuple[str, ...], float]:
    """Bytes by state, used and free, whoever holds them; nothing on a CPU. Safe to call from any thread."""
    if device.type != "cuda":
        return {}
    import torch  # not above: a drafter without a model has none

    free, total = torch.cuda.mem_get_info(device)
    return {("used",): total - free, ("free",): free}
