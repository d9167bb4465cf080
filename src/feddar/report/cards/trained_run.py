"""What a model card is made from: a run's folder, and the study beside it if it was trained between sites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isnan, nan
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from feddar.data.cohort import Cohort
from feddar.errors import UserError
from feddar.evaluation.figures import Figure, Figures
from feddar.evaluation.validation import SPLIT
from feddar.federation.coordinator import EXCHANGES_FILE
from feddar.methods import Method
from feddar.objectives import Objective
from feddar.objectives.objective import lower_is_better, metric_kind
from feddar.report.folders import RunFiles
from feddar.report.numbers import UNDEFINED, number
from feddar.report.operating_point import few_positives
from feddar.results.csv_files import without_guards
from feddar.results.figure_files import read_figures, read_missing_domains
from feddar.results.run_folder import described_cohort, refuse_comparison
from feddar.settings import Settings, checked

ALL = "all"
MOST_OUTCOMES = 8
IN_UNITS = ("mse", "rmse", "mae")
"""Metrics that may be of any size; the others are of about 0 to 1, and have three digits."""


class Part(NamedTuple):
    """The figures of a domain, or of all samples, by metric."""

    scope: str
    name: str
    figures: dict[str, Figure]

    @property
    def samples(self) -> int:
        """The number of test samples."""
        return tested_in(self.figures)


def tested_in(figures: Mapping[str, Figure]) -> int:
    """Return the number of test samples behind the figures of a part."""
    return next((figure.count for figure in figures.values()), 0)


@dataclass(frozen=True)
class TrainedRun:
    """A run's folder as the sections of a card ask for it."""

    files: RunFiles
    figures: Figures | None
    """None for runs of earlier versions, and for runs without test samples."""
    missing: pd.DataFrame | None = None
    """What missing domains would cost, where it is known."""

    @classmethod
    def read(cls, folder: Path) -> TrainedRun:
        """Read a run's folder."""
        refuse_comparison(folder)
        return cls(RunFiles.read(folder), read_figures(folder), read_missing_domains(folder))

    @property
    def study(self) -> dict[str, dict[str, Any]] | None:
        """The tables of the study; None for runs on one machine, and for a site's copy of a model."""
        return self.files.study

    # What was trained

    @cached_property
    def settings(self) -> Settings:
        """The settings of the training."""
        return checked(Settings, self.files.settings)

    @cached_property
    def method(self) -> Method:
        """The method's row in the round in use."""
        return Method(**self.files.about["method"])

    @property
    def uses_domain(self) -> bool:
        """Whether a prediction depends on the domain."""
        return self.method.needs_domain

    @cached_property
    def cohort(self) -> Cohort:
        """The names, counts and shapes of what was trained on, without data."""
        return described_cohort(self.files.about)

    @property
    def objective(self) -> Objective:
        """What is predicted."""
        return self.cohort.objective

    @property
    def outcome(self) -> str:
        """What is predicted, in words."""
        positive, column = self.objective.positive, self.role("target")
        what = self.objective.kind if positive is None else f"whether the outcome is “{positive}”"
        return what + (f" ({column})" if column else "")

    @property
    def between_sites(self) -> bool:
        """Whether tables stayed at their sites; only a site's copy of a model has no rounds recorded beside it."""
        return self.study is not None or self.files.history.empty

    @property
    def sites(self) -> list[str]:
        """The clients whose samples are known one by one; none where only sums over sites are."""
        clients = list(self.cohort.clients)
        return [] if self.between_sites and len(clients) == 1 else clients

    @property
    def sites_asked(self) -> list[str]:
        """The sites that a coordinator has exchanged messages with."""
        path = self.files.folder / EXCHANGES_FILE
        if not path.exists():
            return []
        try:
            sites = without_guards(pd.read_csv(path, dtype={"site": str}, keep_default_na=False))["site"]
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"cannot read {path}: {error}; restore the file, or remove it.") from None
        return sorted(set(map(str, sites)))

    def told(self, name: str) -> Any:
        """Return what the study, or the options that the data were read with, say under a name; None if nothing."""
        return (self.files.config.get("data", {}) | (self.study or {}).get("study", {})).get(name)

    def role(self, role: str) -> str | None:
        """Return the name of the column with a role (client, domain, target, group), if it is known."""
        return str(self.told(role)) if self.told(role) else None

    @property
    def trained(self) -> dict[str, int]:
        """The samples of each domain that were trained on."""
        return dict(zip(self.cohort.domains, self.cohort.counts.sum(0).tolist(), strict=True))

    @property
    def validated(self) -> dict[str, int]:
        """The samples of each domain that were held out to choose the round in use; empty without validation."""
        history = self.files.history
        rows = history[(history["split"] == SPLIT) & (history["scope"] == "domain")].drop_duplicates("name")
        return {str(name): int(n) for name, n in zip(rows["name"], rows["count"], strict=True)}

    # How it was tested

    @cached_property
    def results(self) -> pd.DataFrame:
        """The test metrics of the model in use, as metrics.csv has them."""
        history = self.files.history
        rows: pd.DataFrame = history[(history["split"] == "test") & (history["round"] == self.files.about["round"])]
        return rows

    @property
    def by_site(self) -> pd.DataFrame:
        """The main metric of each client, with its test samples."""
        return self.results[(self.results["scope"] == "client") & (self.results["metric"] == self.files.metric)]

    @cached_property
    def parts(self) -> list[Part]:
        """The figures with intervals of each domain, then of all; of folders without, the bare metrics.

        It is empty if nothing was tested.
        """
        if self.figures is not None:
            domains = (Part("domain", name, found) for name, found in self.figures.by_domain.items())
            return [*domains, Part(ALL, ALL, self.figures.overall)]
        parts: dict[tuple[str, str], dict[str, Figure]] = {}
        for row in self.results[self.results["scope"].isin(["domain", ALL])].to_dict("records"):
            bare = Figure(row["value"], nan, nan, int(row["count"]), nan, "")
            parts.setdefault((row["scope"], str(row["name"])), {})[str(row["metric"])] = bare
        return sorted((Part(*place, found) for place, found in parts.items()), key=lambda part: part.scope == ALL)

    @property
    def tested(self) -> dict[str, dict[str, Figure]]:
        """The figures of each domain that has test samples."""
        return {part.name: part.figures for part in self.parts if part.scope == "domain" and part.samples}

    @property
    def overall(self) -> dict[str, Figure]:
        """The figures of all samples."""
        return next((part.figures for part in self.parts if part.scope == ALL), {})

    @property
    def ranked(self) -> dict[str, Figure]:
        """The main metric of each domain where it is defined, from the worst to the best domain."""
        found = {name: figures[self.files.metric] for name, figures in self.tested.items()}
        sign = -1 if lower_is_better(self.files.metric) else 1
        defined = (name for name, figure in found.items() if not isnan(figure.value))
        return {name: found[name] for name in sorted(defined, key=lambda name: sign * found[name].value)}

    @property
    def outcomes(self) -> tuple[str, ...]:
        """The yes/no outcomes as the end of their metrics' names, of which figures of risks are known."""
        return self.objective.risk_outcomes[:MOST_OUTCOMES] if self.figures is not None else ()

    @property
    def rare(self) -> list[str]:
        """Texts on domains (and outcomes) whose test samples have few positives."""
        every = ((name, end, found[f"threshold{end}"]) for end in self.outcomes for name, found in self.tested.items())
        return [f"{name}{of(end)} ({each.positives:,.0f})" for name, end, each in every if few_positives(each)]

    @property
    def untested(self) -> str:
        """Why there are no figures at all, and how to get them."""
        if self.between_sites:
            return "A site's copy of a model has no figures: the coordinator's folder has them."
        return "This run was not evaluated on test samples: “feddar run”, or test=... in Python, does that."

    def figure_rows(self, metrics: Sequence[str]) -> list[tuple[str, ...]]:
        """Return rows of a table: each part's name, and its figures of these metrics."""
        return [(part.name, *(with_interval(part.figures.get(each), each) for each in metrics)) for part in self.parts]


def of(end: str) -> str:
    """Return the end of a title for one of several outcomes, from the end of its metrics' names.

    >>> of(":died"), of("")
    (' of died', '')
    """
    return f" of {end[1:]}" if end else ""


def with_interval(figure: Figure | None, metric: str = "", between: str = "") -> str:
    """Return a figure with its interval, such as 0.821 (0.750 to 0.882); ``between`` is put before the interval."""
    if figure is None or isnan(figure.value):
        return UNDEFINED
    size = figure.value if metric_kind(metric) in IN_UNITS else 1
    value, low, high = (number(each, size, metric=metric) for each in (figure.value, figure.low, figure.high))
    return f"{value} ({between}{low} to {high})" if figure.interval else value
