"""What the commands between sites refuse before anything is connected, and what they say."""

import errno
import fcntl
import os
import shutil
from pathlib import Path

import pandas as pd
import pytest

from helpers.command import feddar
from helpers.sites import NAMES, make_study, write_tables


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("deployment")
    write_tables(place / "data")
    make_study(place / "data").write(place / "study.toml")
    feddar("keys", "keys", "--server", "127.0.0.1", "--client", NAMES[0], cwd=place)
    return place


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ([], "make keys with `feddar keys`"),
        (["--insecure", "--listen", "0.0.0.0:9092"], "0.0.0.0:9092 is not this machine alone"),
        (["--insecure", "--keys", "keys/server"], "contradict each other"),
        (["--insecure", "--listen", "9092"], "HOST:PORT"),
        (["--insecure", "--resume", "--out", "absent"], "no run in absent to resume"),
        (["--keys", "keys"], "keys"),
        (["--insecure", "--min-clients", "9"], "min_clients (9) must not be more than sites (3)"),
    ],
)
def test_a_server_that_cannot_start(folder, options, reason):
    assert reason in feddar("server", "--config", "study.toml", *options, cwd=folder, code=2)
    assert not (folder / "absent").exists()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ([], "--server HOST:PORT"),
        (["--server", "127.0.0.1:9092"], "make keys with `feddar keys`"),
        (["--server", "127.0.0.1", "--insecure"], "is not of the form HOST:PORT"),
        (["--server", "no-such-host.invalid:9092", "--insecure"], "there is no host no-such-host.invalid"),
        (["--server", "198.51.100.1:9092", "--insecure", "--name", "a"], "is not this machine alone"),
        (["--server", "127.0.0.1:9092", "--insecure"], "--name NAME"),
        (
            ["--server", "127.0.0.1:9092", "--keys", f"keys/clients/{NAMES[0]}", "--name", "b"],
            "are those of 'hospital-1'",
        ),
        (["--explain"], "--study FILE"),
    ],
)
def test_a_client_that_cannot_start(folder, options, reason):
    study = [] if options == ["--explain"] else ["--study", "study.toml"]
    assert reason in feddar("client", "--data", f"data/{NAMES[0]}.csv", *study, *options, cwd=folder, code=2)


def test_a_client_joins_no_study_that_it_was_not_given(folder):
    named = ["--server", "127.0.0.1:9092", "--insecure", "--name", "a", "--data", f"data/{NAMES[0]}.csv"]
    said = feddar("client", *named, cwd=folder, code=2)
    assert "--study FILE; ask the coordinator for the file" in said


def test_a_site_sees_all_of_the_study(folder):
    said = feddar("client", "--explain", "--study", "study.toml", "--data", f"data/{NAMES[0]}.csv", cwd=folder)
    shown = said[: said.index("What leaves")]
    assert all(
        words in shown for words in ("[study]", "[columns]", '["er", "icu"]', '"outcome"', "[training]", "[terms]")
    )
    tables = make_study(folder / "data").tables()
    assert all(name in shown for table in tables.values() for name in table)
    seen = "Who sees it: the coordinator sees each reply of this site: the study has no secure sums."
    assert seen in " ".join(said.split())


def test_a_study_cannot_steer_the_terminal_of_who_reads_it(folder):
    text = (folder / "study.toml").read_text()
    (folder / "odd.toml").write_text(text.replace('name = "mortality"', 'name = "\\u001b[2Jall is well\\u202e"'))
    said = feddar("client", "--explain", "--study", "odd.toml", "--data", f"data/{NAMES[0]}.csv", cwd=folder)
    assert "[2Jall is well" in said
    assert "\x1b" not in said and "\u202e" not in said


def test_a_client_whose_table_does_not_fit_is_told_before_it_connects(folder):
    table = pd.read_csv(folder / "data" / f"{NAMES[0]}.csv").drop(columns="age")
    table.to_csv(folder / "short.csv", index=False)
    named = ["--server", "127.0.0.1:9092", "--insecure", "--name", "a", "--study", "study.toml"]
    with pytest.raises(AssertionError, match="there is no column 'age'"):  # more than one line is said
        feddar("client", "--data", "short.csv", *named, cwd=folder, code=2)


