"""Where the services under test run their models: the CPU, or what TEST_DEVICE names (make gpu-test)."""

from __future__ import annotations

import os

SERVICE_DEVICE = os.environ.get("TEST_DEVICE", "cpu")
