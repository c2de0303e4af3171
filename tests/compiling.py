"""Programs of tests in which Triton compiles: it either interprets or compiles in one process, and tests interpret."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def report_of(module: str, *arguments: str, cache: Path) -> Any:
    """What the module, run as a program with an empty cache of kernels, prints as JSON in its last line.

    Raises:
        AssertionError: with the program's errors, if it failed.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # Before what is there, not in its place: the libraries may have come that way.
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", module, *arguments]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])
