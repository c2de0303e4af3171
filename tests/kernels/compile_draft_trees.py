"""Compile the kernels of draft trees for sm_90 without a GPU, as graphs launch them; prints a summary as JSON.

A program of its own, because Triton either interprets or compiles in one process.
"""

from __future__ import annotations

import json

import torch
from triton.runtime.jit import JITFunction

from kernels.child_probabilities import ChildEstimates, estimate_children
from kernels.dispatch import interpreted_kernels
from kernels.draft_trees import TreeLimits, TreePass, TreeState, advance_trees, grow_trees
from tests.kernels.compile_sampling import compile_launch, compiled

SHAPES = [(512, 4, 32), (512, 4, 4), (64, 1, 1), (64, 4, 2), (512, 8, 8)]


def main() -> None:
    JITFunction.run = compile_launch
    cpu = torch.device("cpu")
    with interpreted_kernels():
        for max_expansions, num_children, width in SHAPES:
            state = TreeState.empty(4, max_expansions, num_children, cpu)
            out = TreePass.empty(2, width, max_expansions, cpu)
            slots = torch.zeros(2, dtype=torch.int64)
            tables = torch.zeros(2, 64, dtype=torch.int32)
            advance_trees(state, slots, tables, TreeLimits(0.01, 8192, 1 << 20, 16), out)
            children = torch.zeros(2 * width, num_children, dtype=torch.int32)
            estimates = ChildEstimates.empty(2 * width, num_children, cpu)
            weights = torch.zeros(2 * width, 128, dtype=torch.int16)
            is_tested = torch.zeros(2 * width, dtype=torch.bool)
            estimate_children(children.float(), weights[:, 0], is_tested, estimates)
            grow_trees(state, slots, out, children, estimates.logps)
    print(
        json.dumps(
            {
                "kernels": sorted({key.split()[0] for key in compiled}),
                "shared_bytes": max(entry["shared_bytes"] for entry in compiled.values()),
                "stack_bytes": max(entry["stack_bytes"] for entry in compiled.values()),
            }
        )
    )


if __name__ == "__main__":
    main()
