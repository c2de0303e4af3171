"""How the threads of OpenMP, which compute on CPUs, are to wait for each other in services that share a machine.

Read by OpenMP when PyTorch is first imported, so this module is imported before it, by the packages of the services.
"""

from __future__ import annotations

import os

# By default idle threads spin, with several services on the cores that the others need: on two busy cores, decoding
# was four to ten times slower. What the operator has set stands.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
