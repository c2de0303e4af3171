"""Where the services under test run their models: the CPU, or what TEST_DEVICE names (make gpu-test)."""

from __future__ import annotations

import os

import torch

from engine.cuda_graph import GraphPool

SERVICE_DEVICE = os.environ.get("TEST_DEVICE", "cpu")

# Two cores run three processes and the test: drafts may take long, and must not be given up.
VERIFIER_FLAGS: tuple[str, ...] = ("--draft-timeout-seconds", "20")
DRAFTER_FLAGS: tuple[str, ...] = ()
if SERVICE_DEVICE != "cpu":
    # Several tests share the GPU: none may size its cache by what is free, or capture graphs for large batches.
    VERIFIER_FLAGS += ("--num-blocks", "2048", "--max-running", "16")
    DRAFTER_FLAGS += ("--num-blocks", "2048", "--graph-max-sequences", "16")


def graph_pool() -> GraphPool | None:
    """Where graphs are recorded; None without a GPU, where their work runs as it is."""
    return None if SERVICE_DEVICE == "cpu" else GraphPool(torch.device(SERVICE_DEVICE))
