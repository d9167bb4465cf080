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

QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
"""Peers report to nobody."""

LONGEST = 1200
"""Seconds that a peer may take."""


@dataclass(frozen=True)
class Ran:
    """What a peer did: the seconds of each round, the first of which is to warm up, and the weights it learned."""

    seconds: list[float]
    weights: Tensors


def run(script: str, work: Work) -> Ran:
    """Run a peer on the work."""
    from safetensors.torch import load_file

    python = environment(ENVIRONMENTS[script])
    with tempfile.TemporaryDirectory() as folder:
        given, learned = Path(folder) / "work.safetensors", Path(folder) / "learned.safetensors"
        work.save(given)
        spread = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={work.knobs.processes}"]
        launcher = spread if work.knobs.processes > 1 else []
        command = [python, *launcher, "-m", "benchmarks.peers", script, given, learned]
        surroundings = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(work.knobs.threads)} | QUIET
        done = subprocess.run(command, check=False, cwd=ROOT, env=surroundings, timeout=LONGEST, capture_output=True)
        if done.returncode:
            raise RuntimeError(f"{script} failed:\n{done.stderr.decode()[-4000:]}")
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
