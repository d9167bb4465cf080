"""Commands where processes can only be spawned, and without what only Linux has, as on Macs and Windows."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

TAKEN_AWAY = """
import multiprocessing, os, signal, sys
multiprocessing.set_start_method("spawn")
multiprocessing.get_all_start_methods = lambda: ["spawn"]
for name in ("fork", "memfd_create", "posix_spawn"):
    delattr(os, name)
del signal.pthread_sigmask
for name in ("fcntl", "resource"):
    sys.modules[name] = None
"""
PROGRAM = "import sys; {first}; from feddar.cli import main; sys.argv = ['feddar', *{arguments}]; main()"
RUN = ("run", "exam", "--rounds", "1", "--jobs", "2", "--method", "feddar-sa", "--out")


def called(arguments: list[str], taken_away: bool) -> str:
    before = f"exec({TAKEN_AWAY!r})" if taken_away else "pass"
    program = PROGRAM.format(first=before, arguments=json.dumps(arguments))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return " ".join((done.stdout + done.stderr).split())


def test_a_run_gives_the_same_bits(tmp_path: Path):
    said = [called([*RUN, str(tmp_path / str(each))], each) for each in (False, True)]
    assert not any("one after another" in each for each in said)
    forked, spawned = (load_file(tmp_path / str(each) / "model.safetensors") for each in (False, True))
    assert forked.keys() == spawned.keys()
    assert all((value == spawned[name]).all() for name, value in forked.items())


@pytest.mark.more
@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["compare", "exam", "--methods", "fedavg,feddar-sa", "--folds", "2", "--rounds", "1", "--jobs", "2"]],
    ids=lambda arguments: arguments[0],
)
def test_other_commands(tmp_path: Path, arguments: list[str]):
    out = ["--out", str(tmp_path / "out")] if arguments[0] == "compare" else []
    assert called([*arguments, *out], taken_away=True)
