"""Runs Flower's programs as child processes, without writing anything to the user's home."""

from __future__ import annotations

import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from feddar.errors import UserError
from feddar.federation.links.flower.internals import VARIABLES
from feddar.federation.private_folder import private_folder

_PATIENCE = 30.0
_LINES = 1000
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def environment(home: Path) -> dict[str, str]:
    """Return the environment of Flower's programs: their files are under ``home``, and telemetry is off."""
    private_folder(home.parent)  # the folder of a run or a site, which may be new
    private_folder(home)
    # Flower's programs use HTTP on this machine, which must not go through a proxy.
    local = ",".join(filter(None, [os.environ.get("NO_PROXY") or os.environ.get("no_proxy"), "127.0.0.1", "localhost"]))
    return os.environ | {
        "PATH": _search_path(),
        "FLWR_HOME": str(home),
        **VARIABLES,
        "NO_PROXY": local,
        "no_proxy": local,
    }


def _search_path() -> str:
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def free_port() -> int:
    """Return a port of this machine that is free now."""
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return int(trial.getsockname()[1])


def variant(name: str, *arguments: str | Path) -> list[str]:
    """Return the command that starts our variant of one of Flower's programs, such as ``supernode``."""
    return [sys.executable, "-m", f"feddar.federation.links.flower.{name}", *map(str, arguments)]


class Child:
    """A running program, whose output goes to a log file and can be read line by line; ``given`` is its input."""

    def __init__(
        self, command: list[str], log: Path, variables: dict[str, str], given: str = "", files: Sequence[int] = ()
    ) -> None:
        """Start the program; it inherits the open files with these descriptors."""
        self.name = command[2].rpartition(".")[2] if command[1] == "-m" else Path(command[0]).name
        self.log = log
        self.tail: deque[str] = deque(maxlen=50)
        self._lines: queue.Queue[str] = queue.Queue(_LINES)
        launcher = [sys.executable, "-m", "feddar.federation.links.flower.child", str(os.getpid())]
        self._process = subprocess.Popen(
            [*launcher, *command],
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            pass_fds=files,
        )
        assert self._process.stdin
        with self._process.stdin as its_input:
            its_input.write(given)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout
        with self.log.open("a", encoding="utf-8") as log, self._process.stdout as output:
            for raw in output:
                line = _COLOURS.sub("", raw)
                log.write(line)
                log.flush()
                if line.strip():
                    self.tail.append(line.strip())
                    with suppress(queue.Full):  # nobody reads them
                        self._lines.put_nowait(line.strip())

    @property
    def running(self) -> bool:
        """Whether the program is running."""
        return self._process.poll() is None

    def line(self, timeout: float) -> str | None:
        """Return the next line of its output; None if there is none within ``timeout`` seconds."""
        with suppress(queue.Empty):
            return self._lines.get(timeout=timeout)
        return None

    def check(self) -> None:
        """Raise an error with the last line of output if the program has ended."""
        if not self.running:
            self._reader.join(timeout=1)
            last = self.tail[-1] if self.tail else "it said nothing"
            raise UserError(f"{self.name} ended at once: {last} (all of it is in {self.log}).")

    def stop(self) -> None:
        """End the program: with SIGTERM, and after 30 seconds with SIGKILL."""
        self._process.terminate()
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._reader.join(timeout=1)


@contextmanager
def started(command: list[str], log: Path, variables: dict[str, str], given: str = "") -> Iterator[Child]:
    """Start a program, and end it when the block ends."""
    child = Child(command, log, variables, given)
    try:
        yield child
    finally:
        child.stop()
