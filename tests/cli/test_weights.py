"""Weights of samples and classes on the command line."""

import numpy as np
import pandas as pd
import pytest

from feddar.results.run import load
from helpers.command import feddar

COLUMNS = ("--client", "hospital", "--domain", "race", "--target", "outcome", "--sample-weight", "survey")


@pytest.fixture
def table(tmp_path):
    rng = np.random.default_rng(0)
    columns = {
        "hospital": rng.choice(["a", "b"], 160),
        "race": rng.choice(["x", "z"], 160),
        "age": rng.normal(60, 9, 160).round(1),
        "survey": rng.gamma(2, 50, 160).round(1),
    }
    made = pd.DataFrame(columns).assign(outcome=lambda t: np.where(t["age"] + rng.normal(0, 9, 160) > 72, "yes", "no"))
    made.to_csv(tmp_path / "study.csv", index=False)
    return made


def test_a_run_with_weights(table, tmp_path):
    assert "weights of samples in training: " in feddar("cohort", "study.csv", *COLUMNS, cwd=tmp_path)
    training = ("--rounds", 1, "--class-weight", "balanced", "--out", "run")
    said = " ".join(feddar("run", "study.csv", *COLUMNS, *training, cwd=tmp_path).split())
    assert "with --class-weight balanced, predicted risks are those of classes that are equally frequent" in said
    run = load(tmp_path / "run")
    assert [column.name for column in run.cohort.columns] == ["age"]
    assert run.settings.class_weight == "balanced"
    table.drop(columns=["survey", "outcome"]).to_csv(tmp_path / "new.csv", index=False)
    feddar("predict", "run", "new.csv", "--out", "without.csv", cwd=tmp_path)
    table.drop(columns="outcome").assign(survey=-1).to_csv(tmp_path / "new.csv", index=False)
    feddar("predict", "run", "new.csv", "--out", "with.csv", cwd=tmp_path)
    assert (tmp_path / "without.csv").read_bytes() == (tmp_path / "with.csv").read_bytes()
    said = feddar("run", "study.csv", *COLUMNS, "--rounds", 1, "--out", "plain", cwd=tmp_path)
    assert "equally frequent" not in said


@pytest.mark.parametrize(
    ("wrong", "why"), [("-1", "negative"), ("inf", "infinite"), ("x", "not a number"), ("", "column 'survey' is empty")]
)
def test_wrong_weights_are_refused_by_line(table, tmp_path, wrong, why):
    table = table.astype({"survey": object})
    table.loc[3, "survey"] = wrong
    table.to_csv(tmp_path / "study.csv", index=False)
    said = feddar("run", "study.csv", *COLUMNS, "--out", "run", cwd=tmp_path, code=2)
    assert "line 5: " in said and why in said
    assert not (tmp_path / "run").exists()


def test_what_weights_cannot_be(table, tmp_path):
    table.assign(survey=0).to_csv(tmp_path / "study.csv", index=False)
    assert "all are 0" in feddar("run", "study.csv", *COLUMNS, "--out", "run", cwd=tmp_path, code=2)
    table.to_csv(tmp_path / "study.csv", index=False)
    number = (*COLUMNS[:4], "--target", "age", "--task", "regression", "--class-weight", "balanced", "--out", "run")
    assert "what is predicted here is a number" in feddar("run", "study.csv", *number, cwd=tmp_path, code=2)
    assert not (tmp_path / "run").exists()
    assert "class_weight" in feddar("run", "study.csv", *COLUMNS, "--class-weight", "heavy", cwd=tmp_path, code=2)
    assert "is for tables" in feddar("run", "exam", "--sample-weight", "age", cwd=tmp_path, code=2)
