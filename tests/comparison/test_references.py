"""References of a comparison: what models reach that see all rows in one place."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import feddar
from feddar.comparison.references import (
    BOOSTING,
    KNOWN,
    LINEAR,
    MAJORITY,
    NAMES,
    fit_references,
    reference_cells,
    reference_scores,
)
from feddar.data.cohort import Cohort
from feddar.evaluation.metrics import evaluate


def cohort_of(task, n=600, seed=0):
    """Risk depends on age with a sign by domain, on the ward, and on the crossing of client and domain."""
    rng = np.random.default_rng(seed)
    table = pd.DataFrame({"age": rng.normal(size=n), "ward": rng.choice(["x", "y", "z"], n)})
    table.loc[::7, "age"] = np.nan
    domain, client = rng.integers(0, 2, n), rng.integers(0, 3, n)
    risk = np.nan_to_num(table["age"]) * np.where(domain == 1, 2, -2) + (table["ward"] == "x") * 2
    risk = risk + 3 * ((domain + client) % 2) + 0.3 * rng.normal(size=n)
    y = {
        "two": risk > 1.5,
        "three": np.digitize(risk, [0.0, 3.0]),
        "number": risk,
        "several": pd.DataFrame({"a": risk > 1, "b": risk < 0}),
    }[task]
    return Cohort.from_arrays(table, y, domain=domain, client=client)


def main_metric(cohort, scores):
    found = evaluate(cohort, scores)
    metric = found["metric"].iloc[0]
    return float(found[(found["name"] == "domain_avg") & (found["metric"] == metric)]["value"].iloc[0])


@pytest.mark.parametrize("task", ["two", "three", "number", "several"])
def test_they_learn_what_they_see(task):
    train, test = cohort_of(task).split(0.3)
    found = {name: main_metric(test, scores) for name, scores in reference_scores(train, test)}
    assert tuple(found) == NAMES
    sign = -1 if task == "number" else 1
    known = [sign * found[f"{BOOSTING}{ending}"] for ending in KNOWN]
    assert known[0] < known[1] < known[2]
    assert sign * found[MAJORITY] < sign * found[LINEAR]


def test_the_majority_is_the_shares_of_classes():
    train, test = cohort_of("three").split(0.3)
    (name, scores), *_ = reference_scores(train, test)
    shares = torch.bincount(train.y) / len(train)
    torch.testing.assert_close(scores.exp()[5].float(), shares, rtol=1e-4, atol=1e-5)
    assert name == MAJORITY


def test_images_have_only_the_majority():
    rng = np.random.default_rng(0)
    images = rng.integers(0, 255, (40, 1, 8, 8)).astype(np.uint8)
    train, test = Cohort.from_arrays(images, [0, 1] * 20, domain=["a", "b"] * 20).split(0.3)
    assert [name for name, _ in reference_scores(train, test)] == [MAJORITY]


def test_many_levels_are_pooled_for_boosting():
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"code": [f"c{i % 300}" for i in range(1500)]})
    train, test = Cohort.from_arrays(table, rng.integers(0, 2, 1500), domain=rng.integers(0, 2, 1500)).split(0.3)
    assert tuple(name for name, _ in reference_scores(train, test)) == NAMES


def test_a_comparison_has_them_beside_its_methods(tmp_path):
    cohort = cohort_of("two", n=240)
    options = {"folds": 2, "rounds": 1, "last": 1, "out": tmp_path / "all"}
    compared = feddar.compare(cohort, ["fedavg", "feddar"], **options)
    assert set(compared.results["method"]) == {"fedavg", "feddar"}
    assert tuple(dict.fromkeys(compared.references["method"])) == NAMES
    assert compared.references.groupby("method")["fold"].nunique().eq(2).all()
    beside = [frame[frame["name"] == "domain_avg"] for frame in (compared.results, compared.references)]
    assert all({"auc", "log_loss", "ece"} <= set(frame["metric"]) for frame in beside)
    assert "ece" not in set(compared.curves["metric"])
    table = (tmp_path / "all" / "table.md").read_text(encoding="utf-8")
    assert "## Pooled references" in table
    assert "| pooled-boosting, domain and client known |" in table
    page = (tmp_path / "all" / "report.html").read_text(encoding="utf-8")
    assert "pooled-boosting, domain known" in page
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "all" / "references").iterdir()}
    again = feddar.compare(cohort, ["fedavg", "feddar"], resume=True, **options)
    pd.testing.assert_frame_equal(again.references, compared.references)
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "all" / "references").iterdir()}
    feddar.compare(cohort, ["fedavg", "feddar"], resume=True, references=False, **options)
    for name in ("table.md", "report.html"):
        assert "pooled-boosting" not in (tmp_path / "all" / name).read_text(encoding="utf-8")


def test_they_can_be_left_out_and_do_not_depend_on_jobs(tmp_path):
    cohort = cohort_of("two", n=240)
    options = {"folds": 2, "rounds": 1, "last": 1}
    without = feddar.compare(cohort, ["fedavg"], references=False, **options)
    assert without.references.empty
    assert "Pooled references" not in without.table()
    first, second = (feddar.compare(cohort, ["fedavg"], jobs=jobs, **options).references for jobs in (1, 2))
    pd.testing.assert_frame_equal(first, second)


ALONE = """
import sys, torch
sys.path.insert(0, "tests")
from feddar.simulation.processes import declare_own_process
from comparison.test_references import cohort_of, fit_two
declare_own_process()
torch.set_num_threads(2)
torch.arange(3_000_000)[torch.randperm(3_000_000)]  # now this process has threads that a child has not
print(fit_two(cohort_of("two"), sys.argv[1]))
"""


def fit_two(cohort, folder):
    parts = {(fold, 0): partial(cohort.fold, fold, 2) for fold in range(2)}
    return len(fit_references(reference_cells(parts, Path(folder)), 2, lambda _: None))


def test_children_do_not_wait_for_threads_of_their_parent(tmp_path):
    command = [sys.executable, "-c", ALONE, str(tmp_path)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, check=False, cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == fit_two(cohort_of("two"), tmp_path)
