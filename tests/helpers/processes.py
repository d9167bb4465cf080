"""Our commands as real processes: a coordinator and its sites over Flower, with keys."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import torch

from feddar.algorithm.names import named_state
from feddar.federation.links.flower.programs import free_port
from feddar.federation.security.keys import make_keys
from feddar.results.run_folder import read_model
from helpers.sites import NAMES

PATIENCE = 240
TWO_DAYS_AGO = datetime.now(UTC) - timedelta(days=2)


class Process:
    """One of our commands in a process group of its own, whose output can be waited for."""

    def __init__(self, folder: Path, log: str, *arguments: object):
        self.log = folder / log
        command = [sys.executable, "-m", "feddar.cli", *map(str, arguments)]
        with self.log.open("a") as file:
            self.running = subprocess.Popen(
                command, cwd=folder, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
            )  # fmt: skip

    def wait_for(self, pattern: str, after: int = 0) -> None:
        """Wait until its output, after so many characters, has something."""
        end = time.monotonic() + PATIENCE
        while not re.search(pattern, self.text()[after:]):
            assert time.monotonic() < end, f"no {pattern!r} in:\n{self.text()}"
            assert self.running.poll() is None or re.search(pattern, self.text()[after:]), self.text()
            time.sleep(0.05)

    def text(self) -> str:
        return self.log.read_text()

    def kill(self) -> None:
        self.running.kill()
        self.running.wait()

    def ends(self) -> int:
        return self.running.wait(PATIENCE)


@contextmanager
def federation(folder: Path, study):
    """Keys, tables and the commands to start a server and its clients; all of them are ended at the end."""
    make_keys(folder / "keys", ["127.0.0.1"], NAMES, now=TWO_DAYS_AGO)
    study.write(folder / "study.toml")
    address, started = f"127.0.0.1:{free_port()}", []

    def server(*more):
        named = ["server", "--config", "study.toml", "--listen", address, "--keys", "keys/server", "--out", "run"]
        started.append(Process(folder, "server.log", *named, *more))
        return started[-1]

    def client(name):
        named = ["client", "--server", address, "--keys", f"keys/clients/{name}", "--data", f"data/{name}.csv"]
        named += ["--study", "study.toml"]
        started.append(Process(folder, f"{name}.log", *named))
        return started[-1]

    try:
        yield server, client
    finally:
        for each in started:
            if each.running.poll() is None:
                os.killpg(each.running.pid, signal.SIGKILL)
                each.running.wait()


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return named_state(read_model(folder)[1])
