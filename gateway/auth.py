"""Who calls."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Caller:
    """Whom a request belongs to, and what it may have."""

    name: str
    # Most requests at a time, running and waiting; None: no limit of its own.
    max_concurrent: int | None = None


ANONYMOUS = Caller("")
