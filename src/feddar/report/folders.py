"""Reads the data of the page: the files of a comparison, or run folders in the form of the same frames.

``results`` and ``curves`` have the columns of ``results.csv`` and ``curves.csv``. A run has one fold and one seed, and
fewer rows (no cells, gaps or positives), so the code that uses the frames must allow for missing rows.
"""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf, isclose, isnan
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from feddar.data.sources import BUILT_IN, read_options, source_named
from feddar.errors import UserError
from feddar.evaluation.figures import Figure, Figures
from feddar.evaluation.intervals import (
    FEWEST,
    RESULTS_COLUMNS,
    UNIT,
    across,
    is_clear,
    kinds_of_intervals,
    paired_differences,
)
from feddar.evaluation.operating_point import OperatingPoint
from feddar.evaluation.validation import (
    SPLIT,
    Choice,
    choice_of,
    results_in,
    validation_curve,
    validation_losses,
)
from feddar.federation.coordinator import STUDY_FILE
from feddar.federation.study import TABLES
from feddar.methods import Method
from feddar.objectives.objective import lower_is_better
from feddar.report.markdown import worst_name
from feddar.report.numbers import interval_kinds
from feddar.results.client_metrics import are_left_out
from feddar.results.figure_files import read_figures, read_missing_domains
from feddar.results.run_folder import (
    METRICS_FILE,
    MODEL_FILE,
    REFERENCES_FILE,
    notes_in,
    objective_in,
    read_description,
    read_history,
    read_metrics,
    rounds_done,
)
from feddar.settings import CONFIG_FILE, Settings, checked, read_config, trained_rows

SEVERAL = ", "
RESULTS_FILE, CURVES_FILE = "results.csv", "curves.csv"
CURVES_COLUMNS = ["method", *UNIT, "round", "scope", "name", "metric", "value"]


class Mean(NamedTuple):
    """A method's mean over folds and seeds, its standard deviation, and how many values it covers."""

    mean: float
    sd: float
    pairs: int


class Difference(NamedTuple):
    """A method's mean paired difference to the reference, with an interval (NaN if there are too few pairs)."""

    difference: float
    low: float
    high: float
    pairs: int

    @property
    def clear(self) -> bool:
        """Whether it may be called clear."""
        return is_clear(self.low, self.high, self.pairs)


class Tested(NamedTuple):
    """The number of test samples, and of positive ones (None if that is not known)."""

    n: int
    positives: int | None


