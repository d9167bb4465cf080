"""What feddar is measured against, each in its own environment from the registry, with every version pinned.

``run("pfl_fedavg", work)`` makes the environment on first use under ``.bench/``, which git ignores, gives the script
there the work as a file, and returns the seconds of each round and the weights that it learned. The scripts use
nothing of feddar.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.work import Tensors, Work

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = {"pfl_fedavg": "pfl", "flower_simulation": "flower", "bare_loop": "pfl"}
"""By script: the environment, and the file of versions beside this one."""

LONGEST = 1200
"""Seconds that a peer may take."""


@dataclass(frozen=True)
class Ran:
    """What a peer did: the seconds of each round, the first of which is to warm up, and the weights it learned."""

    seconds: list[float]
    weights: Tensors


def run(script: str, work: Work, *options: str) -> Ran:
    """Run a peer on the work."""
    from safetensors.torch import load_file

    python = environment(ENVIRONMENTS[script])
    with tempfile.TemporaryDirectory() as folder:
        given, learned = Path(folder) / "work.safetensors", Path(folder) / "learned.safetensors"
        work.save(given)
        command = [python, "-m", f"benchmarks.peers.{script}", given, learned, *options]
        done = subprocess.run(
            command, cwd=ROOT, env=_surroundings(work.knobs.threads), timeout=LONGEST, capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"{script} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        return Ran(json.loads(done.stdout.splitlines()[-1])["seconds"], load_file(learned))


def environment(name: str) -> Path:
    """Return the interpreter of an environment, which is made if it is not there or its versions have changed."""
    folder = ROOT / ".bench" / name
    versions = Path(__file__).with_name(f"{name}.txt")
    ready, python = folder / "ready.txt", folder / "bin" / "python"
    if not ready.exists() or ready.read_text() != versions.read_text():
        print(f"Making the environment of {name} in {folder} (once)", file=sys.stderr)
        venv.create(folder, clear=True, with_pip=True)
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*install, "-r", versions], check=True)
        ready.write_text(versions.read_text())
    return python


def given() -> Work:
    """In a peer: return the work, with torch's threads as it says."""
    import torch

    from benchmarks.work import Work

    work = Work.load(Path(sys.argv[1]))
    torch.set_num_threads(work.knobs.threads)
    return work


def finish(seconds: list[float], weights: Tensors) -> None:
    """In a peer: write the weights, and print the line that says how long it took."""
    from safetensors.torch import save_file

    save_file({name: value.detach().contiguous() for name, value in weights.items()}, sys.argv[2])
    print(json.dumps({"seconds": seconds}))


def _surroundings(threads: int) -> dict[str, str]:
    """Return the variables of a peer's process: where to import from, its threads from the start, nothing reported."""
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads)} | quiet
