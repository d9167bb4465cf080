"""Peak memory of training beyond the data, FedAvg, 20 features: 10,000 clients beside 100, each with 64 rows, and
100,000 beside 1,000, each with 16 rows and the smaller encoder ``mlp``.

Each is a process of its own. With everything imported, a small training done and the samples in place as a cohort,
freed memory is given back to the system and the peak is reset; then a cohort is trained for two rounds. What counts is
the peak over what was in use before: parameters and replies, and whatever is kept for each client. Blocks of 64 kB and
more are the system's until training begins: making ten thousand clients' samples otherwise leaves holes in memory,
and training would be charged for filling them.
"""

import ctypes
import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.figures import Figure

FEATURES = 20
MIB = 2**20


def figures() -> Iterator[Figure]:
    yield growth(100, 10_000, rows=64, encoder=None)
    yield growth(1_000, 100_000, rows=16, encoder="mlp")


def growth(fewer: int, more: int, **how: Any) -> Figure:
    few, many = (measured_apart(clients, **how) for clients in (fewer, more))
    # Without the samples, but with Python, torch and all else.
    whole = [each["peak"] - each["data"] for each in (many, few)]
    note = (
        f"{many['beyond'] / MIB:.1f} / {few['beyond'] / MIB:.1f} MiB; the whole process less its samples "
        f"{whole[0] / MIB:.0f} / {whole[1] / MIB:.0f} MiB = {whole[0] / whole[1]:.2f}; samples of {more:,} clients, "
        f"{how['rows']} rows each, {many['data'] / MIB:.0f} MiB; freed blocks of 64 kB and more go back to the "
        f"system; no test set; encoder {how['encoder'] or 'by default'}"
    )
    name = f"peak memory beyond the data, {more:,} clients / {fewer:,} clients"
    return Figure(name, many["beyond"] / few["beyond"], "<= 1.5", note)


def measured_apart(clients: int, **how: Any) -> dict[str, int]:
    """Measure in a process of its own."""
    program = f"import json; from benchmarks.memory import measured; print(json.dumps(measured({clients}, **{how})))"
    surroundings = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**16)}
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, env=surroundings, stdout=subprocess.PIPE, text=True
    )
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def measured(clients: int, rows: int, encoder: str | None) -> dict[str, int]:
    """Return bytes of the samples, of the peak in training, and of what that is beyond what was in use before."""
    from feddar import train

    options = {"rounds": 2, "threads": 1, "jobs": 1, "validation": 0, "encoder": encoder}
    train(samples(10, rows), "fedavg", **options)
    cohort = samples(clients, rows)
    data = sum(part.nbytes for part in (*cohort.x, cohort.y, cohort.domain, cohort.client))
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    train(cohort, "fedavg", **options)
    return {"data": data, "peak": status("VmHWM"), "beyond": status("VmHWM") - before}


def samples(clients: int, rows: int):
    from feddar import Cohort

    rng = np.random.default_rng(clients)
    holder = np.repeat(np.arange(clients), rows)
    x = rng.standard_normal((len(holder), FEATURES), dtype=np.float32)
    y = (x[:, 0] + rng.standard_normal(len(x)) > 0).astype(int)
    return Cohort.from_arrays(x, y, client=holder, domain=holder % 3)


def status(name: str) -> int:
    """Return what Linux says of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
