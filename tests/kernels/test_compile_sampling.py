"""The sampling kernels compile for a real GPU; the interpreter also runs what does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def test_kernels_compile_for_hopper(tmp_path: Path) -> None:
    script = Path(__file__).with_name("compile_sampling.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    run = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout.splitlines()[-1])
    assert set(result["kernels"]) == {
        "_accept_kernel",
        "_block_statistics_kernel",
        "_draft_sample_kernel",
        "_emit_kernel",
        "_kept_weights_kernel",
        "_penalties_kernel",
        "_random_words_kernel",
        "_thresholds_kernel",
    }
    assert result["shared_bytes"] <= 227 * 1024
    assert result["local"] == []
    assert max(result["stack_bytes"].values()) <= 64
