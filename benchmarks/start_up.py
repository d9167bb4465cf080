"""Seconds until feddar is there: ``from feddar import train, Cohort`` beyond ``import torch``, and ``feddar --help``.

Names of the package are found when first used, so ``import feddar`` alone says little; the two names are what a script
begins with. Each import is a process of its own, in turn with one that imports torch alone; what is beyond it is the
difference of the two, and the figure its median. Bytecode is compiled beforehand, as it is once a package is installed.
"""

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator

from benchmarks.figures import Figure, paired, seconds

TORCH, OURS = "import torch", "import torch; from feddar import train, Cohort"
HELP = "import sys; sys.argv = ['feddar', '--help']; from feddar.cli import main; main()"
REPEATS = 11


def figures() -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        variables = {**os.environ, "PYTHONPYCACHEPREFIX": folder}
        variables.pop("PYTHONDONTWRITEBYTECODE", None)

        def python(program: str) -> str:
            command = [sys.executable, "-c", program]
            return subprocess.run(command, env=variables, check=True, capture_output=True, text=True).stdout

        both = paired(lambda: python(OURS), lambda: python(TORCH), REPEATS)
        beyond = [ours - torch for ours, torch in zip(both.first, both.second, strict=True)]
        note = (
            f"{min(beyond):.2f} to {max(beyond):.2f} in {REPEATS} repeats; torch alone {min(both.second):.2f} or more"
        )
        name = "from feddar import train, Cohort: seconds beyond import torch"
        yield Figure(name, statistics.median(beyond), "<= 0.4", note)
        shown = [seconds(lambda: python(HELP)) for _ in range(REPEATS)]
        *_, imported = python(
            f"import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); {HELP}"
        ).split()
        assert imported == "False", "torch is imported for --help"
        note = f"{min(shown):.2f} to {max(shown):.2f} in {REPEATS} repeats; torch is not imported"
        yield Figure("feddar --help, seconds", statistics.median(shown), "< 0.5", note)
