"""The regret table: its arithmetic on results made by hand, what it says is missing, its parts, and a tiny run."""

import shutil
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import pytest

from feddar import cli
from feddar.comparison import references
from feddar.data.sources import BUILT_IN
from feddar.errors import TrainingError, UserError
from feddar.experiments import EXPERIMENTS, find_experiment, never_worse, planted, regret, tcga_brca
from feddar.experiments.common import ExperimentOptions
from feddar.methods import METHODS

ALIKE = "planted (synthetic), domains alike"
FIGURES = (("domain_avg", "auc"), ("domain_min", "auc"), ("domain_avg", "log_loss"), ("domain_max", "log_loss"))


def results_of(cohort, values, figures=FIGURES):
    """Results in which a method has the same values by fold in every figure."""
    rows = [
        (cohort, method, fold, 0, "summary", name, metric, value, 5)
        for method, by_fold in values.items()
        for fold, value in enumerate(by_fold)
        for name, metric in figures
        if value is not None
    ]
    return pd.DataFrame(rows, columns=[*regret.CELL, "scope", "name", "metric", "value", "count"])


def planned_for(results):
    return results[regret.CELL].replace("majority", references.REFERENCES).drop_duplicates().reset_index(drop=True)


BY_HAND = results_of(
    "wards", {"fedavg": [0.7, 0.8], "fedrep": [0.8, 0.9], "feddar": [0.75, 0.83], "majority": [0.99, 0.99]}
)


def test_regret_is_the_best_of_all_methods_less_ours():
    found = regret.standing(BY_HAND, "domain_avg", "auc")
    assert found.best.method == "fedrep"  # and not the pooled reference
    assert found.best.difference == pytest.approx((0.05 + 0.07) / 2)
    assert found.best.low < found.best.difference < found.best.high
    assert [found.regret(method) for method in ("fedrep", "feddar", "fedavg")] == pytest.approx([0, 0.06, 0.1])
    assert found.gaps["fedavg"].difference == pytest.approx(-0.04)
    assert "majority" not in found.gaps


def test_where_lower_is_better_the_lowest_is_the_best_and_regret_is_still_positive():
    found = regret.standing(BY_HAND, "domain_avg", "log_loss")
    assert found.best.method == "fedavg"
    assert found.best.difference == pytest.approx(0.04)
    assert found.best.low < found.best.difference < found.best.high
    assert found.regret("fedrep") == pytest.approx(0.1)


def test_ours_is_the_best_where_none_is_better():
    ours = results_of("wards", {"fedavg": [0.7, 0.8], "fedbn": [0.8, 0.9], "feddar": [0.8, 0.9]})
    found = regret.standing(ours, "domain_avg", "auc")
    assert (found.best.method, found.regret("feddar"), found.next_best.method) == ("feddar", 0, "fedbn")
    assert regret.regret_text(found).startswith("0; next ")
    assert "ours is the best on 1 of 1 cohorts. Worse than FedAvg" in regret.verdict("mean domain", [found])


def test_a_method_that_lacks_a_fold_of_ours_is_not_ranked():
    partly = results_of("wards", {"fedavg": [0.7, 0.8], "fedrep": [0.99, None], "feddar": [0.75, 0.83]})
    assert set(regret.standing(partly, "domain_avg", "auc").gaps) == {"fedavg", "feddar"}
    unfinished = results_of("wards", {"fedavg": [0.7, 0.8], "feddar": [None, None]})
    assert regret.standing(unfinished, "domain_avg", "auc") is None


def test_verdicts_say_where_it_does_not_hold():
    worse = results_of("wards", {"fedavg": [0.80] * 5, "feddar": [0.75, 0.74, 0.76, 0.75, 0.75]})
    better = results_of("homes", {"fedavg": [0.70] * 5, "feddar": [0.75, 0.74, 0.76, 0.75, 0.75]})
    said = regret.verdict("mean domain", regret.standings(pd.concat([worse, better]), regret.VIEWS[0]))
    assert "ours is the best on 1 of 2 cohorts" in said
    assert "Largest regret: **+.050" in said
    assert "on wards, to fedavg" in said
    assert "Worse than the best by more than the interval on 1: wards (fedavg)." in said
    assert "Worse than FedAvg by more than the interval on 1: wards." in said
    assert "no interval" not in said
    once = results_of("wards", {"fedavg": [0.80], "feddar": [0.75]})
    assert "On 1 there is no interval" in regret.verdict("mean domain", regret.standings(once, regret.VIEWS[0]))


