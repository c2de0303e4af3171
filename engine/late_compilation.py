"""A warning for each kernel that is compiled while requests wait: warming up should have compiled it."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)


def warn_of_late_compilation() -> None:
    """From now on, log what Triton compiles or loads in this process; to be called when everything has warmed up.

    Only where CUDA graphs fix the shapes: without them, steps of new shapes may bring new kernels.
    """
    from triton import knobs  # not installed everywhere

    knobs.runtime.jit_post_compile_hook = _warn


def _warn(*, fn: Any, **_: Any) -> None:
    logger.warning("the kernel %s was compiled after warming up: requests have waited for it", fn.name)
