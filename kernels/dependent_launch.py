"""Programmatic dependent launch: a kernel's programs start while the kernel before it on the stream still ends.

It hides the launch, which takes as long as the small kernels between two matrix products. Source: the griddepcontrol
instructions of PTX, from compute capability 9.0 on; CUDA graphs keep the overlap. The rules here:

* A kernel that is launched so waits (`gdc_wait`) in every program before it reads what the kernels ahead of it write,
  and before it writes anything. What comes after such a kernel then comes after all before it.
* A kernel lets its follower start (`gdc_launch_dependents`) only behind its own wait: what a follower does before it
  waits comes after everything but the one kernel directly ahead of it.
"""

from __future__ import annotations

from functools import cache

import torch


@cache
def has_dependent_launch(device: torch.device) -> bool:
    """Whether kernels on this device can be launched so."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