def test_three_draws_make_nothing_bold_and_are_still_counted_against_ours():
    worse = results_of("wards", {"fedavg": [0.80] * 3, "feddar": [0.75, 0.74, 0.76]})
    found = regret.standing(worse, "domain_avg", "auc")
    assert regret.regret_text(found).startswith("+.050 [+.0")
    assert "on 1: wards (fedavg)" in regret.verdict("mean domain", [found])


def test_the_table_has_the_references_below_the_methods_and_the_best_in_bold():
    text = regret.table(BY_HAND, planned_for(BY_HAND))
    lines = text[text.index("## wards") :].splitlines()
    names = [line.split(" | ")[0].removeprefix("| ") for line in lines if line.startswith("|")]
    assert names == ["Methods", "---", "fedavg", "fedrep", "feddar", "*pooled references:*", "majority"]
    assert "| **.850 ± .071** |" in next(line for line in lines if line.startswith("| fedrep"))
    assert "| wards | AUC | fedrep | .850 | .790 | +.060 [" in text


def test_missing_cells_are_named():
    planned = pd.concat([planned_for(BY_HAND), planned_for(results_of("homes", {"fedavg": [1, 1]}))])
    some = BY_HAND[~((BY_HAND["method"].isin(["fedrep", "majority"])) & (BY_HAND["fold"] == 1))]
    assert list(regret.missing(some, planned)) == [
        "wards: 2 of 8 cells: fedrep (fold 1), references (fold 1).",
        "homes: all 2 cells, it is not begun.",
    ]
    none = BY_HAND[BY_HAND["method"] != "fedrep"]
    assert next(iter(regret.missing(none, planned))) == "wards: 2 of 8 cells: all of fedrep."
    assert "- failed: fedrep: it diverged" in regret.table(some, planned, ["fedrep: it diverged"])
    assert "Nothing is missing" in regret.table(BY_HAND, planned_for(BY_HAND))


def test_nothing_is_said_without_ours(tmp_path):
    others = results_of("wards", {"fedavg": [0.7, 0.8]})
    assert "Nothing can be said yet" in regret.table(others, planned_for(others))
    regret.draw_figure(others, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").exists()


@pytest.fixture
def tiny(monkeypatch):
    """Two methods beside ours, two repetitions and small tables."""
    monkeypatch.setattr(never_worse, "EVERY", ("fedavg", "feddar"))
    monkeypatch.setattr(never_worse, "SCALES", {"small": never_worse.Repetitions(folds=2, draws=2, image_draws=1)})
    monkeypatch.setattr(references, "_boosting", references._linear)  # a tenth of the time
    monkeypatch.setattr(planted, "ROWS", 300)
    monkeypatch.setattr(planted, "SHARES", {"A": 0.7, "B": 0.3})
    for seed, name in enumerate(("eicu", "covid-mx")):
        small = partial(planted.cohort, seed, apart=False)
        source = replace(BUILT_IN[name], load=lambda *_, small=small: small(), settings={"rounds": 2, "last": 1})
        monkeypatch.setitem(BUILT_IN, name, source)


def run_parts(out, only, **options):
    return never_worse.run(ExperimentOptions(out, lambda _: None, only=only, **options))


def test_parts_accumulate_and_the_table_says_what_it_lacks(tiny, tmp_path):
    first = run_parts(tmp_path, "eicu")
    assert list(first.columns) == never_worse.COLUMNS
    assert set(first["cohort"]) == {"eicu"}
    assert {"fedavg", "feddar", "majority", "pooled-boosting, domain known"} <= set(first["method"])
    assert "client" not in set(first["scope"])
    text = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert "- covid-mx: all 6 cells, it is not begun." in text
    assert "- eicu" not in text
    both = run_parts(tmp_path, "covid-mx", resume=True, jobs=2)
    assert list(both["cohort"].unique()) == ["eicu", "covid-mx"]
    pd.testing.assert_frame_equal(both[both["cohort"] == "eicu"], first)
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "results.csv"), both)
    text = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert "- covid-mx" not in text
    assert "- tcga-brca: all 6 cells, it is not begun." in text
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    pd.testing.assert_frame_equal(run_parts(tmp_path, "covid-mx, eicu", resume=True), both)