def test_a_rehearsal_and_what_leaves(folder):
    said = feddar(
        "simulate", "--config", "study.toml", "--data", "data", "--engine", "local", "--out", "run", cwd=folder
    )
    assert "worst domain" in said and "hospital-3" in said
    assert "At the operating point, with 95 % intervals (bootstrap of counts" in said
    feddar("report", "run", "--out", "run.html", cwd=folder)
    page = (folder / "run.html").read_text()
    assert all(f'id="{part}"' in page for part in ("figures", "operating-point", "calibration", "decisions"))
    assert "95 % intervals (bootstrap of counts" in page and "They come from the sums that sites sent" in page
    said = feddar("client", "--explain", "--study", "study.toml", "--data", f"data/{NAMES[2]}.csv", cwd=folder)
    assert "curvature/0" in said and "curvature/1" not in said and "Left out, with fewer than 5 patients" in said


def test_a_rehearsal_with_too_few_tables(folder, tmp_path):
    shutil.copy(folder / "data" / f"{NAMES[0]}.csv", tmp_path)
    said = feddar("simulate", "--config", "study.toml", "--data", tmp_path, "--engine", "local", cwd=folder, code=2)
    assert "holds 1 of the 2 tables" in said
    shutil.copy(folder / "data" / f"{NAMES[0]}.csv", tmp_path / f"{NAMES[0]}.tsv")
    said = feddar("simulate", "--config", "study.toml", "--data", tmp_path, "--engine", "local", cwd=folder, code=2)
    assert f"would both be the client '{NAMES[0]}': rename one, or take one away." in said


def test_two_coordinators_in_one_folder(folder):
    (folder / "taken").mkdir()
    with (folder / "taken" / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        named = ["--config", "study.toml", "--data", "data", "--engine", "local", "--out", "taken"]
        assert "taken is in use by another coordinator" in feddar("simulate", *named, cwd=folder, code=2)


def test_a_study_of_nothing(folder):
    assert "there is no nowhere" in feddar("study", "nowhere", cwd=folder, code=2)
    named = ["data", "--domain", "race", "--target", "outcome", "--out", "study.toml"]
    assert "study.toml exists already" in feddar("study", *named, cwd=folder, code=2)


def test_a_job_for_flare(folder):
    assert "nvflare job submit -j job" in feddar("flare-job", "--config", "study.toml", cwd=folder)
    assert (folder / "job" / "app" / "study.toml").read_text() == (folder / "study.toml").read_text()
    assert "job exists already" in feddar("flare-job", "--config", "study.toml", cwd=folder, code=2)


@pytest.mark.parametrize(
    "arguments",
    [
        ["simulate", "--config", "study.toml", "--data", "data", "--engine", "local", "--out", "a-file/run"],
        ["server", "--config", "study.toml", "--insecure", "--listen", "127.0.0.1:0", "--out", "a-file/run"],
        ["client", "--data", f"data/{NAMES[0]}.csv", "--study", "study.toml", "--server", "127.0.0.1:9",
         "--insecure", "--name", "a", "--state", "a-file/state"],
        ["study", "data", "--domain", "race", "--target", "outcome", "--out", "a-file/study.toml"],
        ["flare-job", "--config", "study.toml", "--out", "a-file/job"],
        ["example", "a-file/tables"],
        ["keys", "a-file/keys", "--server", "a.org"],
    ],
)  # fmt: skip
def test_a_place_that_cannot_be_written_to_is_one_sentence(folder, arguments):
    """The folder is a file here, since nothing is read-only for a superuser, who may run these tests."""
    (folder / "a-file").touch()
    said = feddar(*arguments, cwd=folder, code=2)
    assert "cannot" in said and "a-file" in said


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only for a superuser")
def test_a_read_only_folder_is_one_sentence(folder):
    (folder / "closed").mkdir(mode=0o500)
    named = ["--config", "study.toml", "--data", "data", "--engine", "local", "--out", "closed/run"]
    assert "Permission denied" in feddar("simulate", *named, cwd=folder, code=2)


def test_a_read_only_disk_is_one_sentence(folder, monkeypatch):
    def read_only(path, *_, **__):
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "mkdir", read_only)
    named = ["--config", "study.toml", "--data", "data", "--engine", "local", "--out", "new/run"]
    assert "cannot use new/run: Read-only file system" in feddar("simulate", *named, cwd=folder, code=2)
