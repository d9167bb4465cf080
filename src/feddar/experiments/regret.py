"""Regret: how much better the best of all methods is than ours, on each cohort; its table and picture.

Everything here is a function of `results.csv` (cohort, method, fold, seed, scope, name, metric, value, count) and of
the trainings that were planned. Differences are signed so that positive means that ours is worse, also where lower
values are better. They are paired over the folds and seeds that ours has; a method that lacks one of these is not
ranked. Pooled references see all rows in one place and are never ranked either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd
import torch

from feddar.comparison.references import cell_methods
from feddar.evaluation.intervals import UNIT, across, paired_differences
from feddar.methods import METHODS, RECOMMENDED
from feddar.objectives.objective import lower_is_better
from feddar.report import plots
from feddar.report.markdown import interval, looked_up, main_metric, markdown, mean_and_sd, worst_name
from feddar.report.numbers import UNDEFINED, metric_name, paper_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OURS, COMMON = RECOMMENDED, "fedavg"
LOSS = "log_loss"
CELL = ["cohort", "method", *UNIT]


class View(NamedTuple):
    """One way to look at results: a title, and which summary of domains and metric it is, given the main metric."""

    title: str
    figure: Callable[[str], tuple[str, str]]


VIEWS = (
    View("mean domain", lambda main: ("domain_avg", main)),
    View("worst domain", lambda main: (worst_name(main), main)),
    View("mean domain, log-loss", lambda _: ("domain_avg", LOSS)),
    View("worst domain, log-loss", lambda _: (worst_name(LOSS), LOSS)),
)
DRAWN = (VIEWS[0], VIEWS[2])


class Gap(NamedTuple):
    """By how much a method is better than ours, with its paired interval; both have a mean value."""

    method: str
    value: float
    difference: float
    low: float
    high: float
    pairs: int

    @property
    def clear(self) -> bool:
        """Whether the method is better by more than the interval, of however many pairs."""
        return self.low > 0


class Standing(NamedTuple):
    """All ranked methods of a cohort in one view, ours among them with differences of 0."""

    cohort: str
    metric: str
    gaps: dict[str, Gap]
    by_chance: float
    """The regret that each method would have on average if all were equally good (``regret_by_chance``)."""

    @property
    def best(self) -> Gap:
        """The best of all methods; ours, if none is better."""
        return max(self.gaps.values(), key=lambda gap: (gap.difference, gap.method == OURS))

    @property
    def next_best(self) -> Gap | None:
        """The best of the other methods."""
        others = [gap for gap in self.gaps.values() if gap.method != OURS]
        return max(others, key=lambda gap: gap.difference, default=None)

    def regret(self, method: str) -> float:
        """Return how far a method is from the best, 0 or more."""
        return self.best.difference - self.gaps[method].difference


def standing(results: pd.DataFrame, name: str, metric: str) -> Standing | None:
    """Return how all methods stand in a summary and metric of one cohort's results; None if ours is not there."""
    rows = results[(results["name"] == name) & (results["metric"] == metric) & results["method"].isin(list(METHODS))]
    units = rows[(rows["method"] == OURS) & rows["value"].notna()][UNIT]
    if units.empty:
        return None
    shared = rows.merge(units, on=UNIT)
    counts = shared.groupby("method")["value"].count()
    ranked = shared[shared["method"].isin(counts[counts == len(units)].index)]
    means = ranked.groupby("method")["value"].mean()
    gaps = {OURS: Gap(OURS, float(means[OURS]), 0.0, 0.0, 0.0, len(units))}
    found = paired_differences(ranked, OURS).set_index("method")[["difference", "low", "high", "pairs"]]
    for method, (mean, low, high, pairs) in zip(found.index, found.to_numpy().tolist(), strict=True):
        better, least, most = (-mean, -high, -low) if lower_is_better(metric) else (mean, low, high)
        gaps[method] = Gap(method, float(means[method]), better, least, most, int(pairs))
    values = ranked.pivot(index=UNIT, columns="method", values="value")
    return Standing(str(results["cohort"].iloc[0]), metric, gaps, regret_by_chance(values))