def test_results_are_kept_where_the_folders_of_trainings_are_not(tiny, tmp_path):
    first = run_parts(tmp_path, "eicu")
    shutil.rmtree(tmp_path / "runs")
    said: list[str] = []
    options = ExperimentOptions(tmp_path, said.append, only="eicu", resume=True)
    pd.testing.assert_frame_equal(never_worse.run(options), first, check_dtype=False)
    assert said == []
    assert not (tmp_path / "runs").exists()
    assert "- eicu" not in (tmp_path / "table.md").read_text(encoding="utf-8")
    both = run_parts(tmp_path, "covid-mx", resume=True)
    lost = (both["cohort"] == "eicu") & (both["fold"] == 1) & (both["method"] != "fedavg")
    both[~lost].to_csv(tmp_path / "results.csv", index=False)
    pd.testing.assert_frame_equal(never_worse.run(options), both, check_dtype=False)
    assert said == ["eicu, references, fold 1, seed 0 done", "1 of 1: eicu, feddar, fold 1, seed 0 done"]


def test_all_folds_of_the_methods_that_matter_come_first(tiny, tmp_path, monkeypatch):
    """So what is stopped early can be ranked."""
    monkeypatch.setattr(never_worse, "EVERY", ("local", "fedavg", "feddar"))
    said: list[str] = []
    never_worse.run(ExperimentOptions(tmp_path, said.append, only="eicu", jobs=1))
    order = [text.split("eicu, ")[1].split(",")[0] for text in said]
    assert order == ["references"] * 2 + ["fedavg", "feddar"] * 2 + ["local"] * 2


def test_runs_with_other_settings_are_not_mixed_in(tiny, tmp_path, monkeypatch):
    run_parts(tmp_path, "eicu")
    monkeypatch.setitem(BUILT_IN, "eicu", replace(BUILT_IN["eicu"], settings={"rounds": 2, "last": 1, "lr": 0.5}))
    with pytest.raises(UserError, match="was started with lr="):
        run_parts(tmp_path, "covid-mx")
    assert not (tmp_path / "runs" / "covid-mx").exists()