@dataclass(frozen=True)
class Compared:
    """The results of several methods, read from files."""

    metric: str
    """The main metric."""
    results: pd.DataFrame
    curves: pd.DataFrame
    config: dict[str, dict[str, Any]]
    command: str
    """The command that reproduces the numbers."""
    paired: bool
    """Whether all methods had the same splits, seeds and initial weights."""
    rows: list[Method]
    """The rows of the methods as they were trained; unknown methods are left out."""
    versions: dict[str, str] = field(default_factory=dict)
    references: pd.DataFrame = field(default_factory=lambda: pd.DataFrame(columns=RESULTS_COLUMNS))
    """Results of models that see all rows in one place."""
    choices: dict[str, list[Choice]] = field(default_factory=dict)
    """Which round validation has chosen in each training of a method; methods without validation are left out."""
    figures: dict[str, Figures] = field(default_factory=dict)
    """The figures with intervals of each run, where it has them."""
    missing_domains: dict[str, pd.DataFrame] = field(default_factory=dict)
    """What missing domains would cost in each run, where that is known."""
    points: dict[str, OperatingPoint] = field(default_factory=dict)
    """The operating point of each run."""
    notes: list[str] = field(default_factory=list)
    """What coordinators have noted of runs between sites."""
    data_notes: list[str] = field(default_factory=list)
    """What was noted of the data before training."""
    study: str | None = None
    """The name of the study, of runs between sites."""

    @property
    def lower_is_better(self) -> bool:
        """Whether lower values of the metric are better."""
        return lower_is_better(self.metric)

    @property
    def worst(self) -> str:
        """The name of the summary row with the worst domain."""
        return worst_name(self.metric)

    @cached_property
    def methods(self) -> list[str]:
        """The methods, sorted by the mean over domains, best first."""
        return self.ranked("domain_avg")

    def ranked(self, summary: str) -> list[str]:
        """Return the methods, sorted by that summary, best first; undefined values are last."""
        means, sign = self.means["summary", summary], 1 if self.lower_is_better else -1
        return sorted(means, key=lambda method: inf if isnan(means[method].mean) else sign * means[method].mean)

    @property
    def means(self) -> dict[tuple[str, str], dict[str, Mean]]:
        """The metric for each (scope, name) and method."""
        return self._means[self.metric]

    @property
    def other_means(self) -> dict[str, dict[str, Mean]]:
        """The mean over domains of each method, for each metric other than the main one; not of single outcomes."""
        return {name: of for name, of in self._mean_domain.items() if name != self.metric and ":" not in name}

    @property
    def outcome_means(self) -> dict[str, dict[str, Mean]]:
        """The mean over domains of each method, for each outcome of several."""
        return {name: of for name, of in self._mean_domain.items() if name.startswith(f"{self.metric}:")}

    @property
    def _mean_domain(self) -> dict[str, dict[str, Mean]]:
        place = ("summary", "domain_avg")
        return {name: of[place] for name, of in self._means.items() if place in of}

    @cached_property
    def views(self) -> list[Compared]:
        """The same results for each metric that the page can be switched to, the main one first.

        Metrics of single outcomes are too many for a switch: the view of a metric has those of each outcome.
        """
        others = (replace(self, metric=name) for name in self._means if name != self.metric and ":" not in name)
        return [self, *filter(self._has_summaries_of, others)]

    def _has_summaries_of(self, view: Compared) -> bool:
        """Return whether every method has every summary of another metric (it may be undefined)."""
        return all(view.means.get(("summary", name), {}).keys() == set(self.methods) for name in view.summaries)

    def gap(self, metric: str) -> dict[str, Mean]:
        """Return the largest difference between domains of each method; empty if it was not measured."""
        return self._means.get(metric, {}).get(("summary", "domain_gap"), {})

    @cached_property
    def _means(self) -> dict[str, dict[tuple[str, str], dict[str, Mean]]]:
        found: dict[str, dict[tuple[str, str], dict[str, Mean]]] = defaultdict(lambda: defaultdict(dict))
        for row in across(self.results).to_dict("records"):
            found[row["metric"]][row["scope"], row["name"]][row["method"]] = Mean(row["mean"], row["sd"], row["pairs"])
        return found

    @cached_property
    def differences(self) -> dict[str, dict[str, Difference]]:
        """Paired differences of the metric from the reference, for each summary and method; empty if there are none."""
        if len(self.methods) < 2:
            return {}
        rows = self.results[(self.results["scope"] == "summary") & (self.results["metric"] == self.metric)]
        found: dict[str, dict[str, Difference]] = defaultdict(dict)
        for row in paired_differences(rows, self.reference).to_dict("records"):
            found[row["name"]][row["method"]] = Difference(row["difference"], row["low"], row["high"], row["pairs"])
        return found if any(each.pairs for of in found.values() for each in of.values()) else {}

    @property
    def interval_kinds(self) -> str:
        """The kinds of the differences' intervals, in words."""
        return kinds_of_intervals(each.pairs for of in self.differences.values() for each in of.values())

    @property
    def few_pairs(self) -> bool:
        """Whether no difference is of enough pairs to be called clear."""
        return all(each.pairs < FEWEST for of in self.differences.values() for each in of.values())

    @property
    def reference(self) -> str:
        """The method that the others are compared with: as configured, else fedavg, else that of the last folder."""
        named = self.config.get("compare", {}).get("reference")
        return next(name for name in (named, "fedavg", self.results["method"].iloc[-1]) if name in self.methods)

    def figure(self, method: str, domain: str) -> Figure | None:
        """Return the metric of a run in a domain with its interval; None if it has none, or is of another model.

        Figures are of the model in use; without validation results are means over the last rounds.
        """
        mean = self.means["domain", domain].get(method)
        found = self._figures_by_domain.get(method, {}).get(domain, {}).get(self.metric)
        if mean is None or found is None or not found.interval:
            return None
        return found if isclose(mean.mean, found.value, rel_tol=1e-6) else None

    @property
    def figure_intervals(self) -> str:
        """The kinds of intervals that the metric has in domains; empty if it has none."""
        found = (self.figure(method, name) for method in self.methods for name in self.names("domain"))
        return interval_kinds(of.interval for of in found if of is not None)

    @cached_property
    def _figures_by_domain(self) -> dict[str, dict[str, dict[str, Figure]]]:
        return {name: of.by_domain for name, of in self.figures.items()}

    @property
    def last(self) -> list[int]:
        """The number of last rounds that are averaged; several numbers if runs differ in it."""
        given = self.config.get("training", {}).get("last", Settings.model_fields["last"].default)
        return [int(number) for number in str(given).split(SEVERAL)]

    @property
    def averaged_rounds(self) -> list[int]:
        """The number of last rounds that figures are averaged over; several numbers if runs differ in it."""
        if self.choices:
            return [1]
        rounds = max(self.last) if self.curves.empty else int(self.curves["round"].max())
        return list(dict.fromkeys(min(number, rounds) for number in self.last))

    @property
    def worst_of(self) -> str:
        """What the worst domain is found in before means are taken; empty if there is one such thing only."""
        return " and ".join(["round"] * (max(self.averaged_rounds) > 1) + ["repeat"] * (self.units > 1))

    @cached_property
    def units(self) -> int:
        """The number of (fold, seed) pairs that each method should have been trained with."""
        plan = self.config.get("compare", {})
        planned = int(plan.get("folds", 1)) * int(plan.get("seeds", 1))
        return max(planned, len(self.results[UNIT].drop_duplicates()))

    @cached_property
    def missing(self) -> dict[str, int]:
        """The number of failed trainings, for methods with any."""
        trained = self.results.drop_duplicates(["method", *UNIT])["method"].value_counts()
        names = self.config.get("compare", {}).get("methods", [])
        return {name: self.units - int(trained.get(name, 0)) for name in names if trained.get(name, 0) < self.units}

    @property
    def summaries(self) -> dict[str, str]:
        """The summary rows that are shown, with their titles; without clients, where only sums over them are known."""
        shown = {"domain_avg": "mean domain", self.worst: "worst domain"}
        return shown | ({"client_avg": "mean client"} if self.names("client") or are_left_out(self.results) else {})

    def names(self, scope: str) -> list[str]:
        """Return the domains or clients in the order of the file."""
        return list(dict.fromkeys(self.results[self.results["scope"] == scope]["name"]))

    def curve(self, scope: str, name: str) -> pd.DataFrame:
        """Return the metric of each method (columns) by round (index), averaged over folds and seeds."""
        rows = self.curves[(self.curves["scope"] == scope) & (self.curves["name"] == name)]
        rows = rows if scope == SPLIT else rows[rows["metric"] == self.metric]
        mean = rows.groupby(["round", "method"])["value"].mean().unstack()
        return mean.reindex(columns=self.methods)

    def tested(self, scope: str) -> dict[str, Tested]:
        """Return the numbers of test samples by name, summed over the folds of one seed, so that each counts once."""
        rows = self.results[self.results["scope"] == scope]
        complete = rows["method"].value_counts().idxmax()
        one = rows[(rows["method"] == complete) & (rows["seed"] == rows["seed"].iloc[0])]
        # The first row of a name has its samples, whatever metric it is of: all metrics of a name are of the same.
        counts = one.drop_duplicates(["name", "fold"]).groupby("name", sort=False)["count"].sum()
        positives = one[one["metric"] == "positives"].groupby("name")["value"].sum().to_dict()
        if scope == "domain" and complete in self.figures:
            of = self.figures[complete].by_domain
            positives |= {name: found["threshold"].positives for name, found in of.items() if "threshold" in found}
        return {
            str(name): Tested(int(n), int(positives[name]) if name in positives else None) for name, n in counts.items()
        }


