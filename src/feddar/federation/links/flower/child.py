"""Run a program for as long as the process that asked for it lives, and leave nothing of it behind.

Run as ``python -m feddar.federation.links.flower.child PARENT PROGRAM ARGUMENT...``.

However PARENT ends, ``kill -9`` included, the program is asked to end, on which Flower's take their leave of each other
properly. Processes that it started, and those that they started, are inherited here (on Linux) and ended too. That
needs a process of its own: in a container, often nobody else cares for orphans, and Flower's wait for their parents to
be gone.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

_POLL = 0.1
_PATIENCE = 3.0
_BECOME_HEIR_OF_ORPHANS = 36


def main() -> None:
    """Run PROGRAM until it or PARENT ends, or until we are asked to."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_BECOME_HEIR_OF_ORPHANS, 1)
    program = os.posix_spawn(command[0], command, os.environ)
    terminated, status = False, None
    while status is None:
        if not terminated and (asked or os.getppid() != parent):
            os.kill(program, signal.SIGTERM)
            terminated = True
        time.sleep(_POLL)
        status = _ended().get(program)
    _end_heritage()
    sys.exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _ended() -> dict[int, int]:
    """Return the children that have ended, and how."""
    ended: dict[int, int] = {}
    with suppress(ChildProcessError):
        while True:
            process, status = os.waitpid(-1, os.WNOHANG)
            if not process:
                break
            ended[process] = status
    return ended


def _end_heritage() -> None:
    """Give what the program started a while to end by itself, then end it."""
    patience = time.monotonic() + _PATIENCE
    while children := _children():
        for child in children if time.monotonic() > patience else []:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        time.sleep(_POLL)
        _ended()


def _children() -> list[int]:
    with suppress(OSError):
        return [int(child) for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    return []


if __name__ == "__main__":
    main()