def regret_by_chance(values: pd.DataFrame) -> float:
    """Return how far the best of equally good methods would be above each of them on average, by the noise there is.

    ``values`` has a column for each of K methods and a row for each of R folds or draws. It is s c_K / sqrt(R), where s
    is the standard deviation of a value around the means of its method and of its row, for the median method, and c_K
    the mean of the largest of K standard normal numbers. NaN for one row or one method. A variance of few rows has a
    median below its mean, by the factor of Wilson and Hilferty.
    """
    rows, methods = values.shape
    if rows < 2 or methods < 2:
        return float("nan")
    noise = values.sub(values.mean(), axis=1)
    noise = noise.sub(noise.mean(axis=1), axis=0)
    variances = (noise**2).sum() / ((rows - 1) * (methods - 1) / methods)
    variance = variances.median() / (1 - 2 / (9 * (rows - 1))) ** 3
    return float((variance / rows) ** 0.5 * _mean_largest(methods))


def _mean_largest(count: int) -> float:
    """Return the mean of the largest of so many standard normal numbers: the integral of 1 - F over x > 0 less F."""
    x = torch.linspace(-9, 9, 9001, dtype=torch.float64)
    below = torch.special.ndtr(x) ** count
    return float(torch.trapezoid((x > 0).double() - below, x))


def standings(results: pd.DataFrame, view: View) -> list[Standing]:
    """Return the standing of every cohort that has ours, in the order of the results."""
    parts = (part for _, part in results.groupby("cohort", sort=False))
    found = (standing(part, *view.figure(main_metric(part))) for part in parts)
    return [each for each in found if each is not None]


ByView = Mapping[View, Mapping[str, Standing]]
"""The standing of every cohort that has ours, in each view."""


def table(results: pd.DataFrame, planned: pd.DataFrame, failures: Sequence[str] = ()) -> str:
    """Return the Markdown of `table.md`; ``planned`` has the labels of every training, finished or not."""
    found = {view: {each.cohort: each for each in standings(results, view)} for view in VIEWS}
    methods = results.loc[results["method"].isin(list(METHODS)), "method"].nunique()
    views = "\n\n".join(_view_section(view, [*each.values()]) for view, each in found.items())
    cohorts = "\n\n".join(
        _cohort_section(part, planned, [each.get(str(cohort)) for each in found.values()])
        for cohort, part in results.groupby("cohort", sort=False)
    )
    return f"""# Never worse? The best of all methods less `{OURS}`

{_verdicts(found)}

Regret is how much better the best of all methods is than ours: positive is worse for us, also in log-loss, and 0 \
means that ours is the best. In brackets is the 95 % interval of the paired difference (bootstrap over 5 folds or \
draws, Student's for fewer); bold where it leaves out zero and there are at least five. The best is chosen among up \
to {methods} methods by the same numbers it is shown with, which makes regret look larger than it is; folds share \
training samples, which makes intervals narrower than they should be. Accuracy is in per cent. Cohorts called \
synthetic are drawn, not observed.

{_overview(results["cohort"].unique().tolist(), found)}

{_chance_section(found)}

{missing_section(results, planned, failures)}

{views}

# Cohort by cohort

Mean ± standard deviation over folds or draws, each of the round that validation chose (tables) or the mean of the \
last rounds (exam, digits, faces); the best method in bold. A number in \
brackets says how many values there are, where some are missing or undefined. Pooled references see all rows in one \
place and are not ranked.

{cohorts}
"""


def _verdicts(found: ByView) -> str:
    """Return a bullet for each view, of what holds and what does not."""
    said = [f"- {verdict(view.title, [*each.values()])}" for view, each in found.items() if each]
    return "\n".join(said) or f"Nothing can be said yet: `{OURS}` is not trained on any cohort."


def verdict(title: str, found: Sequence[Standing]) -> str:
    """Return sentences on the largest regret, where ours is clearly worse than the best, and than FedAvg."""
    worst = max(found, key=lambda each: each.best.difference)
    first = sum(each.best.method == OURS for each in found)
    said = [f"**In the {title}**, ours is the best on {first} of {len(found)} cohorts."]
    if worst.best.method != OURS:
        said.append(f"Largest regret: {interval(worst.metric, worst.best)} on {worst.cohort}, to {worst.best.method}.")
        clear = [f"{each.cohort} ({each.best.method})" for each in found if each.best.clear]
        said.append(_worse("the best", clear))
    alone = sum(each.next_best is not None and isnan(each.next_best.low) for each in found)
    if alone:
        said.append(f"On {alone} there is no interval, for want of a second fold or draw.")
    common = [each.cohort for each in found if COMMON in each.gaps and each.gaps[COMMON].clear]
    return " ".join([*said, _worse("FedAvg", common)])


