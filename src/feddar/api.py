"""``feddar.compare``: trains several methods on the same data, and writes the table and the page of their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Unpack

from torch import nn

from feddar.comparison import comparison as numbers
from feddar.comparison.cells import Cell, CellProgress, cell_settings, require_jobs, train_cells, unfinished
from feddar.comparison.references import fit_references, reference_cells, unfitted
from feddar.data.cohort import Cohort, require_cohort
from feddar.data.notebooks import as_html, by_name
from feddar.evaluation import fairness
from feddar.models.encoders import is_table, require_encoder
from feddar.models.encoders.own import allow_code
from feddar.options import CompareOptions, showing
from feddar.report.markdown import comparison_table
from feddar.report.page import write_page
from feddar.results.run_folder import replacing, writing
from feddar.results.tracking import log_comparison, require_tracker
from feddar.settings import CONFIG_FILE, DEFAULT_METHODS, DataSettings, Plan, Settings, checked, write_config

TABLE_FILE, PAGE_FILE = "table.md", "report.html"
FRAMES = ("results.csv", "curves.csv", "references.csv", "tuning.csv")
TRACKED_FILES = (CONFIG_FILE, TABLE_FILE, PAGE_FILE, *FRAMES)
"""The files of a comparison that a tracker gets, where they are there."""


@dataclass(frozen=True, repr=False)
class Comparison(numbers.ComparisonResults):
    """The results of several methods, trained and tested on the same samples; ``compare`` returns it."""

    def __repr__(self) -> str:
        return f"Comparison({len(self.plan.methods)} methods, {len(self.failures)} trainings failed, {self.metric})"

    def _repr_html_(self) -> str:
        """Return the metric that is shown first by domain and method, means over folds and seeds, for notebooks."""
        return as_html(self, by_name(self.results[self.results["metric"] == self.metric], "method"))

    def write(self, folder: Path) -> None:
        """Write the result frames, table.md and the page report.html into ``folder``."""
        super().write(folder)
        with replacing(folder / TABLE_FILE) as temporary:
            temporary.write_text(self.table(), encoding="utf-8")
        if len(self.results):
            write_page([folder], folder / PAGE_FILE)

    def table(self) -> str:
        """Return the comparison as Markdown, in the paper's layout; every number is one of ``results``."""
        return comparison_table(self)


@showing(Settings, without=("method",))
def compare(
    cohort: Cohort | Callable[[int], Cohort],
    methods: str | Sequence[str] = DEFAULT_METHODS,
    encoder: nn.Module | str | None = None,
    *,
    folds: int | None = 5,
    test: float = 0.2,
    seeds: int = 1,
    reference: str | None = None,
    references: bool = True,
    tune: bool = False,
    out: str | Path | None = None,
    resume: bool = False,
    jobs: int = 1,
    source: DataSettings | None = None,
    report: Callable[[CellProgress], None] | None = None,
    **options: Unpack[CompareOptions],
) -> Comparison:
    """Train every method on the same folds with the same seeds, and return their results.

    ``methods`` are names, ``paper`` for those that the paper compares, or ``all``. The splits of seed s are
    ``cohort.folds(folds, s)``, or for ``folds=None`` (or 1) the one split ``cohort.split(test, s)``; seeds are
    ``seed``, ``seed + 1`` and so on. A function in place of the cohort returns the cohort of each seed. With
    ``out``, everything is kept in that folder, and ``resume=True`` goes on with what was started there, possibly
    with more methods or seeds. ``references`` are models of scikit-learn that see all rows in one place. Other
    options are the fields of ``feddar.Settings``. A training that failed is listed in ``failures``; the others are
    not affected.
    """
    fairness.load_metric_frame()
    require_jobs(jobs)
    require_encoder(encoder)
    if not callable(cohort):
        require_cohort(cohort, "what is compared on")
    allow_code(encoder if isinstance(encoder, str) else None)
    split = {"folds": 1 if folds is None else folds, "seeds": seeds}
    plan = checked(Plan, {"methods": methods, "reference": reference, "references": references, "tune": tune, **split})
    shared: dict[str, Any] = {**options, "encoder": encoder, "method": plan.methods[0]}
    seeds_from = cell_settings(shared).seed
    cohorts = numbers.cohorts_by_seed(cohort, range(seeds_from, seeds_from + plan.seeds))
    settings = cell_settings(shared).resolved(is_table(cohorts[seeds_from].layout))
    if settings.metric is not None:
        headline = cohorts[seeds_from].objective.headline(settings.metric)
        settings = settings.model_copy(update={"metric": headline})
    shared |= {"validation": settings.validation}
    tables = numbers.configuration(plan, settings, source)
    folder = None if out is None else Path(out)
    require_tracker(settings, folder)
    if folder is not None:
        numbers.require_same_comparison(folder, tables, source, resume)
    every = {name: shared | {"method": name} | settings.unset_for(name) for name in plan.methods}
    data = {
        (fold, seed): partial(numbers.split_parts, cohorts[seed], plan.folds, fold, test, seed)
        for fold in range(plan.folds)
        for seed in cohorts
    }
    with nullcontext(folder) if folder is not None else TemporaryDirectory(prefix="feddar-") as place:
        cells = [
            Cell(
                {"method": name, "fold": fold, "seed": seed},
                every[name] | {"seed": seed},
                parts,
                Path(place) / "runs" / name / f"seed-{seed}-fold-{fold}",
            )
            for name in plan.methods
            for (fold, seed), parts in data.items()
        ]
        pending = unfinished(cells, resume=resume, tune=plan.tune)
        if folder is not None:
            with writing(folder):
                folder.mkdir(parents=True, exist_ok=True)
                with replacing(folder / CONFIG_FILE) as temporary:
                    write_config(temporary, **tables)
        pooled = reference_cells(data, Path(place) / "references") if plan.references else []
        steps = len(pending) + len(unfitted(pooled))

        def counted(step: CellProgress) -> None:
            if report is not None:
                report(replace(step, cells=steps))

        trained = train_cells(
            cells, pending, jobs=jobs, tune=plan.tune, observe=fairness.observe, source=source, report=counted
        )
        fitted = fit_references(pooled, jobs, counted)
    comparison = Comparison(**vars(trained), plan=plan, settings=settings, source=source, references=fitted)
    if folder is not None:
        with writing(folder):
            comparison.write(folder)
        log_comparison(settings, folder, TRACKED_FILES, {cell.folder: cell.labels for cell in cells})
    return comparison
