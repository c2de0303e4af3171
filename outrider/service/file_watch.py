"""Notices that files were written anew, as cert-manager and Kubernetes do behind a symlink."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

# What the operating system tells of a file: where it lies, its size and when it was written. None: it is not there.
Signature = tuple[tuple[int, int, int, int] | None, ...]


def signature(paths: Sequence[Path]) -> Signature:
    """What changes when any of the files is written or replaced; symlinks are followed."""
    return tuple(_of(path) for path in paths)


def _of(path: Path) -> tuple[int, int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


class FileWatch:
    """Says whether files have changed since it was last asked, looking at most every `poll_seconds`."""

    def __init__(
        self, paths: Sequence[Path], *, poll_seconds: float = 1.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._paths = tuple(paths)
        self._poll_seconds = poll_seconds
        self._clock = clock
        self._next_look = clock() + poll_seconds
        self._seen = signature(self._paths)

    def has_changed(self) -> bool:
        """Whether to read the files again; true once for each change."""
        now = self._clock()
        if now < self._next_look:
            return False
        self._next_look = now + self._poll_seconds
        found = signature(self._paths)
        if found == self._seen:
            return False
        self._seen = found
        return True
