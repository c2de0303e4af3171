"""Settings of the test process that have to stand before gRPC and Triton are first imported."""

from __future__ import annotations

import os

import torch

# Everything under test is on this machine; a proxy that the environment names for the world outside cannot reach it.
os.environ["no_proxy"] = os.environ["NO_PROXY"] = "127.0.0.1,localhost,::1"

# Without a GPU the kernel tests run Triton programs through its interpreter. transformers imports Triton, which reads
# this only then.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
