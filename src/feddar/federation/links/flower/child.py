"""Runs a program as long as the process that asked for it lives, and then ends all processes of the program.

Run as ``python -m feddar.federation.links.flower.child PARENT PROGRAM ARGUMENT...``.

However PARENT ends, also by ``kill -9``, the program gets SIGTERM, on which Flower's programs disconnect from each
other properly. Its descendants become children of this process (on Linux, as it is their subreaper) and are ended too.
This needs a separate process: in a container there is often no init that reaps orphans, and Flower's processes wait
until their parents are gone.
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
_PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
    """Run PROGRAM until it or PARENT ends, or until this process gets SIGTERM."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    program = os.posix_spawn(command[0], command, os.environ)
    terminated, status = False, None
    while status is None:
        if not terminated and (asked or os.getppid() != parent):
            os.kill(program, signal.SIGTERM)
            terminated = True
        time.sleep(_POLL)
        status = _ended().get(program)
    _end_descendants()
    sys.exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _ended() -> dict[int, int]:
    """Return the children that have ended, with their exit status."""
    ended: dict[int, int] = {}
    with suppress(ChildProcessError):
        while True:
            process, status = os.waitpid(-1, os.WNOHANG)
            if not process:
                break
            ended[process] = status
    return ended


def _end_descendants() -> None:
    """Give descendants of the program some seconds to end by themselves, then kill them."""
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
