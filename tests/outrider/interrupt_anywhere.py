"""Sends SIGINT to `outrider generate` at the n-th instruction after its third piece of text, for one n after another.

    python -m tests.outrider.interrupt_anywhere ADDRESS FIRST LAST STRIDE

Ctrl-C arrives anywhere, also inside the locks of a library. A real signal hits the few places where that matters
once in thousands of tries; here each n is a place. The gateway at ADDRESS streams without end. Prints a line of JSON
with how many n were tried, and where which status and stderr came of it when not 130 and nothing.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from outrider import cli

_SECONDS = 10.0
Trace = Callable[[FrameType, str, Any], Any]


class InterruptingOutput:
    """In the place of stdout: traces the main thread from the third piece on, and interrupts it where it is told."""

    def __init__(self, number: int, place: int) -> None:
        self._number = number  # of the instruction
        self._place = place  # file descriptor for where that is
        self._num_instructions = 0
        self._num_pieces = 0

    def write(self, text: str) -> int:
        self._num_pieces += 1
        if self._num_pieces == 3:
            frame: FrameType | None = sys._getframe(1)
            while frame is not None:
                self._trace_call(frame, "call", None)
                frame.f_trace = self._trace
                frame = frame.f_back
            sys.settrace(self._trace_call)
        return len(text)

    def flush(self) -> None:
        """Nothing is held back."""

    def isatty(self) -> bool:
        return False

    def _trace_call(self, frame: FrameType, _event: str, _argument: object) -> Trace:
        frame.f_trace_opcodes = True
        return self._trace

    def _trace(self, frame: FrameType, event: str, _argument: object) -> Trace | None:
        if event == "opcode":
            self._num_instructions += 1
            if self._num_instructions == self._number:
                sys.settrace(None)
                code = frame.f_code
                os.write(self._place, f"{code.co_filename}:{frame.f_lineno} {code.co_qualname}".encode())
                signal.raise_signal(signal.SIGINT)
                return None
        return self._trace


def _run(address: str, number: int, place: int, errors: int) -> NoReturn:
    os.dup2(errors, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdout = InterruptingOutput(number, place)
    status = cli.main(["generate", "--address", address, "endless"])
    sys.stdout = sys.__stdout__
    sys.exit(status)


def _wait(process: int) -> int | str:
    deadline = time.monotonic() + _SECONDS
    while time.monotonic() < deadline:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return "did not end"


def main() -> None:
    """Try every number; print what came of it."""
    address, first, last, stride = sys.argv[1], *map(int, sys.argv[2:])
    numbers = range(first, last, stride)
    wrong = []
    for number in numbers:
        with tempfile.TemporaryFile() as place, tempfile.TemporaryFile() as errors:
            # gRPC has not been used yet, so a copy of this process can use it.
            if not (process := os.fork()):
                _run(address, number, place.fileno(), errors.fileno())
            status = _wait(process)
            place.seek(0)
            errors.seek(0)
            where, printed = place.read().decode(), errors.read().decode()
        if (status, printed) != (cli.EXIT_INTERRUPTED, "") or not where:
            wrong.append({"number": number, "where": where, "status": status, "stderr": printed[-500:]})
    print(json.dumps({"tried": len(numbers), "wrong": wrong}))


if __name__ == "__main__":
    main()
