"""Where the services under test run their models: the CPU, or what OUTRIDER_TEST_DEVICE names (make gpu-test)."""

from __future__ import annotations

import os

SERVICE_DEVICE = os.environ.get("OUTRIDER_TEST_DEVICE", "cpu")