def read_folders(folders: Sequence[Path]) -> Compared:
    """Read one comparison folder, or one or more run folders."""
    compared = [folder for folder in folders if (folder / RESULTS_FILE).exists()]
    if len(compared) == len(folders) == 1:
        return _read_comparison(folders[0])
    if compared:
        raise UserError(f"{compared[0]} is a comparison: give it alone, or give run folders only.")
    return _read_runs(folders)


def _read_comparison(folder: Path) -> Compared:
    config = _read_config(folder)
    results = read_metrics(folder / RESULTS_FILE, RESULTS_COLUMNS).astype({"method": str})
    curves = read_metrics(folder / CURVES_FILE, CURVES_COLUMNS).astype({"method": str})
    if results.empty:
        raise UserError(f"{folder / RESULTS_FILE} has no rows: finish the comparison first.")
    command = ["feddar", "compare", _data(config), "--config", CONFIG_FILE, "--out", "again"]
    metric = str(config.get("training", {}).get("metric") or results["metric"].iloc[0])
    if not ((results["scope"] == "summary") & (results["metric"] == metric)).any():
        raise UserError(f"{folder / RESULTS_FILE} has no summary rows: it is not what a comparison wrote.")
    rows = trained_rows(config.get("training", {}), dict.fromkeys(results["method"]))
    pooled = folder / REFERENCES_FILE
    # Those of an earlier run may still be there when a comparison was resumed without them.
    shown = pooled.exists() and config.get("compare", {}).get("references", True)
    references = read_metrics(pooled, RESULTS_COLUMNS) if shown else pd.DataFrame(columns=RESULTS_COLUMNS)
    return Compared(
        metric,
        results,
        curves,
        config,
        shlex.join(command),
        paired=True,
        rows=rows,
        references=references,
        choices=choices_in(curves, config.get("training", {})),
        data_notes=_noted_in_trainings(folder),
    )