def _worse(than: str, where: Sequence[str]) -> str:
    listed = f"on {len(where)}: {'; '.join(where)}" if where else "on none"
    return f"Worse than {than} by more than the interval {listed}."


def _overview(cohorts: Sequence[str], found: ByView) -> str:
    """Return the regret of every cohort in every view, as one table."""
    rows = [
        [cohort, *(regret_text(each[cohort]) if cohort in each else UNDEFINED for each in found.values())]
        for cohort in cohorts
    ]
    return markdown(["Regret", *(view.title for view in VIEWS)], rows)


def _chance_section(found: ByView) -> str:
    """Return the regret that chance alone makes, of every cohort in every view."""
    cohorts = list(dict.fromkeys(cohort for each in found.values() for cohort in each))
    rows = [
        [
            cohort,
            *(
                paper_number(at.metric, at.by_chance) if (at := each.get(cohort)) else UNDEFINED
                for each in found.values()
            ),
        ]
        for cohort in cohorts
    ]
    return f"""## What chance alone makes

The best of many methods is ahead even if all are equally good. This is the regret that each of them would then have \
on average, by how much differences between methods vary from fold to fold or draw to draw (of the median method). A \
regret below it says nothing.

{markdown(["Regret by chance", *(view.title for view in VIEWS)], rows)}"""


def regret_text(found: Standing) -> str:
    """Return our regret with its interval; where ours is the best, what the next best lacks (below zero)."""
    if found.best.method != OURS:
        return interval(found.metric, found.best)
    if found.next_best is None:
        return "0"
    return f"0; next {interval(found.metric, found.next_best)}"


def _view_section(view: View, found: Sequence[Standing]) -> str:
    rows = [
        [
            each.cohort,
            metric_name(each.metric),
            each.best.method,
            paper_number(each.metric, each.best.value),
            paper_number(each.metric, each.gaps[OURS].value),
            regret_text(each),
            interval(each.metric, each.gaps[COMMON]) if COMMON in each.gaps else UNDEFINED,
        ]
        for each in found
    ]
    header = ["Cohort", "metric", "best method", "its value", "ours", "regret", "FedAvg better than ours by"]
    return f"## {view.title.capitalize()}\n\n{markdown(header, rows)}"


def _cohort_section(results: pd.DataFrame, planned: pd.DataFrame, ranked: Sequence[Standing | None]) -> str:
    """Return the table of one cohort, of which ``ranked`` is the standing in each view: methods, then references."""
    cohort, main = str(results["cohort"].iloc[0]), main_metric(results)
    figures = [view.figure(main) for view in VIEWS]
    titles = [
        f"{metric_name(metric)}, {view.title.split()[0]}" for view, (_, metric) in zip(VIEWS, figures, strict=True)
    ]
    if "brier" in set(results["metric"]):
        figures, titles = [*figures, ("domain_avg", "brier")], [*titles, f"{metric_name('brier')}, mean"]
        ranked = [*ranked, standing(results, *figures[-1])]
    means = looked_up(across(results[results["scope"] == "summary"]), "method", "name", "metric")
    best = [None if found is None else found.best.method for found in ranked]
    expected = len(planned.loc[planned["cohort"] == cohort, UNIT].drop_duplicates())

    def row(method: str) -> list[str]:
        texts = [mean_and_sd(metric, means.get((method, name, metric)), expected) for name, metric in figures]
        return [method, *(f"**{text}**" if method == first else text for text, first in zip(texts, best, strict=True))]

    found = [str(method) for method in results["method"].unique()]
    rows = [row(method) for method in METHODS if method in found]
    pooled = [row(name) for name in found if name not in METHODS]
    line = [["*pooled references:*", *[""] * len(titles)]] if pooled else []
    return f"## {cohort}\n\n{markdown(['Methods', *titles], [*rows, *line, *pooled])}"


def missing_section(results: pd.DataFrame, planned: pd.DataFrame, failures: Sequence[str] = ()) -> str:
    """Return what the table lacks: trainings that are planned and not finished, by cohort, and why some failed."""
    lines = [f"- {line}" for line in [*missing(results, planned), *(f"failed: {failure}" for failure in failures)]]
    return "\n".join(["## Missing", "", *lines]) if lines else "Nothing is missing: every planned training is in it."


