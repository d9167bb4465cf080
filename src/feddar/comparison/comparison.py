"""A comparison of methods: the same splits, initial weights and seeds for all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from feddar.comparison.cells import Parts, Trained
from feddar.data.cohort import Cohort
from feddar.data.sources import read_options
from feddar.errors import UserError
from feddar.models.devices import say_if_moved
from feddar.results.csv_files import write_csv
from feddar.results.run_folder import REFERENCES_FILE, replacing
from feddar.settings import CONFIG_FILE, DataSettings, Plan, Settings, read_config

MAY_CHANGE = (("compare", "reference"), ("compare", "references"), ("training", "metric"), ("training", "device"))
"""Settings by table that may differ when a comparison is resumed."""


@dataclass(frozen=True)
class ComparisonResults(Trained):
    """The results of several methods on the same samples; ``api.Comparison`` adds the table and the page."""

    plan: Plan
    settings: Settings
    """The settings that all methods have in common."""
    source: DataSettings | None
    references: pd.DataFrame
    """The results of models that see all rows in one place (``comparison.references``), as in ``results``."""

    @property
    def metric(self) -> str:
        """The metric that is shown first: the one that was asked for, or the main one of the outcome."""
        return self.settings.metric or str(self.results["metric"].iloc[0])

    def write(self, folder: Path) -> None:
        """Write the frames of ``Trained`` and, if there are references, references.csv."""
        super().write(folder)
        if not self.references.empty:
            with replacing(folder / REFERENCES_FILE) as temporary:
                write_csv(self.references, temporary)


def refuse_results(folder: Path) -> None:
    """Refuse to begin in a folder that has results."""
    if (folder / CONFIG_FILE).exists():
        raise UserError(f"{folder} already holds results: go on with them (--resume), or choose another folder.")


def require_same_comparison(
    folder: Path, tables: dict[str, dict[str, Any]], source: DataSettings | None, resume: bool
) -> None:
    """Refuse to resume a comparison with other data or settings; methods and seeds may be added."""
    path = folder / CONFIG_FILE
    if not resume:
        refuse_results(folder)
        return
    before = read_config(path) if path.exists() else {}
    if "data" in before and source is not None:
        before["data"] = read_options(type(source), before["data"]).model_dump(exclude_none=True)
    if "compare" not in before:
        raise UserError(f"there is no comparison in {folder}: leave out --resume to start one.")

    def refuse(name: str, was: object, now: object) -> None:
        raise UserError(
            f"the comparison in {folder} was started with {name}={was}, not {now}: resume it as it was, or choose "
            "another folder."
        )

    for title, now in tables.items():
        was = before.get(title, {})
        for name in {**was, **now}:
            if title == "compare" and name == "methods":
                if not set(was[name]) <= set(now[name]):
                    refuse(name, ",".join(was[name]), ",".join(now[name]))
            elif title == "compare" and name == "seeds":
                if was[name] > now[name]:
                    refuse(name, was[name], now[name])
            elif (title, name) not in MAY_CHANGE and was.get(name, _default(name)) != now.get(name):
                refuse(name, was.get(name), now.get(name))
    say_if_moved(before.get("training", {}).get("device", "cpu"), tables["training"]["device"])


def _default(name: str) -> Any:
    """Return the default of a setting that a comparison of an earlier version does not have."""
    return Settings.model_fields[name].default if name in Settings.model_fields else None


def configuration(plan: Plan, settings: Settings, source: DataSettings | None) -> dict[str, dict[str, Any]]:
    """Return the configuration as tables, without settings that differ between methods or do not change results.

    The metric that is shown first does not change them either, but tables and pages are made of it.
    """
    left_out = {"method"} | Settings.without_effect - {"metric"}
    return {
        **({} if source is None else {"data": source.model_dump(exclude_none=True)}),
        "training": settings.model_dump(exclude_none=True, exclude=left_out),
        "compare": plan.model_dump(exclude_none=True, mode="json"),
    }


def cohorts_by_seed(given: Cohort | Callable[[int], Cohort], seeds: Iterable[int]) -> dict[int, Cohort]:
    """Return the cohort of each seed; equal cohorts are one object."""
    distinct: dict[str, Cohort] = {}
    found = {}
    for seed in seeds:
        cohort = given if isinstance(given, Cohort) else given(seed)
        found[seed] = distinct.setdefault(cohort.fingerprint(), cohort)
    return found


def split_parts(cohort: Cohort, folds: int, fold: int, test: float, seed: int) -> Parts:
    """Return the training and test part of a fold; with ``folds`` 1 it is the one split."""
    return cohort.split(test, seed) if folds == 1 else cohort.fold(fold, folds, seed)
