"""The tables of the page as plain data, which the template turns into HTML."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from math import isnan, sqrt
from typing import Any

import numpy as np
import pandas as pd

from feddar.evaluation.fairness import RATES, cell_name
from feddar.objectives.objective import lower_is_better
from feddar.report import numbers
from feddar.report.folders import Compared, Difference, Mean, Tested
from feddar.report.markdown import meaningless_gaps, reference_rows
from feddar.report.operating_point import FEW, FEW_SAMPLES, is_few

MOST_CLIENTS = 40
MOST_PANELS = 12
MOST_ROUNDS = 8
UNDEFINED, NOT_HELD = "n/a", "–"
NO_BREAK = "\N{NO-BREAK SPACE}"
GAP_WORDS = {
    "auc": "how often a positive is ranked above a negative; no threshold is involved",
    "tpr": "true positive rate: the share of positives that are found",
    "fpr": "false positive rate: the share of negatives that are flagged by mistake",
    "selection_rate": "the share of all samples that are flagged",
}
"""What it is that domains differ in."""


@dataclass(frozen=True)
class TableCell:
    """A cell of a table: its text, a smaller text beside it, and the number it is sorted by."""

    text: str
    more: str = ""
    value: float | None = None
    best: bool = False
    shade: float | None = None
    """The colour in a heat map, from 0 to 1; None for totals and undefined values."""


@dataclass(frozen=True)
class PageTable:
    """A table; ``ascending`` says whether ascending order has the best on top."""

    corner: str
    columns: list[TableCell]
    rows: list[tuple[str, list[TableCell]]]
    ascending: bool = False
    sorted_by: int | None = None


def number(value: float, metric: str, scale: float | None = None, sign: bool = False) -> str:
    """Return a value of a metric for the page: with a real minus sign; undefined is n/a, as a dash means no samples."""
    return UNDEFINED if isnan(value) else numbers.number(value, scale, sign, metric).replace("-", "−")


def amount(value: float, metric: str) -> str:
    """Return a value for a sentence, in per cent if the metric is."""
    return f"{number(value, metric)}{' %' if numbers.percent(metric) > 1 else ''}"


def metric_name_in_text(metric: str) -> str:
    """Return the name of a metric for a sentence, in which the value has the unit."""
    return numbers.metric_name(metric).replace(" (%)", "")


def sd_text(of: Mean, metric: str) -> str:
    """Return the standard deviation as text; empty if there is none."""
    return "" if isnan(of.sd) else f"±{NO_BREAK}{number(of.sd, metric, of.mean)}"


def interval(of: Difference, metric: str, scale: float) -> str:
    """Return the interval of a difference as text; empty if there is none."""
    low, high = (number(end, metric, scale, sign=True) for end in (of.low, of.high))
    return "" if isnan(of.low) else bracketed(low, high)


def bracketed(low: str, high: str) -> str:
    """Return an interval as text."""
    return f"[{low},{NO_BREAK}{high}]"


def samples(of: Tested, between: str = ", ") -> str:
    """Return the number of samples and, if known, of positives as text."""
    return between.join(filter(None, (f"n{NO_BREAK}{of.n:,}", positives(of, between))))


def positives(of: Tested, between: str = ", ") -> str:
    """Return the number of positives as text, if it is known, and that they (or all samples) are few if they are."""
    known = "" if of.positives is None else f"{of.positives:,}{NO_BREAK}pos."
    return between.join(filter(None, (known, few(of))))


def few(of: Tested) -> str:
    """Return a text if there are few positives or, where these are not known, few samples; else an empty one."""
    if of.positives is None:
        return FEW_SAMPLES if is_few(of.n) else ""
    return FEW if is_few(of.positives) else ""


def largest(counts: Mapping[str, int], most: int) -> list[str]:
    """Return the names with the largest numbers, at most so many, in the order that they came in."""
    chosen = sorted(counts, key=lambda name: -counts[name])[:most]
    return [name for name in counts if name in chosen]


def score_table(c: Compared) -> PageTable:
    """Return the table of methods (rows) by mean domain, worst domain, mean client and each domain (columns)."""
    held = c.tested("domain")
    places = [("summary", name) for name in c.summaries] + [("domain", name) for name in held]
    # The worst domain is another one each time: its mean may be below that of every domain.
    of_each = {c.worst: f"of each {c.worst_of},\nthen averaged" if c.worst_of and len(c.methods) > 1 else ""}
    columns = [TableCell(title, of_each.get(name, "")) for name, title in c.summaries.items()]
    columns += [TableCell(name, samples(of, "\n")) for name, of in held.items()]
    cells = [_mean_cells(c, c.means[place], c.metric, c.lower_is_better) for place in places]
    return PageTable("method", columns, _rows(c.methods, cells), c.lower_is_better, sorted_by=0)


def turned(table: PageTable, corner: str, more: str, value: str) -> PageTable:
    """Return a table of one method with its columns as rows, narrow enough for a telephone; the others are titles."""
    ((_, cells),) = table.rows
    rows = [
        (column.text, [TableCell("", column.more.replace("\n", ", ")), cell])
        for column, cell in zip(table.columns, cells, strict=True)
    ]
    return PageTable(corner, [TableCell(more), TableCell(value)], rows)


def metric_table(c: Compared, by_metric: Mapping[str, Mapping[str, Mean]]) -> PageTable:
    """Return the table of methods by metrics, with the mean over domains."""
    cells = [_mean_cells(c, means, metric, lower_is_better(metric)) for metric, means in by_metric.items()]
    names = [TableCell(numbers.metric_name(metric), numbers.better(metric)) for metric in by_metric]
    return PageTable("method", names, _rows(c.methods, cells))


def gap_table(c: Compared, gaps: dict[str, dict[str, Mean]]) -> PageTable:
    """Return the table of methods by metrics, with the largest difference between domains."""
    cells = [_mean_cells(c, means, metric, True, incomparable(c, metric)) for metric, means in gaps.items()]
    return PageTable(
        "method", [TableCell(numbers.metric_name(metric)) for metric in gaps], _rows(c.methods, cells), ascending=True
    )


def incomparable(c: Compared, gap: str) -> Container[str]:
    """Return the methods whose gap cannot be the best: in a rate, those that flag nobody or everybody of a domain."""
    return meaningless_gaps(c.results) if gap in RATES else ()


def difference_table(c: Compared) -> PageTable:
    """Return the table of methods by summaries, with the paired difference from the reference and its interval."""
    others = [method for method in c.methods if method != c.reference]
    cells = []
    for name in c.summaries:
        scale = c.means["summary", name][c.reference].mean
        found = [c.differences[name][method] for method in others]
        cells.append([_difference_cell(of, c.metric, scale) for of in found])
    return PageTable(
        "method", [TableCell(title) for title in c.summaries.values()], _rows(others, cells), c.lower_is_better
    )


def reference_table(c: Compared) -> PageTable | None:
    """Return the table of models that see all rows in one place; None if there are none."""
    if c.references.empty:
        return None
    header, rows = reference_rows(c.references, c.metric, _mean_text, numbers.metric_name)
    cells = [(name, list(map(TableCell, texts))) for name, *texts in rows]
    titles = ["worst domain", "mean domain", "mean client", *header[4:]]
    return PageTable("reference", list(map(TableCell, titles)), cells)


def _mean_text(metric: str, of: Any, units: int) -> str:
    """Return mean ± sd, and the number of values if some are missing, as text; ``of`` is a row of ``across``."""
    if of is None:
        return UNDEFINED
    mean = Mean(of.mean, of.sd, of.pairs)
    return " ".join(filter(None, (number(mean.mean, metric), _mean_more(mean, metric, units))))


def curve_table(curve: pd.DataFrame, metric: str) -> PageTable:
    """Return the table of methods by rounds: the first, the last and some between."""
    places = np.linspace(0, len(curve) - 1, min(MOST_ROUNDS, len(curve))).round().astype(int)
    chosen = curve.iloc[places]
    cells = [[_cell(float(value), number(value, metric)) for value in row] for row in chosen.to_numpy()]
    return PageTable("method", [TableCell(f"round {index}") for index in chosen.index], _rows(curve.columns, cells))


@dataclass(frozen=True)
class ShownClients:
    """The clients that are shown, the number of all clients, and the test samples by cell (``CLIENT | DOMAIN``)."""

    clients: list[str]
    of: int
    cells: dict[str, Tested]


def shown_clients(c: Compared) -> ShownClients | None:
    """Return the clients with the most test samples, in the order of the file; None if there are no cells."""
    if not c.names("cell"):
        return None
    everyone = c.tested("client")
    shown = largest({name: of.n for name, of in everyone.items()}, MOST_CLIENTS)
    return ShownClients(shown, len(everyone), c.tested("cell"))


def count_table(c: Compared, who: ShownClients) -> PageTable:
    """Return the table of clients by domains, with the numbers of test samples and positives."""
    domains, clients = c.tested("domain"), c.tested("client")
    most = max(of.n for of in who.cells.values())

    def cell(of: Tested | None, shaded: bool = False) -> TableCell:
        if of is None:
            return TableCell(NOT_HELD)
        more = "" if of.positives is None else f"{of.positives:,}{NO_BREAK}pos."
        return TableCell(f"{of.n:,}", more, of.n, shade=sqrt(of.n / most) if shaded else None)

    rows = [
        (
            client,
            [*(cell(who.cells.get(cell_name(client, name)), shaded=True) for name in domains), cell(clients[client])],
        )
        for client in who.clients
    ]
    rows.append(("all clients", [*map(cell, domains.values()), cell(everything(c))]))
    return PageTable("client", [*map(TableCell, domains), TableCell("all domains")], rows)


def everything(c: Compared) -> Tested:
    """Return the numbers of all test samples and positives."""
    parts = c.tested("domain").values()
    known = [of.positives for of in parts if of.positives is not None]
    return Tested(sum(of.n for of in parts), sum(known) if known else None)


def cell_table(c: Compared, who: ShownClients, method: str) -> PageTable:
    """Return the table of clients by domains with the method's metric, shaded on one scale for all methods."""
    low, high = cell_limits(c)

    def cell(scope: str, name: str) -> TableCell:
        found = c.means.get((scope, name), {}).get(method)
        if found is None or isnan(found.mean):
            return TableCell(NOT_HELD if found is None else UNDEFINED)
        share = min(max((found.mean - low) / (high - low), 0.0), 1.0) if high > low else 1.0
        shade = 1 - share if c.lower_is_better else share
        return TableCell(number(found.mean, c.metric), value=found.mean, shade=shade if scope == "cell" else None)

    domains = c.names("domain")
    rows = [
        (client, [*(cell("cell", cell_name(client, name)) for name in domains), cell("client", client)])
        for client in who.clients
    ]
    rows.append(("all clients", [*(cell("domain", name) for name in domains), cell("all", "all")]))
    held = c.tested("domain")
    columns = [TableCell(name, few(held[name])) for name in domains]
    return PageTable("client", [*columns, TableCell("all domains")], rows)


