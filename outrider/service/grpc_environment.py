"""How gRPC's core is to work, for services that exchange a frame every few milliseconds.

Read by gRPC when it is first imported, so this module is imported before it, by the packages of the services.
"""

from __future__ import annotations

import os

# Without gRPC's event engine the thread that waits for a socket is also the one that reads it: one thread less to wake
# for each frame. What the operator has set stands.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