def _noted_in_trainings(folder: Path) -> list[str]:
    """Return what was noted of the data of a comparison, as the first of its trainings that is still there has it."""
    first = next(folder.glob(f"runs/*/*/{MODEL_FILE}"), None)
    return [] if first is None else list(read_description(first.parent)["notes"])


def choices_in(curves: pd.DataFrame, training: dict[str, Any]) -> dict[str, list[Choice]]:
    """Return which round the validation losses of a comparison chose in each training, by method."""
    found: dict[str, list[Choice]] = defaultdict(list)
    for (method, *_), losses in curves[curves["scope"] == SPLIT].groupby(["method", *UNIT], sort=False):
        settings = checked(Settings, training | {"method": method})
        choice = choice_of(losses.set_index("round")["value"], settings)
        found[str(method)] += [] if choice is None else [choice]
    return {method: each for method, each in found.items() if each}


def _read_runs(folders: Sequence[Path]) -> Compared:
    runs = [RunFiles.read(folder) for folder in folders]
    for run in runs:
        if not run.tested:
            raise UserError(f"the run in {run.folder} was not evaluated on test samples: there is nothing to show.")
    first = runs[0]
    for run in runs[1:]:
        if run.config.get("data") != first.config.get("data") or run.metric != first.metric:
            raise UserError(f"{first.folder} and {run.folder} are runs on different data: give runs on the same data.")
    named = list(zip(_names(runs), runs, strict=True))
    results = [run.frame(name, results_in(run.history, checked(Settings, run.settings))) for name, run in named]
    curves = [run.frame(name, run.curves) for name, run in named]
    return Compared(
        first.metric,
        pd.concat(results, ignore_index=True)[RESULTS_COLUMNS],
        pd.concat(curves, ignore_index=True)[CURVES_COLUMNS],
        first.config if len(runs) == 1 else {"data": first.config.get("data", {}), "training": _shared(runs)},
        "\n".join(_again(run) for run in runs),
        paired=len({(run.about["fingerprint"], run.settings["seed"]) for run in runs}) == 1,
        rows=[replace(Method(**run.about["method"]), name=name) for name, run in named],
        versions=first.about["versions"],
        choices={name: [choice] for name, run in named if (choice := run.choice) is not None},
        figures={name: figures for name, run in named if (figures := read_figures(run.folder)) is not None},
        missing_domains={name: found for name, run in named if (found := read_missing_domains(run.folder)) is not None},
        points={name: OperatingPoint.of(checked(Settings, run.settings)) for name, run in named},
        notes=[*dict.fromkeys(note for folder in folders for note in notes_in(folder))],
        data_notes=[*dict.fromkeys(note for run in runs for note in run.about["notes"])],
        study=first.study_name,
    )


def _names(runs: Sequence[RunFiles]) -> list[str]:
    """Return names of runs: the method; if that is not unique, with the folder's name, or else with its path."""
    longer = [
        [run.method, f"{run.method} ({run.folder.resolve().name})", f"{run.method} ({run.folder})"] for run in runs
    ]
    names = []
    for each in longer:
        unique = [name for place, name in enumerate(each) if [other[place] for other in longer].count(name) == 1]
        if not unique:
            raise UserError(f"{each[-1]} is given twice: give each run once.")
        names.append(unique[0])
    return names