def cell_limits(c: Compared) -> tuple[float, float]:
    """Return the lowest and highest metric of any method in any (client, domain) cell."""
    found = [of.mean for (scope, _), means in c.means.items() if scope == "cell" for of in means.values()]
    defined = [value for value in found if not isnan(value)]
    return (min(defined), max(defined)) if defined else (float("nan"), float("nan"))


def _cell(value: float, text: str, more: str = "", best: bool = False) -> TableCell:
    return TableCell(text, more, None if isnan(value) else value, best)


def _difference_cell(of: Difference, metric: str, scale: float) -> TableCell:
    return _cell(of.difference, number(of.difference, metric, scale, True), interval(of, metric, scale))


def _mean_cells(
    c: Compared, means: Mapping[str, Mean], metric: str, lower: bool, without: Container[str] = ()
) -> list[TableCell]:
    """Return cells with each method's mean ± sd, the best of those not ``without`` marked, and how many values."""
    first = best(means, lower, without) if len(c.methods) > 1 else None
    cells = []
    for method in c.methods:
        of = means.get(method, Mean(float("nan"), float("nan"), 0))
        is_best = of.mean == first and method not in without
        cells.append(_cell(of.mean, number(of.mean, metric), _mean_more(of, metric, c.units), best=is_best))
    return cells


def _mean_more(of: Mean, metric: str, units: int) -> str:
    """Return the standard deviation and, if some are missing, the number of values of a mean as text."""
    covers = f"{of.pairs} of {units}" if 0 < of.pairs < units else ""
    return ", ".join(filter(None, (sd_text(of, metric), covers)))


def best(means: Mapping[str, Mean], lower: bool, without: Container[str] = ()) -> float | None:
    """Return the best mean of methods other than some; None if none is defined."""
    defined = [of.mean for method, of in means.items() if not isnan(of.mean) and method not in without]
    return (min if lower else max)(defined, default=None)


def _rows(names: Iterable[str], columns: list[list[TableCell]]) -> list[tuple[str, list[TableCell]]]:
    return [(name, [column[i] for column in columns]) for i, name in enumerate(names)]
