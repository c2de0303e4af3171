"""What the services set up in their own processes, whoever starts them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("package", ["drafter_service", "verifier_service"])
@pytest.mark.parametrize(("set_by_operator", "spins"), [({}, False), ({"OMP_WAIT_POLICY": "ACTIVE"}, True)])
def test_idle_threads_leave_the_cores_to_others(package: str, set_by_operator: dict[str, str], spins: bool) -> None:
    """Catches two services on one small machine of which each one's idle threads spin on the cores of the other, unless
    who starts them knows about it. OpenMP itself says what it found when it was loaded."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    environment |= {"OMP_DISPLAY_ENV": "VERBOSE", **set_by_operator}
    run = subprocess.run(
        [sys.executable, "-c", f"import {package}.__main__, torch"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    count = re.search(r"GOMP_SPINCOUNT = '(\d+)'", run.stderr)
    assert count is not None, "PyTorch came with another OpenMP than GNU's"
    assert (int(count[1]) > 0) == spins
