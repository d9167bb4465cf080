"""The examples of docs/using.md run as they stand there."""

import re
import shlex
from contextlib import chdir, redirect_stdout
from io import StringIO
from pathlib import Path

import numpy as np
import pandas as pd

from helpers.command import feddar

FAST = ["--rounds", 2, "--jobs", 1]
TEXT = (Path(__file__).parents[1] / "docs" / "using.md").read_text()


def test_the_examples_of_using_run(tmp_path):
    rng = np.random.default_rng(0)
    table = pd.DataFrame(rng.normal(size=(120, 2)), columns=["age", "crp"])
    table["hospital"], table["race"] = ["h1", "h2"] * 60, rng.choice(["a", "b"], 120)
    table["ward"] = rng.choice(["x", "y", "z"], 120)
    table["outcome"] = np.where(table["age"] > 0, "yes", "no")
    table.to_csv(tmp_path / "study.csv", index=False)
    new = table.drop(columns="outcome").head(20)
    new.to_csv(tmp_path / "new.csv", index=False)
    new.to_parquet(tmp_path / "new.parquet")
    names: dict[str, object] = {}
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", TEXT, flags=re.S | re.M):
        if language == "python":
            with chdir(tmp_path), redirect_stdout(StringIO()):
                exec(block, names)
        else:
            for line in block.splitlines():
                command, *arguments = shlex.split(line)[1:]
                feddar(command, *arguments, *(FAST if command == "run" else []), cwd=tmp_path)
    assert {"predictions.csv", "predictions.parquet", "my-run"} <= {path.name for path in tmp_path.iterdir()}
    assert len(names["risks"]) == 20
