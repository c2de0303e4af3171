"""What a process holds and has used, read from /proc."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class ProcessStats:
    """One process at one moment."""

    cpu_seconds: float  # user and system, since it started
    rss_mb: float
    anonymous_bytes: int  # of its memory, what is no file's
    num_fds: int
    num_threads: int

    @classmethod
    def of(cls, pid: int) -> ProcessStats:
        """Raises OSError when the process is gone."""
        process = Path(f"/proc/{pid}")
        # Behind the name in parentheses: fields 14 and 15, user and system time.
        fields = (process / "stat").read_text().rpartition(")")[2].split()
        status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
        return cls(
            cpu_seconds=(int(fields[11]) + int(fields[12])) / _TICKS,
            rss_mb=int(status["VmRSS"].split()[0]) / 1024,
            anonymous_bytes=int(status["RssAnon"].split()[0]) * 1024,
            num_fds=len(os.listdir(process / "fd")),
            num_threads=int(status["Threads"]),
        )

    @classmethod
    def of_this(cls) -> ProcessStats:
        """Of the process that asks."""
        return cls.of(os.getpid())


def machine_cpu_seconds() -> float:
    """CPU time of everything that runs on this machine, since it started."""
    # user nice system idle iowait irq softirq steal
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / _TICKS
