"""What gRPC's core is to write by itself: nothing, as the services say what went wrong in their own logs.

Read by gRPC when it is first imported, so this module is imported before it, by the packages of the services.
"""

from __future__ import annotations

import os

# A port that is taken, say, brought a line of C++ that no collector of logs can read. What the operator has set stands.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
