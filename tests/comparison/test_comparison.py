"""Comparisons: the same samples for all, the same digits however they are run, and tables that follow from them."""

import multiprocessing
import os
import re
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pandas as pd
import pytest
import torch
from rich.console import Console

import feddar
from feddar.comparison import tuning
from feddar.comparison.cells import Cell, run_cells
from feddar.errors import UserError
from feddar.evaluation.intervals import RESULTS_COLUMNS, paired_differences
from feddar.objectives import Binary
from feddar.report.numbers import paper_number
from feddar.report.terminal import show_comparison
from feddar.results.run_folder import read_model
from helpers.cohorts import make_cohort
from helpers.marks import first

METHODS = ["local", "fedavg", "feddar-sa"]
FEW = {"folds": 2, "rounds": 2, "last": 1}
compare = partial(feddar.compare, references=False)  # they have tests of their own


def small(**changed):
    return make_cohort(**({"n": 240, "domains": 2, "clients": 3} | changed))


def lonely():
    cohort = small()
    domain = cohort.domain.clone()
    domain[7] = 2
    return replace(cohort, domain=domain, domains=(*cohort.domains, "lonely"))


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A comparison of three methods on two folds and two seeds, and its folder."""
    folder = tmp_path_factory.mktemp("compared") / "out"
    return compare(small(), METHODS, seeds=2, seed=4, out=folder, **FEW), folder


def exactly(path):
    return pd.read_csv(path, dtype={"name": str}, keep_default_na=False, na_values={"value": [""]})


def headers(folder):
    """What the model files say, by method, fold and seed."""
    return {path.parent.relative_to(folder / "runs").as_posix(): read_model(path.parent)[0]
            for path in (folder / "runs").glob("*/*/model.safetensors")}  # fmt: skip


def test_every_method_has_the_same_splits(compared):
    comparison, folder = compared
    prints = {name: about["fingerprint"] for name, about in headers(folder).items()}
    assert len(prints) == 3 * 2 * 2
    for seed in (4, 5):
        for fold in range(2):
            assert len({prints[f"{method}/seed-{seed}-fold-{fold}"] for method in METHODS}) == 1
    assert len(set(prints.values())) == 4
    results = comparison.results
    counts = results[(results["scope"] == "all") & (results["metric"] == "auc")]
    assert (counts.groupby(["method", "seed"])["count"].sum() == 240).all()


def test_every_method_has_the_same_initial_weights():
    still = compare(small(), ["fedavg", "feddar-wa", "local"], folds=None, rounds=1, lr=1e-30).results
    frames = [part.drop(columns="method").reset_index(drop=True) for _, part in still.groupby("method")]
    for frame in frames[1:]:
        pd.testing.assert_frame_equal(frame, frames[0], check_exact=False, rtol=1e-6)


def test_a_cell_is_an_ordinary_training(compared):
    comparison, _ = compared
    train, test = list(small().folds(2, 5))[1]
    alone = feddar.train(train, "feddar-sa", test=test, rounds=2, last=1, seed=5).results()
    results = comparison.results
    cell = results[(results["method"] == "feddar-sa") & (results["fold"] == 1) & (results["seed"] == 5)]
    same = cell.drop(columns=["method", "fold", "seed"]).merge(alone, on=["scope", "name", "metric"])
    assert len(same) == len(alone)
    np.testing.assert_array_equal(same["value_x"], same["value_y"])


def test_results_and_curves_are_as_agreed(compared):
    comparison, folder = compared
    results, curves = exactly(folder / "results.csv"), exactly(folder / "curves.csv")
    pd.testing.assert_frame_equal(results, comparison.results, check_dtype=False, check_exact=False, rtol=1e-15)
    assert results.columns.tolist() == RESULTS_COLUMNS
    assert results["metric"].iloc[0] == Binary.metrics[0]
    cells = results[["method", "fold", "seed"]].drop_duplicates()
    expected = [(method, fold, seed) for method in METHODS for fold in range(2) for seed in (4, 5)]
    assert list(cells.itertuples(index=False, name=None)) == expected
    assert not results.duplicated(["method", "fold", "seed", "scope", "name", "metric"]).any()
    gaps = results[results["name"] == "domain_gap"]
    assert set(gaps["metric"]) == {"auc", "tpr", "fpr", "selection_rate"}
    assert set(results["scope"]) == {"all", "domain", "client", "summary", "cell"}
    assert curves.columns.tolist() == ["method", "fold", "seed", "round", "scope", "name", "metric", "value"]
    assert set(curves["round"]) == {1, 2}
    assert set(curves["metric"]) == {"auc", "auprc", "accuracy", "log_loss", "brier", "loss"}
    assert set(curves["scope"]) == {"domain", "summary", "validation"}


def test_several_classes_and_numbers():
    for classes, main in ((3, "accuracy"), (0, "mse")):
        found = compare(small(classes=classes), ["fedavg", "feddar-sa"], folds=2, rounds=2)
        assert found.results["metric"].iloc[0] == main
        averaged = found.results[found.results["name"] == "domain_avg"]["metric"]
        assert set(found.curves["metric"]) == {*averaged, "loss"}
        assert f"| {'Max' if main == 'mse' else 'Min'} | Avg | Client avg |" in found.table()


def test_any_number_of_jobs_gives_the_same_bytes(compared, tmp_path):
    _, folder = compared
    compare(small(), METHODS, seeds=2, seed=4, out=tmp_path / "out", jobs=3, **FEW)
    for name in ("results.csv", "curves.csv", "table.md", "config.toml"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()


def test_a_tuned_comparison_is_the_same_for_any_number_of_jobs(tmp_path):
    for jobs in (1, 2):
        compare(small(), ["fedavg"], folds=2, rounds=1, tune=True, jobs=jobs, out=tmp_path / str(jobs))
    for name in ("results.csv", "tuning.csv", "table.md"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()


class Stopper:
    """Interrupts after so many reports, as Ctrl-C would."""

    def __init__(self, after):
        self.left = after

    def __call__(self, step):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


@pytest.mark.parametrize(("jobs", "tune"), first([(2, True)], product((1, 2), (False, True))))
def test_interrupted_and_resumed_gives_the_same_bytes(tmp_path, jobs, tune):
    options = {"methods": ["fedavg", "local"], "folds": 2, "rounds": 3, "tune": tune}
    compare(small(), out=tmp_path / "whole", **options)
    with pytest.raises(KeyboardInterrupt):
        compare(small(), out=tmp_path / "cut", jobs=jobs, report=Stopper(9), **options)
    assert not multiprocessing.active_children()
    assert not (tmp_path / "cut" / "results.csv").exists()
    begun = [about["round"] for about in headers(tmp_path / "cut").values()]
    assert len(begun) < 4 or min(begun) < 3
    compare(small(), out=tmp_path / "cut", resume=True, jobs=3 - jobs, **options)
    for name in ("results.csv", "curves.csv", "table.md", "config.toml", *(["tuning.csv"] if tune else [])):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_methods_and_seeds_can_be_added_and_what_is_done_is_kept(tmp_path):
    first = compare(small(), ["fedavg"], out=tmp_path, **FEW)
    models = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/*/model.safetensors")}
    steps = []
    grown = compare(small(), ["local", "fedavg"], seeds=2, out=tmp_path, resume=True, report=steps.append, **FEW)
    assert all(path.stat().st_mtime_ns == before for path, before in models.items())
    assert {step.cells for step in steps} == {2 * 2 * 2 - 2}
    kept = grown.results[(grown.results["method"] == "fedavg") & (grown.results["seed"] == 0)]
    pd.testing.assert_frame_equal(kept.reset_index(drop=True), first.results)
    again = compare(small(), ["local", "fedavg"], seeds=2, out=tmp_path, resume=True, **FEW)
    pd.testing.assert_frame_equal(again.results, grown.results)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"folds": 3}, "was started with folds=2, not 3"),
        ({"seeds": 1}, "was started with seeds=2, not 1"),
        ({"methods": ["fedavg", "feddar-sa"]}, "was started with methods=local,fedavg,feddar-sa, not fedavg,feddar-sa"),
        ({"tune": True}, "was started with tune=False, not True"),
        ({"rounds": 4}, "was started with rounds=2, not 4"),
        ({"lr": 0.01}, "was started with lr=0.003, not 0.01"),
        ({"head_lr": 0.01}, "was started with head_lr=None, not 0.01"),
        ({"cohort": small(seed=1)}, "was started with other data"),
        ({"resume": False}, "already holds results"),
    ],
)
def test_a_comparison_resumes_as_it_was_or_not_at_all(compared, changed, message):
    _, folder = compared
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    given = {"cohort": small(), "methods": METHODS, "seeds": 2, "seed": 4, "out": folder, "resume": True} | FEW
    with pytest.raises(UserError, match=re.escape(message)):
        compare(**given | changed)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"methods": ["fedavg", "fedag"]}, "did you mean 'fedavg'"),
        ({"methods": ["fedavg", "fedavg"]}, "named twice"),
        ({"methods": []}, "no method to compare"),
        ({"reference": "feddar-wa"}, "'feddar-wa' is not among the methods compared"),
        ({"folds": 0}, "folds should be greater than or equal to 1"),
        ({"cohort": lonely()}, "domain 'lonely' has 1 sample"),
        ({"seeds": 0}, "seeds should be"),
        ({"jobs": 0}, "jobs must be 1 or more"),
        ({"lr": -1}, "lr should be greater than 0"),
        ({"roundz": 3}, "unknown option 'roundz'"),
        ({"encoder": "cnn"}, "encoder 'cnn' takes images"),
        ({"resume": True}, "there is no comparison in"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_trained(tmp_path, changed, message):
    with pytest.raises(UserError, match=re.escape(message)):
        compare(**{"cohort": small(), "methods": METHODS, "out": tmp_path / "out"} | FEW | changed)
    assert not (tmp_path / "out").exists()


def cells_of(tmp_path, **options):
    cohort = small()
    parts = {fold: (lambda fold=fold: list(cohort.folds(2, 0))[fold]) for fold in range(2)}
    return [
        Cell(
            {"kind": kind, "fold": fold},
            {"method": "fedavg", "rounds": 2} | options.get(kind, {}),
            parts[fold],
            tmp_path / kind / str(fold),
        )
        for kind in ("good", "bad")
        for fold in range(2)
    ]


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_training_that_diverges_takes_no_other_down(tmp_path, jobs):
    wild = {"lr": 1e9, "optimizer": "sgd", "rounds": 4}
    found = run_cells(cells_of(tmp_path, bad=wild), jobs=jobs)
    assert [str(cell) for cell, _ in found.failures] == ["bad, fold 0", "bad, fold 1"]
    assert "diverged" in found.failures[0][1]
    assert found.results[["kind", "fold"]].drop_duplicates().to_numpy().tolist() == [["good", 0], ["good", 1]]


def test_a_process_that_dies_takes_no_other_down(tmp_path):
    parent = os.getpid()

    class Deadly(torch.nn.Linear):
        def forward(self, x):
            if os.getpid() != parent:
                os._exit(9)
            return super().forward(x)

    found = run_cells(cells_of(tmp_path, bad={"encoder": Deadly(6, 4)}), jobs=2)
    assert [str(cell) for cell, _ in found.failures] == ["bad, fold 0", "bad, fold 1"]
    assert "ended unexpectedly" in found.failures[0][1]
    assert len(found.results)


def test_what_is_wrong_in_one_process_stops_all(tmp_path):
    def observe(test, scores):
        raise UserError("the disk is full.")

    with pytest.raises(UserError, match="the disk is full"):
        run_cells(cells_of(tmp_path), jobs=2, observe=observe)
    assert not multiprocessing.active_children()


def test_a_fault_in_one_process_is_shown_with_its_place(tmp_path):
    def observe(test, scores):
        raise ZeroDivisionError

    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        run_cells(cells_of(tmp_path), jobs=2, observe=observe)


def test_cells_share_data_and_need_their_own_folders(tmp_path):
    cohort, calls = small(), []

    def parts():
        calls.append(1)
        return cohort.split(0.3, 0)

    cells = [Cell({"n": n}, {"method": "fedavg", "rounds": 1, "seed": n}, parts, tmp_path / str(n)) for n in range(3)]
    found = run_cells(cells)
    assert len(calls) == 2, "once to check, once to train"
    assert found.results["n"].unique().tolist() == [0, 1, 2]
    with pytest.raises(UserError, match="already holds a run"):
        run_cells(cells)
    with pytest.raises(UserError, match="would share the folder"):
        run_cells([cells[0], replace(cells[1], folder=cells[0].folder)], resume=True)


def test_later_cells_are_trained_after_those_with_other_data(tmp_path):
    cells = [replace(cell, later=cell.labels["kind"] == "good") for cell in cells_of(tmp_path)]
    done: list[str] = []
    found = run_cells(cells, report=lambda step: done.append(str(step.cell)) if step.state == "done" else None)
    assert done == ["bad, fold 0", "bad, fold 1", "good, fold 0", "good, fold 1"]
    assert found.results["kind"].unique().tolist() == ["good", "bad"], "results are in the order of the list"


def test_a_function_gives_the_cohort_of_each_seed():
    asked = []

    def cohort(seed):
        asked.append(seed)
        return small(seed=seed)

    found = compare(cohort, ["fedavg"], folds=None, seeds=2, seed=3, rounds=1).results
    assert asked == [3, 4]
    train, test = small(seed=4).split(0.2, 4)
    alone = feddar.train(train, "fedavg", test=test, rounds=1, seed=4).results()
    second = found[(found["seed"] == 4) & (found["scope"] == "all") & (found["metric"] == "auc")]
    assert second["value"].iloc[0] == alone["value"].iloc[0]


# The search


def with_knob(monkeypatch, knob="damping"):
    monkeypatch.setattr(tuning.Search, "knob", knob)


def test_the_search_tries_rates_and_then_the_knob_at_the_best(monkeypatch):
    with_knob(monkeypatch)
    settings = feddar.Settings(method="feddar-sa", lr=0.003, damping=0.1)
    search, tried = tuning.Search(settings, lower=False), []
    while (point := search.next()) is not None:
        tried.append(point)
        search.scores[point] = {0.001: 0.9, 0.003: 0.8}.get(round(point[0], 9), float("nan")) - (point[1] == 0.01)
    assert [(round(rate, 9), value) for rate, value in tried] == [
        (0.003, 0.1), (0.001, 0.1), (0.009, 0.1), (0.001, 0.01), (0.001, 1.0),
    ]  # fmt: skip
    assert len(tried) == search.length
    assert search.best() == tried[1], "the earlier one of equals"
    assert search.options(search.best()) == {"lr": tried[1][0], "damping": 0.1}


@pytest.mark.parametrize(("lower", "best"), [(True, 0.5), (False, 0.7)])
def test_the_best_score_is_chosen_and_undefined_ones_are_not(lower, best):
    search = tuning.Search(feddar.Settings(method="fedavg"), lower)
    search.scores = {(1.0, None): float("nan"), (2.0, None): 0.5, (3.0, None): 0.7}
    assert search.scores[search.best()] == best


@pytest.mark.parametrize("classes", [0, 2])
def test_what_is_chosen_is_what_is_trained(tmp_path, monkeypatch, classes):
    with_knob(monkeypatch)
    cohort = small(classes=classes)
    found = compare(cohort, ["feddar-sa"], folds=2, rounds=2, tune=True, out=tmp_path)
    written = pd.read_csv(tmp_path / "tuning.csv")
    assert written.columns.tolist() == ["method", "fold", "seed", "lr", "knob", "knob_value", "score", "chosen"]
    for fold, (train, test) in enumerate(cohort.folds(2, 0)):
        own = written[written["fold"] == fold]
        chosen = own[own["chosen"]].iloc[0]
        assert chosen["score"] == (own["score"].min() if classes == 0 else own["score"].max())
        options = {"lr": float(chosen["lr"]), "damping": float(chosen["knob_value"])}
        alone = feddar.train(train, "feddar-sa", test=test, rounds=2, **options).results()
        cell = found.results[found.results["fold"] == fold]
        assert cell["value"].iloc[0] == alone["value"].iloc[0]
        inner, validation = tuning.inner_split(train, 0)
        scored = feddar.train(inner, "feddar-sa", test=validation, rounds=2, **options).results()
        main = cohort.objective.metrics[0]
        expected = scored[(scored["name"] == "domain_avg") & (scored["metric"] == main)]["value"].iloc[0]
        assert chosen["score"] == expected


def test_the_search_never_sees_the_test_part(tmp_path):
    train, test = small().split(0.3, 0)
    wrong = replace(test, x=tuple(torch.randn_like(part) for part in test.x), y=1 - test.y)
    found = {
        name: run_cells(
            [Cell({"method": "fedavg"}, {"method": "fedavg", "rounds": 2}, lambda p=part: (train, p), tmp_path / name)],
            tune=True,
        )
        for name, part in (("test", test), ("wrong", wrong))
    }
    pd.testing.assert_frame_equal(found["test"].tuning, found["wrong"].tuning)
    assert not found["test"].results["value"].equals(found["wrong"].results["value"])


def test_a_rate_that_diverges_is_not_chosen(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "LR_FACTORS", (1.0, 1e12))
    found = compare(small(), ["fedavg"], folds=2, rounds=4, tune=True, optimizer="sgd", lr=0.01)
    assert found.tuning["score"].isna().tolist() == [False, True] * 2
    assert found.tuning["chosen"].tolist() == [True, False] * 2
    assert not found.failures


# The table


def tables_in(text):
    """Return the tables of a Markdown text, each as a list of rows of cells, by the heading they stand under."""
    found, heading = {}, ""
    for line in text.splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        elif line.startswith("| "):
            cells = [cell.strip().strip("*") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            found.setdefault(heading, []).append(cells)
    return {heading: [rows[0], *rows[2:]] for heading, rows in found.items()}


def shown(values, metric="auc"):
    values = values.dropna()
    return f"{paper_number(metric, values.mean())} ± {paper_number(metric, values.std(ddof=1))}"


def test_every_number_of_the_table_follows_from_the_results(compared):
    _, folder = compared
    results = exactly(folder / "results.csv")
    tables = tables_in((folder / "table.md").read_text(encoding="utf-8"))
    assert list(tables) == ["Methods compared", "Differences to fedavg", "Other metrics", "Gaps between domains"]

    def values(method, scope, name, metric="auc"):
        own = (results["method"] == method) & (results["scope"] == scope) & (results["name"] == name)
        return results[own & (results["metric"] == metric)].set_index(["fold", "seed"])["value"]

    places = [("domain", "domain-0"), ("domain", "domain-1")]
    places += [("summary", name) for name in ("domain_min", "domain_avg", "client_avg")]
    header, counts, *rows = tables["Methods compared"]
    assert header == ["Methods", "domain-0", "domain-1", "Min", "Avg", "Client avg"]
    cohort = small()
    for m in range(2):
        held = cohort.domain == m
        assert counts[1 + m] == f"{held.sum()} ({cohort.y[held].sum()})"
    assert [row[0] for row in rows] == METHODS
    for method, *cells in rows:
        assert cells == [shown(values(method, *place)) for place in places]
    _, *rows = tables["Differences to fedavg"]
    differences = paired_differences(results, "fedavg").set_index(["method", "scope", "name", "metric"])
    assert [row[0] for row in rows] == ["local", "feddar-sa"]
    for method, *cells, pairs in rows:
        for place, cell in zip(places[2:], cells, strict=True):
            by_hand = (values(method, *place) - values("fedavg", *place)).mean()
            row = differences.loc[(method, *place, "auc")]
            assert row["difference"] == pytest.approx(by_hand)
            difference, low, high = (
                paper_number("auc", row[name], sign=True) for name in ("difference", "low", "high")
            )
            assert cell == f"{difference} [{low}, {high}]"
        assert pairs == "4"
    header, *rows = tables["Other metrics"]
    other = {
        "auprc": "Area under the precision-recall curve", "accuracy": "Accuracy (%)", "log_loss": "Log-loss",
        "brier": "Brier score", "ece": "Expected calibration error",
    }  # fmt: skip
    assert header == ["Methods", *other.values()]
    for method, *cells in rows:
        means = {metric: values(method, "summary", "domain_avg", metric) for metric in other}
        assert cells == [shown(each, metric) for metric, each in means.items()]
    _, *rows = tables["Gaps between domains"]
    metrics = ["auc", "tpr", "fpr", "selection_rate"]
    for method, *cells in rows:
        assert cells == [shown(values(method, "summary", "domain_gap", metric)) for metric in metrics]


def test_the_best_is_bold_and_the_command_is_named(compared):
    comparison, _ = compared
    text = comparison.table()
    results = comparison.results
    averages = results[(results["name"] == "domain_avg") & (results["metric"] == "auc")]
    means = averages.groupby("method")["value"].mean()
    row = next(line for line in text.splitlines() if line.startswith(f"| {means.idxmax()} |"))
    assert f"**{paper_number('auc', means.max())} ±" in row
    assert "- local: model: the personal one of the client that holds the sample; for a client never seen," in text
    assert "- feddar-sa: encoder: one for all; head: that of the sample's domain." in text
    assert "seeds: 4, 5; 2 rounds" in text


def test_missing_and_undefined_values_are_marked(tmp_path):
    cohort = small()
    few = torch.nonzero(cohort.domain == 1).flatten()
    label = cohort.y.clone()
    label[few] = 0
    label[few[0]] = 1
    found = compare(
        replace(cohort, y=label), ["fedavg", "feddar-wa"], folds=3, rounds=4, head_lr=1e9, optimizer="sgd", lr=0.01
    )
    assert {cell.labels["method"] for cell, _ in found.failures} == {"feddar-wa"}
    rows = {row[0]: row for row in tables_in(found.table())["Methods compared"]}
    assert rows["feddar-wa"][1:] == ["–"] * 5
    assert rows["fedavg"][2].endswith("(1)"), "AUC of domain-1 is defined in one fold"
    assert "## Missing" in found.table()
    assert "feddar-wa, fold 2, seed 0: client" in found.table()


def test_names_may_hold_what_tables_are_made_of():
    cohort = small()
    odd = replace(cohort, domains=("a|b", "c\n*d*"))
    text = compare(odd, ["fedavg"], folds=2, rounds=1).table()
    assert "a\\|b" in text
    assert len(tables_in(text)["Methods compared"]) == 3


def test_a_comparison_in_which_everything_fails_says_so(tmp_path):
    found = compare(small(), ["fedavg"], folds=2, rounds=4, lr=1e9, optimizer="sgd", out=tmp_path)
    assert len(found.failures) == 2
    assert exactly(tmp_path / "results.csv").columns.tolist() == RESULTS_COLUMNS
    assert "## Missing" in (tmp_path / "table.md").read_text(encoding="utf-8")


def test_the_metric_that_is_asked_for_comes_first_and_changes_nothing_else(compared, tmp_path, capsys):
    before, _ = compared
    options = {"seeds": 2, "seed": 4, "out": tmp_path / "out", **FEW}
    with pytest.raises(UserError, match="there is no metric 'mse'"):
        compare(small(), METHODS, metric="mse", **options)
    assert not (tmp_path / "out").exists()
    found = compare(small(), METHODS, metric="log-loss", **options)
    pd.testing.assert_frame_equal(found.results, before.results)
    assert found.metric == "log_loss" and found.table().splitlines()[2].startswith("Log-loss, lower is better")
    show_comparison(Console(width=200), found, tmp_path)
    said = capsys.readouterr().out
    assert "Log-loss, mean of 2 folds and 2 seeds; lower is better" in said and "interval, Student's" in said
    assert "Max is of the worst domain of each repeat" in said
    header = next(line.split() for line in said.splitlines() if line.startswith("method "))
    assert header[-5:] == ["avg", "client", "avg", "avg", "ECE"], "log-loss is the main metric here"
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.index('<option value="0">Log-loss') < page.index('<option value="1">AUC')
    assert "Gap in AUC" in page
    again = compare(small(), METHODS, metric="brier", resume=True, **options)
    assert again.metric == "brier"
