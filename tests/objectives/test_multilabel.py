"""Several yes / no outcomes: read, learned, measured, predicted, exported, and between sites."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.metrics import log_loss, roc_auc_score

import feddar
from feddar.algorithm.names import named_state
from feddar.data.cohort import Cohort
from feddar.data.table_options import TableOptions
from feddar.errors import UserError
from feddar.federation.coordinator import coordinate
from feddar.federation.coordinator_settings import CoordinatorSettings
from feddar.federation.study import Study, study_of_table
from feddar.objectives.logistic import Binary
from feddar.objectives.multilabel import MultiLabel
from feddar.settings import Settings
from helpers.command import feddar as command
from helpers.sites import NAMES, local_link, make_sites, with_facts

TARGET = "died,icu,pain"
ROLES = ["--client", "hospital", "--domain", "race", "--target", TARGET]
QUICK = {"rounds": 2, "last": 1, "lr": 1e-2, "batch_size": 16}


def table(seed: int, n: int = 90) -> pd.DataFrame:
    """Return a table whose outcomes follow age and ward, one of them differently in each group."""
    rng = np.random.default_rng(seed)
    found = pd.DataFrame({"age": rng.normal(60, 10, n).round(1), "ward": rng.choice(["er", "icu"], n)})
    found["race"] = rng.choice(["A", "B"], n)
    steep = np.where(found["race"] == "A", 0.3, -0.3) * (found["age"] - 60)
    found["died"] = np.where(rng.random(n) < 1 / (1 + np.exp(-steep)), "yes", "no")
    found["icu"] = (rng.random(n) < np.where(found["ward"] == "icu", 0.8, 0.2)).astype(int)
    found["pain"] = rng.random(n) < 0.4
    return found


@pytest.fixture
def folder(tmp_path) -> Path:
    """Return a folder with one table for each site, and all of them in one file."""
    (tmp_path / "tables").mkdir()
    every = []
    for number, name in enumerate(NAMES):
        every.append(table(number).assign(hospital=name))
        every[-1].drop(columns="hospital").to_csv(tmp_path / "tables" / f"{name}.csv", index=False)
    pd.concat(every).to_csv(tmp_path / "all.csv", index=False)
    return tmp_path


def cohort(n: int = 90) -> Cohort:
    found = pd.concat([table(seed, n) for seed in range(3)], ignore_index=True)
    labels = found[["died", "icu", "pain"]]
    client = np.repeat(["a", "b", "c"], n)
    return Cohort.from_arrays(found[["age", "ward"]], labels, domain=found["race"], client=client)


def test_labels_are_read_however_a_file_writes_them():
    labels = pd.DataFrame(
        {"a": ["yes", "NO", " y"], "b": ["1", "0", "1.0"], "c": [True, False, True], "d": [1.0, 0, 1]}
    )
    found = Cohort.from_arrays(np.zeros((3, 1)), labels)
    assert found.objective == MultiLabel(("a", "b", "c", "d"))
    assert found.y.tolist() == [[1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1]]


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ({"a": [1, 0], "b": [0, 2]}, "row 1: the label 'b' is '2', not yes or no."),
        ({"a": [1, 0], "b": [1, 1]}, "the outcome 'b' is the same in every row"),
        ({"a": [1, None], "b": [0, 1]}, "the label 'a' is missing in 1 row, first in row 1"),
    ],
)
def test_what_is_neither_yes_nor_no_is_named(labels, said):
    with pytest.raises(UserError, match=said):
        Cohort.from_arrays(np.zeros((2, 1)), pd.DataFrame(labels))


@pytest.mark.parametrize(("options", "said"), [({"task": "regression"}, "not numbers"), ({"positive": "1"}, "is yes")])
def test_options_of_one_outcome_are_refused(options, said):
    with pytest.raises(UserError, match=said):
        Cohort.from_arrays(np.zeros((2, 1)), pd.DataFrame({"a": [0, 1], "b": [1, 0]}), **options)


def test_metrics_are_scikit_learns_of_each_output_and_their_means():
    rng = np.random.default_rng(0)
    y, predicted = rng.integers(0, 2, (50, 3)), rng.random((50, 3))
    found = MultiLabel(("a", "b", "c")).measure(y, predicted)
    areas = [roc_auc_score(y[:, k], predicted[:, k]) for k in range(3)]
    losses = [log_loss(y[:, k], predicted[:, k]) for k in range(3)]
    assert [found[f"auc:{name}"] for name in "abc"] == pytest.approx(areas)
    assert [found[f"log_loss:{name}"] for name in "abc"] == pytest.approx(losses)
    assert (found["auc"], found["log_loss"]) == pytest.approx((np.mean(areas), np.mean(losses)))


def test_an_output_without_both_labels_is_left_out_of_the_mean():
    y, predicted = np.array([[1, 0], [1, 1]]), np.array([[0.5, 0.2], [0.4, 0.7]])
    found = MultiLabel(("a", "b")).measure(y, predicted)
    assert np.isnan(found["auc:a"])
    assert found["auc"] == found["auc:b"] == 1.0


def test_every_combination_of_outcomes_is_spread_over_training_and_test():
    train, test = cohort().split(0.5)
    assert len(np.unique(train.y.numpy(), axis=0)) == len(np.unique(test.y.numpy(), axis=0)) == 8


@pytest.mark.parametrize("method", ["feddar", "feddar-wa", "fedrep", "fedminmax", "apfl"])
def test_stacked_clients_end_where_they_would_one_by_one(method):
    options = QUICK | {"dtype": "float64"}
    one, stacked = (feddar.train(cohort(), method, batched=batched, **options) for batched in (False, True))
    expected = named_state(one.state)
    for name, value in named_state(stacked.state).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-7, atol=1e-9)


def test_each_outcome_is_solved_by_itself():
    rng = torch.Generator().manual_seed(0)
    scores = torch.randn(20, 2, generator=rng, dtype=torch.float64)
    features = torch.randn(20, 3, generator=rng, dtype=torch.float64)
    alone, both = Binary(), MultiLabel(("a", "b"))
    blocks = both.curvature("block", scores, features)
    for k in range(2):
        torch.testing.assert_close(blocks[k : k + 1], alone.curvature("hessian", scores[:, k : k + 1], features))
    torch.testing.assert_close(both.curvature("hessian", scores, features)[0], torch.block_diag(*blocks))


def test_sites_measure_by_sums_what_one_machine_does(folder):
    options = TableOptions(data=str(folder / "tables"), domain="race", target=TARGET)
    study = study_of_table(
        "several", options, Settings(**QUICK), CoordinatorSettings(sites=3, min_clients=3, wait=5, timeout=30)
    )
    study = with_facts(study, secure=False)  # here each site's own figures are compared
    study.write(folder / "study.toml")
    assert Study.read(folder / "study.toml").objective == MultiLabel(("died", "icu", "pain"))
    sites = make_sites(folder / "tables", folder / "kept", min_cell=1)
    run = coordinate(study, local_link(sites), folder / "run")
    found = run.history[(run.history["round"] == 2) & (run.history["scope"] == "domain")]
    assert {"auc", "auc:died", "auc:icu", "auc:pain", "brier:pain"} <= set(found["metric"])
    for name in NAMES:
        _, held = study.divided(study.read_site(folder / "tables" / f"{name}.csv", name))
        of_site = run.history[(run.history["round"] == 2) & (run.history["name"] == name)].set_index("metric")["value"]
        model = feddar.load(folder / "kept" / name / "model")
        exact = model.evaluate(held).query("scope == 'client'").set_index("metric")["value"]
        for metric in ("log_loss:died", "accuracy:icu", "brier"):
            assert of_site[metric] == pytest.approx(exact[metric], rel=1e-5)
        assert of_site["auc:icu"] == pytest.approx(exact["auc:icu"], abs=0.02)
    scored = feddar.load(folder / "kept" / NAMES[0] / "model")
    assert scored.predict_proba(table(0)[["age", "ward"]], domain="A").shape == (90, 3)


def test_commands_take_several_targets(folder):
    shown = command("cohort", "all.csv", *ROLES, cwd=folder)
    assert "predicted: 3 yes / no outcomes: died" in shown
    shown = command("run", "all.csv", *ROLES, "--rounds", 2, "--validation", 0, "--out", "run", cwd=folder)
    by_outcome = pd.read_csv(folder / "run" / "metrics.csv").query("split == 'test' and name == 'domain_avg'")
    means = by_outcome.groupby("metric")["value"].mean()
    for outcome in ("died", "icu", "pain"):
        assert f"{outcome:<20}  {means[f'auc:{outcome}']:>6.3f}" in shown
    shown = command("predict", "run", "all.csv", "--out", "new.csv", cwd=folder)
    assert "AUC of the rows with a label" in shown
    written = pd.read_csv(folder / "new.csv")
    assert {"predicted_died", "probability_died", "probability_pain"} <= set(written.columns)
    assert (written["predicted_icu"] == (written["probability_icu"] > 0.5)).all()
    command("export", "run", "--out", "model.onnx", cwd=folder)
    command("report", "run", "--out", "page.html", cwd=folder)
    page = (folder / "page.html").read_text(encoding="utf-8")
    assert f"{means['brier:icu']:.3f}" in page.split("Brier score of icu")[1].split("</table>")[0]


def test_a_wrong_label_is_named_with_its_line(folder):
    text = (folder / "all.csv").read_text().replace(",yes,", ",perhaps,", 1)
    (folder / "all.csv").write_text(text)
    wrong = command("run", "all.csv", *ROLES, cwd=folder, code=2)
    assert "all.csv, line " in wrong and "the label 'died' is 'perhaps', not yes or no" in wrong


def test_a_column_that_is_not_there_is_named(folder):
    wrong = command("run", "all.csv", *ROLES[:-1], "died,icy", cwd=folder, code=2)
    assert "no column 'icy': did you mean 'icu'?" in wrong