def test_a_failed_training_is_an_error_once_the_table_names_it(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(never_worse, "EVERY", ("fedavg", "fedprox", "feddar"))
    steep = {"rounds": 1, "mu": 1e20, "optimizer": "sgd", "batch_size": 8}
    monkeypatch.setitem(BUILT_IN, "eicu", replace(BUILT_IN["eicu"], settings=steep))
    with pytest.raises(TrainingError, match=r"a training failed \(2 of them\): eicu, fedprox, fold 0"):
        run_parts(tmp_path, "eicu")
    text = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert "- eicu: 2 of 8 cells: all of fedprox." in text
    assert "- failed: eicu, fedprox, fold 0" in text


def test_parts_are_declared_without_reading_data(tmp_path):
    options = ExperimentOptions(tmp_path, lambda _: None, data=str(tmp_path / "nowhere"))
    often = never_worse.SCALES["small"]
    found = [entry for name, make in never_worse.PARTS.items() for entry in make(name, often, options)]
    assert len({entry.name for entry in found}) == len(found) == 16
    by_name = {entry.name: entry for entry in found}
    assert {cell.labels["method"] for cell in by_name["covid-mx"].cells} == set(never_worse.EVERY)
    # These came after the table.
    later = {"group-dro", "q-ffl", "afl", "analytic", "fairfed", "fedrod", "ifca", "fedem", "feddar-mixture"}
    assert set(METHODS) - set(never_worse.EVERY) == later
    assert len(by_name["covid-mx"].cells) == 5 * 19
    assert len(by_name["digits, α = 100"].cells) == 3 * 8
    alike = by_name[ALIKE].cells[0]
    assert dict(alike.options) == {"method": "feddar", "seed": 0, "validation": None}  # the product's defaults
    assert alike.data()[0].fingerprint() == planted.cohort(0, apart=False).split(0.2, 0)[0].fingerprint()
    assert by_name["exam (synthetic), difference 0.5"].cells[0].settings().weight_decay == 1e-3
    assert {cell.labels["method"] for cell in by_name["face-age, α = 1"].cells if "k" in cell.options} == {"feddar-sa"}


@pytest.mark.parametrize(
    ("name", "only", "says"),
    [
        ("never-worse", "exma", "unknown part 'exma': did you mean 'exam'?"),
        ("exam", "eicu", "this experiment has no parts: leave out --only."),
        ("effect-of-k", "fedavg", "this experiment has no parts: leave out --only."),
        ("digits", "feddar-w", "unknown part 'feddar-w': did you mean 'feddar-wa'?"),
        (
            "digits",
            "7",
            "unknown part '7': there are: 0.1, 1, 100, fedavg, fedavg-mh, feddar-wa, feddar-sa, feddar, fedavg-narrow.",
        ),
    ],
)
def test_a_wrong_part_is_one_sentence(name, only, says, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["feddar", "paper", name, "--only", only, "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    assert capsys.readouterr().err.strip() == f"feddar: {says}"
    assert not (tmp_path / "out").exists()


IN_PARTS = ("never-worse", "digits", "face-age", "face-gender")


@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if name not in IN_PARTS])
def test_experiments_without_parts_refuse_them(name, tmp_path):
    with pytest.raises(UserError, match="has no parts"):
        find_experiment(name)(ExperimentOptions(tmp_path, lambda _: None, only="exam"))


def test_planted_domains_have_their_shares_and_differ_only_if_told_to():
    assert planted.counts() == [2000, 1000, 560, 320, 120]
    alike, again = planted.cohort(1, apart=False), planted.cohort(1, apart=False)
    assert alike.fingerprint() == again.fingerprint() != planted.cohort(2, apart=False).fingerprint()
    assert (len(alike), len(alike.clients), alike.x[0].shape[1]) == (4000, 6, 12)
    assert alike.counts.sum(0).tolist() == planted.counts()
    x = np.random.default_rng(0).standard_normal((20_000, planted.FEATURES))
    assert planted.bends(x).std(0) == pytest.approx(np.ones(10), abs=0.05)


def test_tcga_brca_joins_its_two_files(tmp_path):
    place = tmp_path / "tcga_brca"
    place.mkdir()
    number = np.arange(240)
    clinical = {"pid": number, "age_at_index": 40 + number % 50, "race_asian": number % 2, "race_white": 1 - number % 2}
    pd.DataFrame(clinical | {"E": number // 2 % 2 * 1.0, "T": 100.0 + number}).to_csv(place / "brca.csv", index=False)
    split = {"pid": number[::-1], "fold": "train", "fold2": [f"train_{n % 3}" for n in number[::-1]]}
    pd.DataFrame(split).iloc[:239].to_csv(place / "train_test_split.csv", index=False)
    cohort = tcga_brca.cohort(str(tmp_path))
    assert (len(cohort), cohort.clients, cohort.domains) == (239, ("0", "1", "2"), ("asian", "white"))
    assert [column.name for column in cohort.columns] == ["age_at_index"]
    assert cohort.classes == ("no", "yes")
    with pytest.raises(UserError, match=r"brca\.csv, train_test_split\.csv into a folder 'tcga_brca'"):
        tcga_brca.cohort(str(tmp_path / "nowhere"))


@pytest.mark.parametrize(("rows", "methods"), [(5, 19), (3, 8)])
def test_regret_by_chance_is_that_of_methods_that_are_equally_good(rows, methods):
    random = np.random.default_rng(0)
    found, expected = [], []
    for _ in range(400):
        values = pd.DataFrame(random.normal(size=(rows, 1)) + 0.01 * random.normal(size=(rows, methods)))
        means = values.mean()
        expected.append(means.max() - means.mean())
        found.append(regret.regret_by_chance(values))
    assert np.mean(found) == pytest.approx(np.mean(expected), rel=0.1)
    assert np.isnan(regret.regret_by_chance(values[:1]))