def missing(results: pd.DataFrame, planned: pd.DataFrame) -> Iterator[str]:
    """Yield a line for each cohort with trainings that are not finished: their methods, folds and seeds."""
    named = results.assign(method=cell_methods(results["method"]))
    done = set(named[CELL].drop_duplicates().itertuples(index=False, name=None))
    for cohort, cells in planned.groupby("cohort", sort=False):
        absent = cells[[cell not in done for cell in cells[CELL].itertuples(index=False, name=None)]]
        if len(absent) == len(cells):
            yield f"{cohort}: all {len(cells)} cells, it is not begun."
        elif len(absent):
            varied = [name for name in UNIT if cells[name].nunique() > 1] or UNIT
            by_method = absent.groupby("method", sort=False)
            whole = cells["method"].value_counts()
            none = {str(method) for method, part in by_method if len(part) == whole[method]}
            some = [f"{method} ({_units(part[varied])})" for method, part in by_method if method not in none]
            listed = [*some, *(f"all of {method}" for method in absent["method"].unique() if method in none)]
            yield f"{cohort}: {len(absent)} of {len(cells)} cells: {', '.join(listed)}."


def _units(cells: pd.DataFrame) -> str:
    """Return the folds or seeds of cells as text: fold 0; fold 3."""
    return "; ".join(", ".join(f"{name} {value}" for name, value in row.items()) for row in cells.to_dict("records"))


def draw_figure(results: pd.DataFrame, path: Path) -> None:
    """Draw the regret of every method in the mean domain, a row for each cohort: the main metric, and log-loss."""
    by_view = [standings(results, view) for view in DRAWN]
    rows = max(1, *map(len, by_view))
    with plots.canvas(path, width=9.6, height=1.6 + 0.3 * rows, panels=len(DRAWN)) as (figure, panels):
        for axes, found, title in zip(
            panels, by_view, ("AUC or accuracy, mean domain", "Log-loss, mean domain"), strict=True
        ):
            for place, each in enumerate(found):
                _draw_row(axes, place, each)
            _draw_scale(axes, max([each.regret(method) for each in found for method in each.gaps], default=0))
            axes.set_yticks(
                range(len(found)), [each.cohort for each in found] if axes is panels[0] else [""] * len(found)
            )
            axes.set(
                title=title,
                ylim=(rows - 0.5, -0.5),
                xlabel="regret (logarithmic from 0.01 on)",
            )
        handles = [axes.plot([], [], label=label, **style)[0] for label, style in _MARKS.items()]
        figure.legend(handles=handles, loc="outside upper left", ncols=len(handles), frameon=False, fontsize=8.5)


_OTHERS: dict[str, Any] = {"marker": "o", "ls": "", "ms": 5, "mfc": "none", "mec": plots.MUTED, "alpha": 0.55}
_FEDAVG: dict[str, Any] = {"marker": "D", "ls": "", "ms": 5, "color": plots.COLOURS[COMMON]}
_FEDDAR: dict[str, Any] = {"marker": "o", "ls": "", "ms": 8, "color": plots.COLOURS[OURS]}
_MARKS = {f"{OURS} (ours)": _FEDDAR, "FedAvg": _FEDAVG, "every other method": _OTHERS}


def _draw_row(axes: Axes, place: int, found: Standing) -> None:
    """Draw a dot for each method, ours last and so above the others."""
    named = {COMMON: _FEDAVG, OURS: _FEDDAR}
    for method in sorted(found.gaps, key=lambda method: list(named).index(method) if method in named else -1):
        axes.plot(found.regret(method), place, clip_on=False, zorder=3, **named.get(method, _OTHERS))


TICKS = (0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)
LINEAR = 0.01
"""Up to here the scale is linear, and logarithmic beyond, since some methods are far behind."""


def _draw_scale(axes: Axes, largest: float) -> None:
    """Set a scale from 0 to the largest regret, with ticks that can be read."""
    axes.set_xscale("symlog", linthresh=LINEAR, linscale=1)
    shown = [tick for tick in TICKS if tick <= max(largest, LINEAR)]
    axes.set_xticks(shown, [f"{tick:g}" for tick in shown])
    axes.set_xticks([], minor=True)
    axes.set_xlim(0, max(1.15 * largest, LINEAR))
    axes.tick_params(axis="y", length=0, pad=8)
    axes.grid()
