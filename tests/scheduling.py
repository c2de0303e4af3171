"""Which worker runs which file of tests; imported only where pytest-xdist is."""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling

# Files that use the cluster of tests/end_to_end/conftest.py. On several workers each would start one of its own.
SHARING_A_CLUSTER = {f"tests/end_to_end/test_{name}.py" for name in ("bad_requests", "faults", "greedy", "openai")}


class Scheduling(LoadFileScheduling):  # type: ignore[misc]
    """A file of tests is one worker's, with all that its fixtures start; files that share a cluster are one as well."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "a shared cluster" if file in SHARING_A_CLUSTER else file
