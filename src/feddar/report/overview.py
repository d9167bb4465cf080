"""The overview of a comparison on several cohorts: how each method does on each of them, in a table and on a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import pandas as pd

from feddar.evaluation.intervals import across
from feddar.objectives.objective import lower_is_better
from feddar.report.markdown import looked_up, markdown, mean_and_sd, worst_name
from feddar.report.numbers import UNDEFINED, better, metric_name
from feddar.report.page import rendered, require_packages, require_page_name, save_page
from feddar.report.page_tables import PageTable, TableCell
from feddar.results.csv_files import write_csv
from feddar.results.run_folder import replacing, writing

if TYPE_CHECKING:
    from feddar.comparison.comparison import ComparisonResults

ABOUT_RANKS = (
    "The rank is the method's place in the mean domain (1 is the best), averaged over the cohorts; cohorts on which "
    "some method has no value are left out of it."
)


@dataclass(frozen=True)
class Place:
    """A column of the overview: a cohort, and the metric and summary of domains that are shown of it."""

    cohort: str
    metric: str
    name: str

    @property
    def title(self) -> str:
        """The cohort and what is shown of it, such as: exam, worst AUC."""
        return f"{self.cohort}, {'mean' if self.name == 'domain_avg' else 'worst'} {metric_name(self.metric)}"


@dataclass(frozen=True)
class Overview:
    """Methods on several cohorts: the mean and the worst domain of each cohort's main metric, and the mean rank."""

    comparisons: Mapping[str, ComparisonResults]
    """The results by cohort, of the same methods."""

    @property
    def methods(self) -> list[str]:
        """The methods, in the order they were asked for."""
        return list(next(iter(self.comparisons.values())).plan.methods)

    @cached_property
    def results(self) -> pd.DataFrame:
        """The results of all cohorts, with the cohort as first column."""
        parts = [each.results.assign(cohort=name) for name, each in self.comparisons.items()]
        whole = pd.concat(parts, ignore_index=True)
        return whole[["cohort", *whole.columns.drop("cohort")]]

    @cached_property
    def places(self) -> list[Place]:
        """The columns: of each cohort with results the mean and the worst domain."""
        found = {name: each.metric for name, each in self.comparisons.items() if len(each.results)}
        return [
            Place(cohort, metric, name)
            for cohort, metric in found.items()
            for name in ("domain_avg", worst_name(metric))
        ]

    @cached_property
    def _means(self) -> Mapping[tuple[str, ...], Any]:
        summaries = self.results[self.results["scope"] == "summary"]
        parts = [across(part).assign(cohort=cohort) for cohort, part in summaries.groupby("cohort", sort=False)]
        return looked_up(pd.concat(parts), "cohort", "method", "name", "metric") if parts else {}

    def value(self, method: str, place: Place) -> float:
        """Return a method's mean over folds and seeds; NaN if it has none."""
        found = self._means.get((place.cohort, method, place.name, place.metric))
        return float("nan") if found is None else float(found.mean)

    def text(self, method: str, place: Place) -> str:
        """Return a method's mean and standard deviation over folds and seeds."""
        plan = self.comparisons[place.cohort].plan
        found = self._means.get((place.cohort, method, place.name, place.metric))
        return mean_and_sd(place.metric, found, plan.folds * plan.seeds)

    def values(self, place: Place) -> pd.Series[float]:
        """Return a column: the means of all methods, by method."""
        return pd.Series({method: self.value(method, place) for method in self.methods})

    @cached_property
    def best(self) -> dict[Place, float]:
        """The best value of each column; NaN if there is none."""
        columns = {place: self.values(place) for place in self.places}
        return {place: each.min() if lower_is_better(place.metric) else each.max() for place, each in columns.items()}

    @cached_property
    def ranks(self) -> dict[str, float]:
        """Each method's rank in the mean domain, averaged over cohorts on which all have a value; else empty."""
        columns = {place: self.values(place) for place in self.places if place.name == "domain_avg"}
        ranked = [
            each.rank(ascending=lower_is_better(place.metric))
            for place, each in columns.items()
            if bool(each.notna().all())
        ]
        return {method: mean(float(each[method]) for each in ranked) for method in self.methods} if ranked else {}

    def rank_text(self, method: str) -> str:
        """Return a method's mean rank."""
        return f"{self.ranks[method]:.1f}" if self.ranks else UNDEFINED

    def table(self) -> str:
        """Return the content of table.md: the overview, and where the table of each cohort is."""
        rows = [[method, *self._marked(method), self.rank_text(method)] for method in self.methods]
        header = ["Methods", *(f"{place.title} ({better(place.metric)})" for place in self.places), "Rank"]
        links = "\n".join(f"- [{name}]({name}/table.md)" for name in self.comparisons)
        return f"# Methods on several cohorts\n\n{self.about}\n\n{markdown(header, rows)}\n\n{links}\n"

    def _marked(self, method: str) -> Iterator[str]:
        for place in self.places:
            text = self.text(method, place)
            yield f"**{text}**" if self.value(method, place) == self.best[place] else text

    @property
    def about(self) -> str:
        """What the numbers are."""
        return f"Mean ± standard deviation over folds and seeds; the best of each column is marked. {ABOUT_RANKS}"

    def page_table(self) -> PageTable:
        """Return the overview for the page; lower ranks are better."""
        columns = [TableCell(place.title, f"{better(place.metric)} is better") for place in self.places]
        rows = [(method, self._page_cells(method)) for method in self.methods]
        return PageTable("method", [*columns, TableCell("rank", "lower is better")], rows)

    def _page_cells(self, method: str) -> list[TableCell]:
        cells = []
        for place in self.places:
            text, _, spread = self.text(method, place).partition(" ± ")
            best = self.value(method, place) == self.best[place]
            cells.append(TableCell(text, f"± {spread}" if spread else "", best=best))
        return [*cells, TableCell(self.rank_text(method))]


def write_overview(overview: Overview, folder: Path) -> None:
    """Write results.csv, table.md and report.html of all cohorts, which have a folder each below this one."""
    require_packages("jinja2")
    page = folder / "report.html"
    require_page_name(page)
    with writing(folder):
        with replacing(folder / "results.csv") as temporary:
            write_csv(overview.results, temporary)
        with replacing(folder / "table.md") as temporary:
            temporary.write_text(overview.table(), encoding="utf-8")
    save_page(rendered("overview.html.jinja", title="Methods on several cohorts", overview=overview), page)
