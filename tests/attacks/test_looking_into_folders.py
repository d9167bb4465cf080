"""Other users of a machine, who look into folders of keys, of sites and of runs between sites."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from feddar.federation.links.flower import programs
from helpers.command import feddar
from helpers.sites import NAMES, make_study, write_tables


class StartedError(Exception):
    """Flower would be started now."""


@pytest.fixture
def folder(tmp_path):
    write_tables(tmp_path / "data")
    make_study(tmp_path / "data", rounds=1).write(tmp_path / "study.toml")
    before = os.umask(0)
    yield tmp_path
    os.umask(before)


def open_to_others(folder):
    """Return the folders, from this one down, that others can look into; what is in a closed one is closed, too."""
    if stat.S_IMODE(folder.stat().st_mode) == 0o700:
        return []
    return [folder, *(each for inner in folder.iterdir() if inner.is_dir() for each in open_to_others(inner))]


def test_keys_and_rehearsals_are_closed(folder):
    feddar("keys", "keys", "--server", "127.0.0.1", "--client", NAMES[0], cwd=folder)
    feddar("keys", "mine", "--request", "east", cwd=folder)
    named = ["--config", "study.toml", "--data", "data", "--engine", "local", "--out", "runs/run"]
    feddar("simulate", *named, cwd=folder)
    for made in ("keys", "mine", "runs/run"):
        assert open_to_others(folder / made) == []
    inside = [each for each in (folder / "runs" / "run" / "sites").rglob("*") if each.is_dir()]
    assert {each.name for each in inside} >= {*NAMES, "replies", "model"}


def test_a_coordinators_and_a_sites_folder_are_closed_before_anything_is_in_them(folder, monkeypatch):
    def not_started(*_, **__):
        raise StartedError

    monkeypatch.setattr(programs.subprocess, "Popen", not_started)
    server = ["server", "--config", "study.toml", "--insecure", "--listen", f"127.0.0.1:{programs.free_port()}"]
    with pytest.raises(StartedError):
        feddar(*server, "--out", "runs/server", cwd=folder)
    named = ["--study", "study.toml", "--data", f"data/{NAMES[0]}.csv", "--server", "127.0.0.1:9", "--name", "a"]
    with pytest.raises(StartedError):
        feddar("client", *named, "--insecure", cwd=folder)
    assert open_to_others(folder / "runs" / "server") == []
    assert open_to_others(folder / "feddar-a") == []


def test_a_folder_that_its_owner_has_opened_stays_so(folder):
    (folder / "shared").mkdir(mode=0o750)
    named = ["--config", "study.toml", "--data", "data", "--engine", "local", "--out", "shared"]
    feddar("simulate", *named, cwd=folder)
    assert stat.S_IMODE((folder / "shared").stat().st_mode) == 0o750


KILLED = """
import os, signal
from feddar.federation.private_folder import temporary_folder

with temporary_folder() as folder:
    (folder / "secret").write_text("the key")
    print(folder, flush=True)
    {end}
"""


def python(code, tmp_path):
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    return subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)


def test_secrets_of_a_process_that_was_killed_are_gone_at_the_next_start(tmp_path):
    running = python(KILLED.format(end="signal.pause()"), tmp_path)
    in_use = running.stdout.readline().strip()
    (tmp_path / "feddar-of-another-kind").mkdir()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / ".in-use").touch()
    (tmp_path / "feddar-elsewhere").symlink_to(tmp_path / "mine")
    killed = python(KILLED.format(end="os.kill(os.getpid(), signal.SIGKILL)"), tmp_path)
    left = killed.stdout.readline().strip()
    killed.wait(30)
    assert Path(left, "secret").exists()  # what this is about
    ended = python(KILLED.format(end="pass"), tmp_path)
    own = ended.stdout.readline().strip()
    assert ended.wait(30) == 0
    assert not Path(left).exists() and not Path(own).exists()
    assert Path(in_use, "secret").exists()  # whose process is alive
    running.kill()
    running.wait()
    for each in (killed, ended, running):
        each.stdout.close()
    assert (tmp_path / "mine" / ".in-use").exists() and (tmp_path / "feddar-of-another-kind").exists()
