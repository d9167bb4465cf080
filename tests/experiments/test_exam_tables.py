"""The tables on the exam cohort: the paper's numbers, what is computed from results, and a small run of each."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from feddar.data.sources import BUILT_IN
from feddar.data.sources import exam_cases as exam_data
from feddar.data.sources.exam import exam_cohort
from feddar.errors import TrainingError
from feddar.experiments import ablation
from feddar.experiments import exam_table as exam
from feddar.experiments.common import ExperimentOptions
from feddar.experiments.exam_table import COLUMNS, LABELS, PAPER, TITLES
from feddar.methods import METHODS
from feddar.settings import Settings
from helpers.marks import first

PAPER_TEXT = Path(__file__).parents[3] / "shared" / "paper" / "feddar.tex"


def made_up(methods, seed=0):
    """Results as a run would give them, with values from a generator."""
    rng = np.random.default_rng(seed)
    rows = [
        (method, fold, 0, "summary" if column in TITLES else "domain", column, "auc", rng.uniform(0.7, 0.95), 100)
        for method in methods
        for fold in range(5)
        for column in COLUMNS
    ]
    return pd.DataFrame(rows, columns=["method", "fold", "seed", "scope", "name", "metric", "value", "count"])


@pytest.fixture(scope="module")
def tex():
    if not PAPER_TEXT.exists():
        pytest.skip("the paper's text is absent")
    return PAPER_TEXT.read_text()


def test_the_papers_table_is_the_papers(tex):
    body = tex[tex.index("label{table:exam}") : tex.index("section{Conclusions}")]
    body = re.sub(r"\\rebuttal\{((?:[^{}]|\{[^{}]*\})*)\}", r"\1", body).replace("\\our", "FedDAR")
    rows = {}
    for line in body.splitlines():
        numbers = re.findall(r"\.(\d{3})", line)
        if len(numbers) == 16:
            rows[line.split("&")[0].strip()] = [int(number) for number in numbers]
    assert set(rows) == {LABELS[method] for method in PAPER}
    for method, numbers in PAPER.items():
        assert [int(word) for word in numbers.split()] == rows[LABELS[method]], method
    assert list(LABELS) == [*PAPER, "feddar"]


def test_the_papers_ablation_is_the_papers(tex):
    body = tex[tex.index("label{table:ablation}") : tex.index("Ablation Studies")]
    found = [tuple(float(f"0.{n}") for n in re.findall(r"\.(\d{3})", line)) for line in body.splitlines()]
    assert [row for row in found if len(row) == 3] == [variant.paper for variant in ablation.VARIANTS]


def test_every_number_of_the_table_comes_from_the_results():
    results = made_up(LABELS)
    text = exam.table(results, "small", 1)
    line = next(line for line in text.splitlines() if line.startswith("| FedMinMax"))
    for column, cell in zip(COLUMNS, line.split("|")[2:-1], strict=True):
        values = results.query("method == 'fedminmax' and name == @column")["value"]
        paper, spread = exam.paper_value("fedminmax", column)
        assert cell.strip() == f"{exam.with_sd(values.mean(), values.std())} / {exam.with_sd(paper, spread)}"
    assert "synthetic" in text


def test_gains_are_paired_and_the_verdict_follows_them():
    results = made_up(LABELS)
    for method in exam.OURS:
        results.loc[results["method"] == method, "value"] = results.loc[
            results["method"] == "fedrep", "value"
        ].to_numpy()
    results.loc[results["method"].isin(exam.OURS), "value"] += 0.3
    mean, low, high = exam.gain(results, "feddar-sa", "fedrep", "domain_avg")
    assert (mean, low, high) == pytest.approx((0.3, 0.3, 0.3))
    assert "FedDAR-SA is above 11 of 11 baselines in Avg, for 11 of them by more than the interval." in exam.verdict(
        results
    )
    results.loc[results["method"].isin(exam.OURS), "value"] -= 0.3001
    assert "not above" in exam.verdict(results)


def test_a_method_that_failed_leaves_a_gap():
    results = made_up([name for name in LABELS if name != "fedrep"])
    text = exam.table(results, "small", 1)
    assert "| FedRep | – / .837 ± .020 |" in text
    assert "FedDAR-SA is above" in text


def test_claims_say_what_is_seen():
    results = made_up([variant.name for variant in ablation.VARIANTS])
    base = results[results["method"] == ablation.VARIANTS[0].name]["value"].to_numpy()
    results.loc[results["method"] == ablation.VARIANTS[1].name, "value"] = base + 0.02
    results.loc[results["method"] == ablation.VARIANTS[3].name, "value"] = base - 0.02
    text = ablation.table(results, "small")
    assert "| re-weighting raises the worst domain | +0.020 [+0.020, +0.020] | yes | +0.051 | Min |" in text
    assert (
        "| multi-head alone adds nothing to re-weighting | -0.040 [-0.040, -0.040] | no: it is lower | +0.004 |" in text
    )


@pytest.fixture
def tiny(monkeypatch):
    """A part of the cohort, two folds, two rounds."""
    small = exam_cohort(exam_data.draw_counts(exam_data.case_counts() // 8, 0, 1.0))
    made = replace(BUILT_IN["exam"], load=lambda *_: small, settings={"encoder": "exam"})
    monkeypatch.setitem(BUILT_IN, "exam", made)
    monkeypatch.setattr(exam, "FOLDS", 2)
    monkeypatch.setattr(ablation, "FOLDS", 2)
    for scale in exam.SCALES:
        monkeypatch.setitem(exam.SCALES, scale, exam.SCALES[scale] | {"rounds": 2, "last": 1})


@pytest.mark.parametrize("scale", first(["small"], ["small", "full"]))
def test_a_small_run_writes_everything(tiny, tmp_path, monkeypatch, scale):
    kept = {name: LABELS[name] for name in ("fedavg", "feddar-wa", "feddar-sa", "feddar")}
    monkeypatch.setattr(exam, "LABELS", kept)
    said = []
    results = exam.run(ExperimentOptions(tmp_path, said.append, scale=scale))
    assert {"results.csv", "table.md", "figure.png"} <= {path.name for path in tmp_path.iterdir()}
    assert results.columns[:3].tolist() == ["method", "fold", "seed"]
    assert results["method"].unique().tolist() == list(kept)
    again = exam.run(ExperimentOptions(tmp_path, said.append, scale=scale, resume=True, jobs=2))
    pd.testing.assert_frame_equal(results, again)


def test_a_failed_training_is_an_error_after_everything_is_written(tiny, tmp_path, monkeypatch):
    kept = {name: LABELS[name] for name in ("fedavg", "fedprox", "feddar-wa", "feddar-sa", "feddar")}
    monkeypatch.setattr(exam, "LABELS", kept)
    steep = exam.SCALES["small"] | {"rounds": 1, "mu": 1e20, "optimizer": "sgd"}
    monkeypatch.setitem(exam.SCALES, "small", steep)
    with pytest.raises(TrainingError, match=r"a training failed \(2 of them\): fedprox, fold 0"):
        exam.run(ExperimentOptions(tmp_path, lambda _: None))
    assert "| FedProx | – /" in (tmp_path / "table.md").read_text()
    assert (tmp_path / "figure.png").exists()
    monkeypatch.setattr(exam, "LABELS", {"fedprox": "FedProx", "feddar-sa": "FedDAR-SA", "feddar": "feddar (ours)"})
    monkeypatch.setitem(exam.SCALES, "small", steep | {"lr": 1e30})
    with pytest.raises(TrainingError, match=r"a training failed \(6 of them\)"):
        exam.run(ExperimentOptions(tmp_path / "all", lambda _: None))


@pytest.mark.more
def test_a_small_ablation_writes_everything(tiny, tmp_path):
    results = ablation.run(ExperimentOptions(tmp_path, lambda _: None, jobs=2))
    assert {"results.csv", "table.md", "figure.png"} <= {path.name for path in tmp_path.iterdir()}
    assert results.columns[:7].tolist() == ["RW", "MH", "DI", "Alter", "Proj", "AGG", "method"]
    assert results["method"].nunique() == 10


@pytest.mark.parametrize(("place", "method"), [(0, "fedavg"), (7, "feddar-wa"), (9, "feddar-sa")])
def test_rows_of_the_ablation_are_the_papers_methods_up_to_k(place, method):
    """Nothing is added to these methods: whatever trains a row is what trains the method of the table."""
    row = Settings(**ablation.VARIANTS[place].options()).row()
    described = {"name": method, "paper": "", "knob": None, "reading": ""}
    assert replace(row, **described) == replace(METHODS[method], **described)
