"""`python -m outrider.leash FD MODULE ARGUMENT…`: runs MODULE as a program that ends when its parent is gone.

The parent keeps the other end of the pipe FD open. However the parent ends, SIGKILL included, the kernel closes that
end, and a thread here sees it.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time

# Without a parent nobody is served: time to finish a step and to free a GPU, not to drain.
GRACE_SECONDS = 5.0


def _follow(fd: int) -> None:
    while os.read(fd, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Start following, then become MODULE."""
    fd, module, *arguments = sys.argv[1:]
    threading.Thread(target=_follow, args=(int(fd),), name="leash", daemon=True).start()
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
