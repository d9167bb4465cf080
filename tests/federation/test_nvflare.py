from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from feddar.errors import TrainingError, UserError
from feddar.federation.links.nvflare import site_file
from feddar.federation.links.nvflare.job import ALLOWED, write_job
from feddar.federation.links.nvflare.simulator import LOG, simulate
from helpers import flare_job

STUDY = 'name = "sepsis"\n'


def read(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text())
    assert isinstance(content, dict)
    return content


def component(job: Path, side: str) -> dict[str, Any]:
    (found,) = read(job / f"app/config/config_fed_{side}.json")["components"]
    return found


# What a job contains.


def test_a_job_is_the_study_and_the_names_of_two_classes(tmp_path: Path) -> None:
    job = write_job(STUDY, tmp_path / "sepsis", ["b", "a"], min_sites=2, options={"rounds": 3})
    files = {str(path.relative_to(job)) for path in job.rglob("*") if path.is_file()}
    assert files == {
        "meta.json",
        "app/study.toml",
        "app/config/config_fed_server.json",
        "app/config/config_fed_client.json",
        "app/custom/feddar_job.py",
    }
    assert (job / "app/study.toml").read_text() == STUDY
    meta = read(job / "meta.json")
    assert (meta["name"], meta["min_clients"], meta["deploy_map"]) == ("sepsis", 2, {"app": ["server", "b", "a"]})
    server = component(job, "server")
    assert server["path"] == "feddar_job.Server"
    assert server["args"] == {"name": "sepsis", "options": {"rounds": 3}}
    # The server tells a site nothing of where its data is.
    assert component(job, "client") == {"id": "site", "path": "feddar_job.Site", "args": {}}


def test_a_job_for_all_sites(tmp_path: Path) -> None:
    job = write_job(STUDY, tmp_path / "job")
    assert read(job / "meta.json")["deploy_map"] == {"app": ["@ALL"]}


def test_a_job_without_code_names_what_sites_allow(tmp_path: Path) -> None:
    job = write_job(STUDY, tmp_path / "job", code=False)
    assert not (job / "app/custom").exists()
    for side in ("server", "client"):
        text = read(job / f"app/config/config_fed_{side}.json")
        paths = [component(job, side)["path"]]
        paths += [part["path"] for part in text.get("workflows", [])]
        paths += [part["executor"]["path"] for part in text.get("executors", [])]
        assert all(path.startswith(ALLOWED) for path in paths)


def test_flare_accepts_the_job(tmp_path: Path) -> None:
    from nvflare.fuel.utils.zip_utils import zip_directory_to_bytes
    from nvflare.private.fed.server.job_meta_validator import JobMetaValidator

    write_job(STUDY, tmp_path / "job", ["a", "b"])
    valid, reason, meta = JobMetaValidator().validate("job", zip_directory_to_bytes(str(tmp_path), "job"))
    assert valid, reason
    assert meta["byoc"] is True