@dataclass(frozen=True)
class RunFiles:
    """The parts of a run folder that pages and model cards need."""

    folder: Path
    history: pd.DataFrame
    config: dict[str, dict[str, Any]]
    about: dict[str, Any]
    study: dict[str, dict[str, Any]] | None
    """The tables of the study as its file has them; None for runs on one machine, and for a site's copy of a model."""

    @classmethod
    def read(cls, folder: Path) -> RunFiles:
        """Read a run folder; one in which no round was recorded, such as a site's copy of a model, has no history."""
        if not (folder / MODEL_FILE).exists():
            raise UserError(f"{folder} holds neither a comparison ({RESULTS_FILE}) nor a run ({MODEL_FILE}).")
        about = read_description(folder)
        recorded = read_metrics(folder / METRICS_FILE)
        history = recorded if recorded.empty else read_history(folder, rounds_done(about))
        study = folder / STUDY_FILE
        return cls(folder, history, _read_config(folder), about, read_config(study, TABLES) if study.exists() else None)

    @property
    def tested(self) -> bool:
        """Whether there are metrics of test samples."""
        return bool((self.history["split"] == "test").any())

    @property
    def data(self) -> str | None:
        """The name or path of the data; None if it is not known, as of cohorts made in Python."""
        data = self.config.get("data", {}).get("data")
        return None if data is None else str(data)

    @property
    def study_name(self) -> str | None:
        """The name of the study, of runs between sites."""
        return None if self.study is None else str(self.study.get("study", {}).get("name"))

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the training."""
        settings: dict[str, Any] = self.about["settings"]
        return settings

    @property
    def method(self) -> str:
        """The name of the method."""
        return str(self.settings["method"])

    @property
    def metric(self) -> str:
        """The main metric."""
        return objective_in(self.about).headline(self.settings.get("metric"))

    @property
    def curves(self) -> pd.DataFrame:
        """The metrics of each round by domain, their summaries, and the validation losses."""
        test = self.history[self.history["split"] == "test"]
        wanted = test["scope"].isin(["domain", "summary"])
        return pd.concat([test[wanted], validation_curve(self.history)], ignore_index=True)

    @property
    def choice(self) -> Choice | None:
        """Which round validation has chosen; None without validation."""
        return choice_of(validation_losses(self.history), checked(Settings, self.settings))

    @property
    def command(self) -> str:
        """The command that trains it again; of runs between sites, as a rehearsal on one machine."""
        if self.study is not None:
            study = str(self.folder / STUDY_FILE)
            return shlex.join(["feddar", "simulate", "--config", study, "--data", "TABLES", "--engine", "local"])
        return shlex.join(["feddar", "run", _data(self.config), "--config", str(self.folder / CONFIG_FILE)])

    def frame(self, name: str, rows: pd.DataFrame) -> pd.DataFrame:
        """Return rows as those of a comparison, of a method called ``name``."""
        return rows.assign(method=name, fold=0, seed=self.settings["seed"])


def _read_config(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the tables of a folder's configuration; [data] has all options of its source, and no others."""
    config = read_config(folder / CONFIG_FILE)
    if "data" in config:
        kind = source_named(_data(config)).options
        config["data"] = read_options(kind, config["data"]).model_dump(exclude_none=True)
    return config


def is_synthetic(data: str | None) -> bool:
    """Return whether the data is a built-in cohort made by a computer."""
    return data in BUILT_IN and BUILT_IN[data].about.startswith("synthetic")


def _data(config: dict[str, dict[str, Any]]) -> str:
    return str(config.get("data", {}).get("data", "DATA"))


def _again(run: RunFiles) -> str:
    """Return what trains a run again; one that Python was given the data of has no command for it."""
    if run.study is None and "data" not in run.config:
        return f"feddar.train(cohort, {run.settings['method']!r}, ...)  # options: its {CONFIG_FILE}"
    return run.command


def _shared(runs: Sequence[RunFiles]) -> dict[str, Any]:
    """Return the settings of all runs; where they differ, the values separated by commas."""
    together: dict[str, Any] = {}
    for name in Settings.model_fields:
        values = [run.settings.get(name) for run in runs]
        if any(value is not None for value in values):
            together[name] = values[0] if all(v == values[0] for v in values) else SEVERAL.join(map(str, values))
    return together
