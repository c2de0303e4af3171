"""What the services set up in their own processes, whoever starts them."""

from __future__ import annotations

import json
import os
import re
import socket
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


@pytest.mark.parametrize(
    ("module", "flags"),
    [("gateway", ("--verifiers", "127.0.0.1:1")), ("drafter_service", ("--kind", "ngram"))],
)
def test_a_failed_start_is_told_in_the_services_own_log(module: str, flags: tuple[str, ...]) -> None:
    """Catches lines of C++ beside the service's own, which may be JSON."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        run = subprocess.run(
            [sys.executable, "-m", module, "--listen", listen, "--log-format", "json", *flags],
            cwd=ROOT, capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
    assert run.returncode == 1
    records = [json.loads(line) for line in (run.stdout + run.stderr).splitlines()]
    assert records[-1]["message"] == f"cannot start: listen: cannot bind {listen}"