@pytest.mark.parametrize(
    ("sites", "min_sites", "reason"),
    [
        (["a", "a"], 1, "a site is named twice"),
        (["server"], 1, "'server' cannot be the name of a site"),
        (["a"], 2, "cannot wait for 2 of 1 sites"),
        (None, 0, "cannot wait for 0 of all sites"),
    ],
)
def test_wrong_jobs(tmp_path: Path, sites: list[str] | None, min_sites: int, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        write_job(STUDY, tmp_path / "job", sites, min_sites)
    assert not (tmp_path / "job").exists()


def test_a_job_replaces_nothing(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(UserError, match="exists already"):
        write_job(STUDY, tmp_path)
    with pytest.raises(UserError, match="exists already"):
        simulate(tmp_path / "job", tmp_path, {"a": {}})
    assert [path.name for path in tmp_path.iterdir()] == ["precious.txt"]


# What a site says of itself.


def write_local(workspace: Path, text: str) -> None:
    (workspace / "local").mkdir(parents=True)
    (workspace / "local" / site_file.FILE).write_text(text)


def test_a_site_names_its_own_data(tmp_path: Path) -> None:
    own = 'data = "a.csv"\nstudy = "study.toml"\nmin-cell = 7\n'
    write_local(tmp_path, f'{own}["site-2"]\ndata = "/srv/b.csv"\nstate = "kept"\n')
    first, second = site_file.site_options(tmp_path, "site-1"), site_file.site_options(tmp_path, "site-2")
    folder = tmp_path / "local"
    state = str(tmp_path / "feddar-state")
    shared = {"study": str(folder / "study.toml"), "min-cell": "7"}
    assert first == {"data": str(folder / "a.csv"), "name": "site-1", "state": state, **shared}
    assert second == {"data": "/srv/b.csv", "name": "site-2", "state": str(folder / "kept"), **shared}


def test_a_site_without_data_says_what_to_write_where(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'a' does not know its data: write the line data = .* into .*feddar.toml"):
        site_file.site_options(tmp_path, "a")
    write_local(tmp_path, 'data = "a.csv"')
    with pytest.raises(UserError, match=r"'a' does not know its study: write the line study = .* into .*feddar.toml"):
        site_file.site_options(tmp_path, "a")
    (tmp_path / "local" / site_file.FILE).write_text("data = oops")
    with pytest.raises(UserError, match=r"feddar.toml cannot be read \(Invalid value"):
        site_file.site_options(tmp_path, "a")


# What a site publishes, called as FLARE calls it.


def asked_by(caller: str, workspace: Path) -> Any:
    place = SimpleNamespace(get_root_dir=lambda: str(workspace))
    return SimpleNamespace(caller=caller, workspace=place, app=SimpleNamespace(name="site-2"))


def test_only_the_server_may_ask(tmp_path: Path) -> None:
    with pytest.raises(PermissionError, match="only the server"):
        flare_job.Site().answer("1", b"abc", 5.0, asked_by("site-1", tmp_path))


def test_a_site_opens_its_data_when_it_can_and_keeps_reasons_to_itself(tmp_path: Path) -> None:
    site, server = flare_job.Site(), asked_by("server", tmp_path)
    with pytest.raises(RuntimeError, match=r"^could not open its data \(UserError: the log of the site says why\)$"):
        site.answer("1", b"abc", 5.0, server)
    (tmp_path / "a.csv").write_text("a")
    write_local(tmp_path, 'data = "../a.csv"\nstudy = "../study.toml"')
    assert site.answer("2", b"abc", 5.0, server) == b"acba"
    with pytest.raises(RuntimeError, match=r"^could not answer \(ValueError: the log of the site says why\)$") as error:
        site.answer("3", b"raise", 5.0, server)
    assert error.value.__context__ is None


def test_a_site_is_asked_again_for_an_answer_that_takes_long(tmp_path: Path) -> None:
    go_on, seen = threading.Event(), []

    class Slow(flare_job.Site):
        def open(self, options: dict[str, str]) -> Any:
            def handle(message: bytes) -> bytes:
                seen.append(message)
                assert go_on.wait(30)
                return message

            return handle

    write_local(tmp_path, 'data = "a.csv"\nstudy = "study.toml"')
    site, server = Slow(), asked_by("server", tmp_path)
    # Sent again, it is the same message; and the second is replaced by the third before its turn comes.
    for number in ("1", "1", "2", "3"):
        assert site.answer(number, number.encode(), 0.1, server) is None
    go_on.set()
    assert site.answer("3", None, 30.0, server) == site.answer("3", b"3", 30.0, server) == b"3"
    assert seen == [b"1", b"3"]
    with pytest.raises(LookupError, match="lost the message"):
        site.answer("2", None, 0.1, server)


# FLARE's processes.


def job_for_tests(folder: Path, **options: Any) -> Path:
    job = write_job(STUDY, folder, min_sites=2, options=options)
    shutil.copy(Path(flare_job.__file__), job / "app/custom/feddar_job.py")
    return job


def two_sites(folder: Path) -> dict[str, dict[str, str]]:
    for name in "ab":
        (folder / f"{name}.csv").write_text(name)
    study = str(folder / "study.toml")
    return {f"site-{n}": {"data": str(folder / f"{name}.csv"), "study": study} for n, name in enumerate("ab", start=1)}


@contextmanager
def nothing_left_running(folder: Path) -> Iterator[None]:
    """Fail if a process that knows this folder is there afterwards."""
    import psutil

    yield
    for _ in range(60):
        left = [process.info for process in psutil.process_iter(["cmdline"]) if str(folder) in str(process.info)]
        if not left:
            return
        time.sleep(0.5)
    pytest.fail(f"still running: {left}")


@pytest.fixture
def on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """FLARE starts its sites with this process's environment."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))


@pytest.mark.slow
@pytest.mark.more
def test_the_simulator_carries_bytes_and_survives_faults(
    tmp_path: Path, on_the_path: None, capfd: pytest.CaptureFixture[str]
) -> None:
    job = job_for_tests(tmp_path / "job", rounds=3)
    with nothing_left_running(tmp_path):
        results = simulate(job, tmp_path / "work", two_sites(tmp_path), timeout=240)
    record = read(results / "record.json")
    assert (results / "study.toml").read_text() == STUDY
    assert (record["options"]["rounds"], record["sites"]) == (3, ["site-1", "site-2"])
    assert record["echo"]["site-1"][:2] == [b"a\xff\x00cba".hex(), ""]
    assert record["echo"]["site-2"][:2] == [b"b\xff\x00cba".hex(), ""]
    assert record["echo"]["nobody"][:2] == ["", "not a site of this job"]
    good = [b"aesiar".hex(), ""]
    assert record["raise"]["site-1"][:2] == good
    assert record["raise"]["site-2"][1] == "could not answer (ValueError: the log of the site says why)"
    # Others are not held up by the site that hangs, which answers the next message when it can.
    assert record["hang"]["site-1"][2] < 1.5 < record["hang"]["site-2"][2] < 4
    assert record["hang"]["site-2"][1] == "no answer after 2 seconds"
    # Longer than one call waits.
    assert record["long"]["site-2"][:2] == [b"bgnol".hex(), ""]
    assert record["after"]["site-2"][:2] == [b"bcba".hex(), ""]
    assert [record["large"][site][0] for site in ("site-1", "site-2")] == [flare_job.LARGE + 1] * 2
    # A death under way is noticed long before the timeout, and costs no time afterwards.
    assert record["die"]["site-2"][1] == "cannot be reached"
    assert record["die"]["site-2"][2] < 90
    assert record["dead"]["site-2"][1] == "cannot be reached"
    assert record["dead"]["site-1"][1] == ""
    assert record["left"] == ["site-1"]
    assert capfd.readouterr() == ("", "")
    assert "Smith" not in (tmp_path / "work/simulator/server/log.txt").read_text()
    assert "Smith" in (tmp_path / "work/simulator/site-2/log.txt").read_text()


@pytest.mark.slow
@pytest.mark.more
def test_a_run_that_fails_says_why(tmp_path: Path, on_the_path: None) -> None:
    job = job_for_tests(tmp_path / "job", fail="the loss is infinite.")
    with nothing_left_running(tmp_path), pytest.raises(TrainingError, match="the loss is infinite") as error:
        simulate(job, tmp_path / "work", two_sites(tmp_path), timeout=120)
    assert str(tmp_path / "work" / LOG) in str(error.value)


@pytest.mark.slow
def test_a_simulation_can_be_bounded(tmp_path: Path, on_the_path: None) -> None:
    job = job_for_tests(tmp_path / "job")
    with nothing_left_running(tmp_path), pytest.raises(TrainingError, match="did not end within 5 seconds"):
        simulate(job, tmp_path / "work", two_sites(tmp_path), timeout=5)


@pytest.mark.slow
def test_a_simulation_that_cannot_start_says_why(tmp_path: Path, on_the_path: None) -> None:
    job = job_for_tests(tmp_path / "job")
    (job / "app/custom/feddar_job.py").write_text("import no_such_package")
    with nothing_left_running(tmp_path), pytest.raises(TrainingError, match="no_such_package"):
        simulate(job, tmp_path / "work", two_sites(tmp_path), timeout=120)


@pytest.mark.slow
@pytest.mark.more
def test_a_provisioned_federation_runs_the_job(tmp_path: Path, on_the_path: None) -> None:
    """FLARE's PoC mode: real server and client processes with certificates, on a free port of this machine."""
    (tmp_path / "home").mkdir()
    environment = {**os.environ, "HOME": str(tmp_path / "home"), "NVFLARE_POC_WORKSPACE": str(tmp_path / "poc")}

    def nvflare(*arguments: str) -> str:
        command = [sys.executable, "-m", "nvflare.cli", *arguments]
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=150, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    nvflare("poc", "prepare", "-n", "2")
    project = tmp_path / "project.yml"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    project.write_text((tmp_path / "poc/project.yml").read_text().replace("8002", str(port)))
    nvflare("poc", "prepare", "-i", str(project), "--force")
    kits = tmp_path / "poc/example_project/prod_00"
    for name, options in two_sites(tmp_path).items():
        (kits / name / "local" / site_file.FILE).write_text(f'data = "{options["data"]}"\nstudy = "study.toml"\n')
    (kits / "server/local" / site_file.FILE).write_text(f'out = "{tmp_path}/results"\n')
    job = job_for_tests(tmp_path / "sepsis", ask=["echo", "raise"])
    with nothing_left_running(tmp_path):
        try:
            nvflare("poc", "start")
            words = nvflare("job", "submit", "-j", str(job)).split()
            assert "COMPLETED" in nvflare("job", "wait", words[-1], "--timeout", "120")
        finally:
            nvflare("poc", "stop")
    record = read(tmp_path / "results/sepsis/record.json")
    assert record["sites"] == ["site-1", "site-2"]
    assert [record["echo"][site][0] for site in record["sites"]] == [b"a\xff\x00cba".hex(), b"b\xff\x00cba".hex()]
    assert "ValueError" in record["raise"]["site-2"][1]
