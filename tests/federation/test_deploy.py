"""The commands of docs/deploy.md run as they stand there, on one machine."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

TEXT = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text()


@pytest.mark.slow
@pytest.mark.more
def test_the_tutorial_runs_word_for_word(tmp_path):
    script = "\n".join(re.findall(r"^```sh\n(.*?)^```", TEXT, flags=re.S | re.M))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-e", "-c", script], cwd=tmp_path, env=os.environ | {"PATH": path}, capture_output=True, text=True,
        timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = pd.read_csv(tmp_path / "run" / "metrics.csv")
    assert metrics["round"].max() == 2
    assert set(metrics["scope"]) >= {"all", "domain"}
    assert not (metrics["scope"] == "client").any()  # the sums are secure: of single sites nothing is known
    exchanges = pd.read_csv(tmp_path / "run" / "exchanges.csv")
    assert exchanges["problem"].isna().all(), exchanges
    assert len(pd.read_csv(tmp_path / "predictions.csv")) == 400
    assert len(list(tmp_path.glob("feddar-hospital-*/model/model.safetensors"))) == 3
    same = [(tmp_path / run / "model.safetensors").read_bytes() for run in ("rehearsal", "run")]
    assert len(same[0]) == len(same[1])
