"""How many cores this process may use, by which the model's threads are counted."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def usable_cores(cgroups: Path = _CGROUPS) -> int:
    """Cores that this process may run on, and no more than the quota of its container; 1 or more.

    PyTorch by itself knows nothing of quotas: on a large machine a small container would get a thread for each core,
    and be stopped most of the time.
    """
    num_cores = len(os.sched_getaffinity(0))
    quota = _quota(cgroups)
    # Rounded up, as a thread too many only waits, where one too few leaves a part of the quota unused.
    return num_cores if quota is None else max(1, min(num_cores, -int(-quota // 1)))


def _quota(cgroups: Path) -> float | None:
    """Cores' worth of time that the container gets, by the files of cgroups of either version; None: no limit."""
    try:
        if (limit := cgroups / "cpu.max").is_file():
            quota, period = limit.read_text().split()
        else:
            quota, period = ((cgroups / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        # `max` and -1 are what the two versions write for no limit.
        return int(quota) / int(period) if quota != "max" and int(quota) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None
