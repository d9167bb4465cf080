"""Only one process at a time trains into a folder."""

import subprocess
import sys

import pytest

import feddar
from feddar.errors import UserError
from feddar.results.run_folder import MODEL_FILE
from helpers.cohorts import make_cohort

HOLDS = """
import sys
from pathlib import Path
from feddar.results.run_folder import alone_in

with alone_in(Path("run")):
    print("in", flush=True)
    sys.stdin.read()
"""
FORKS = """
import os
from pathlib import Path
from feddar.results.run_folder import alone_in

reading, writing = os.pipe()
with alone_in(Path("run")):
    if (child := os.fork()) == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
with alone_in(Path("run")):
    print("in again")
os.close(writing)
os.waitpid(child, 0)
"""


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_two_processes_cannot_train_into_one_folder(tmp_path):
    folder, command = tmp_path / "run", [sys.executable, "-c", HOLDS]
    with subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "in\n"
        before = names_in(folder)
        with pytest.raises(UserError, match="another process is training into"):
            feddar.train(make_cohort(n=60), "fedavg", rounds=1, out=folder)
        assert names_in(folder) == before
        other.stdin.close()
        other.wait(60)
    feddar.train(make_cohort(n=60), "fedavg", rounds=1, out=folder)
    assert (folder / MODEL_FILE).exists()
    assert not [name for name in names_in(folder) if name.startswith(".")]


def test_a_child_that_was_forked_does_not_hold_the_folder(tmp_path):
    """Workers may live a moment longer than a run that was killed, which can be resumed at once."""
    done = subprocess.run([sys.executable, "-c", FORKS], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "in again\n"
