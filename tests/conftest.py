"""Settings of the test process that have to stand before gRPC and Triton are first imported; who runs which file."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from xdist.remote import Producer

    from tests.scheduling import Scheduling

# What is imported until the tests are found stays, and looking for garbage in it would take a tenth of that time.
gc.disable()

# Everything under test is on this machine; a proxy that the environment names for the world outside cannot reach it.
os.environ["no_proxy"] = os.environ["NO_PROXY"] = "127.0.0.1,localhost,::1"

# Without a GPU the kernel tests run Triton programs through its interpreter. transformers imports Triton, which reads
# this only then.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Behind it there is garbage, among what tests make."""
    result = yield
    gc.freeze()
    gc.enable()
    return result


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling | None:
    """What `--dist loadfile` means here."""
    from tests.scheduling import Scheduling

    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None
