"""Runs a job on FLARE's simulator: all sites are processes on this machine, with their files in one folder."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from feddar.errors import TrainingError, UserError
from feddar.federation.links.nvflare import site_file
from feddar.federation.links.nvflare.job import ALLOWED, FAILURE, RESULTS
from feddar.settings import write_toml

if TYPE_CHECKING:
    import psutil

LOG = "flare.log"


def simulate(job: Path, workspace: Path, sites: Mapping[str, Mapping[str, str]], timeout: float | None = None) -> Path:
    """Run a job with these sites, by name with the values of their ``local/feddar.toml``; return the results' folder.

    The workspace must be a new folder. FLARE's log is ``flare.log`` in it.
    """
    if find_spec("nvflare") is None:
        raise UserError("NVIDIA FLARE is not installed: pip install 'feddar[nvflare]'.")
    if not sites:
        raise UserError("there is no site to simulate: name at least one.")
    if workspace.exists() and (not workspace.is_dir() or any(workspace.iterdir())):
        raise UserError(f"{workspace} exists already: name a new folder for the simulation.")
    workspace = workspace.resolve()
    # A subfolder, because FLARE empties the folder it is given.
    root, log = workspace / "simulator", workspace / LOG
    _write_local(root / "local", sites)
    arguments = [str(job.resolve()), "-w", str(root), "-c", ",".join(sites), "-t", str(len(sites))]
    code = _run([sys.executable, "-m", "nvflare.cli", "simulator", *arguments], log, timeout)
    results = root / "server" / "simulate_job" / RESULTS
    if code or not results.is_dir() or (results / FAILURE).exists():
        raise TrainingError(f"the simulation with FLARE failed: {_reason(results / FAILURE, log)} (see {log}).")
    return results


def _write_local(folder: Path, sites: Mapping[str, Mapping[str, str]]) -> None:
    folder.mkdir(parents=True)
    write_toml(folder / site_file.FILE, sites)
    # Needed for jobs without code.
    (folder / "resources.json").write_text(json.dumps({"format_version": 2, "class_allow_list": ALLOWED}))


def _run(command: list[str], log: Path, timeout: float | None) -> int:
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            cwd=log.parent,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise TrainingError(
                f"the simulation with FLARE did not end within {timeout:g} seconds (see {log})."
            ) from None
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the simulator and its sites, which run in sessions of their own."""
    import psutil

    family = _stopped(process.pid)
    for member in family:
        member.kill()
    psutil.wait_procs(family, timeout=10)
    process.wait()


def _stopped(number: int) -> list[psutil.Process]:
    """Return the process with that number and all that it has started; each is stopped before its children are listed.

    Otherwise it could start another one between the list and the kill, which nobody would end.
    """
    import psutil

    try:
        process = psutil.Process(number)
        process.suspend()
        while process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
            time.sleep(0.001)
        children = process.children()
    except psutil.NoSuchProcess:
        return []
    return [process, *(each for child in children for each in _stopped(child.pid))]


def _reason(failure: Path, log: Path) -> str:
    """Return the reason in the failure file, or else the first error in FLARE's log."""
    if failure.exists():
        return failure.read_text(encoding="utf-8").strip()
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [line.partition(" ERROR ")[2].strip(" -") for line in lines if " ERROR " in line]
    return next((error for error in errors if not error.startswith("Traceback")), "FLARE did not say why")
