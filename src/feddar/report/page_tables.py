"""The tables of the page as plain data, which the template turns into HTML."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import isnan, sqrt

import numpy as np
import pandas as pd

from feddar.evaluation.fairness import cell_name
from feddar.objectives.objective import lower_is_better
from feddar.report import numbers
from feddar.report.folders import Compared, Difference, Mean, Tested
from feddar.report.markdown import reference_rows

MOST_CLIENTS = 40
MOST_ROUNDS = 8
UNDEFINED, NOT_HELD = "n/a", "–"


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


def number(value: float, scale: float | None = None, sign: bool = False) -> str:
    """Return a number for the page: with a real minus sign; undefined is n/a, since a dash means no samples."""
    return UNDEFINED if isnan(value) else numbers.number(value, scale, sign).replace("-", "−")


def sd_text(of: Mean) -> str:
    """Return the standard deviation as text; empty if there is none."""
    return "" if isnan(of.sd) else f"± {number(of.sd, of.mean)}"


def interval(of: Difference, scale: float) -> str:
    """Return the interval of a difference as text; empty if there is none."""
    return "" if isnan(of.low) else f"[{number(of.low, scale, sign=True)}, {number(of.high, scale, sign=True)}]"


def samples(of: Tested, between: str = ", ") -> str:
    """Return the number of samples and, if known, of positives as text."""
    return f"n {of.n:,}" if of.positives is None else f"n {of.n:,}{between}{of.positives:,} pos."


def score_table(c: Compared) -> PageTable:
    """Return the table of methods (rows) by mean domain, worst domain, mean client and each domain (columns)."""
    held = c.tested("domain")
    places = [("summary", name) for name in c.summaries] + [("domain", name) for name in held]
    columns = [TableCell(title) for title in c.summaries.values()]
    columns += [TableCell(name, samples(of, "\n")) for name, of in held.items()]
    cells = [_mean_cells(c, c.means[place], c.lower_is_better) for place in places]
    return PageTable("method", columns, _rows(c.methods, cells), c.lower_is_better, sorted_by=0)


def metric_table(c: Compared) -> PageTable:
    """Return the table of methods by the other metrics, also of single outcomes, with the mean over domains."""
    cells = [_mean_cells(c, means, lower_is_better(metric)) for metric, means in c.other_means.items()]
    names = [TableCell(numbers.metric_name(metric), numbers.better(metric)) for metric in c.other_means]
    return PageTable("method", names, _rows(c.methods, cells))


def gap_table(c: Compared, gaps: dict[str, dict[str, Mean]]) -> PageTable:
    """Return the table of methods by metrics, with the largest difference between domains."""
    cells = [_mean_cells(c, means, lower=True) for means in gaps.values()]
    return PageTable(
        "method", [TableCell(numbers.metric_name(metric)) for metric in gaps], _rows(c.methods, cells), ascending=True
    )


def difference_table(c: Compared) -> PageTable:
    """Return the table of methods by summaries, with the paired difference from the reference and its interval."""
    others = [method for method in c.methods if method != c.reference]
    cells = []
    for name in c.summaries:
        scale = c.means["summary", name][c.reference].mean
        found = [c.differences[name][method] for method in others]
        cells.append([_cell(of.difference, number(of.difference, scale, True), interval(of, scale)) for of in found])
    return PageTable(
        "method", [TableCell(title) for title in c.summaries.values()], _rows(others, cells), c.lower_is_better
    )


def reference_table(c: Compared) -> PageTable | None:
    """Return the table of models that see all rows in one place; None if there are none."""
    if c.references.empty:
        return None
    header, rows = reference_rows(c.references)
    cells = [(name, list(map(TableCell, texts))) for name, *texts in rows]
    titles = ["worst domain", "mean domain", "mean client", *header[4:]]
    return PageTable("reference", list(map(TableCell, titles)), cells)


def curve_table(curve: pd.DataFrame) -> PageTable:
    """Return the table of methods by rounds: the first, the last and some between."""
    places = np.linspace(0, len(curve) - 1, min(MOST_ROUNDS, len(curve))).round().astype(int)
    chosen = curve.iloc[places]
    cells = [[_cell(float(value), number(value)) for value in row] for row in chosen.to_numpy()]
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
    largest = sorted(everyone, key=lambda name: -everyone[name].n)[:MOST_CLIENTS]
    return ShownClients([name for name in everyone if name in largest], len(everyone), c.tested("cell"))


def count_table(c: Compared, who: ShownClients) -> PageTable:
    """Return the table of clients by domains, with the numbers of test samples and positives."""
    domains, clients = c.tested("domain"), c.tested("client")
    most = max(of.n for of in who.cells.values())

    def cell(of: Tested | None, shaded: bool = False) -> TableCell:
        if of is None:
            return TableCell(NOT_HELD)
        more = "" if of.positives is None else f"{of.positives:,} pos."
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
        return TableCell(number(found.mean), value=found.mean, shade=shade if scope == "cell" else None)

    domains = c.names("domain")
    rows = [
        (client, [*(cell("cell", cell_name(client, name)) for name in domains), cell("client", client)])
        for client in who.clients
    ]
    rows.append(("all clients", [*(cell("domain", name) for name in domains), cell("all", "all")]))
    return PageTable("client", [*map(TableCell, domains), TableCell("all domains")], rows)


def cell_limits(c: Compared) -> tuple[float, float]:
    """Return the lowest and highest metric of any method in any (client, domain) cell."""
    found = [of.mean for (scope, _), means in c.means.items() if scope == "cell" for of in means.values()]
    defined = [value for value in found if not isnan(value)]
    return (min(defined), max(defined)) if defined else (float("nan"), float("nan"))


def _cell(value: float, text: str, more: str = "", best: bool = False) -> TableCell:
    return TableCell(text, more, None if isnan(value) else value, best)


def _mean_cells(c: Compared, means: dict[str, Mean], lower: bool) -> list[TableCell]:
    """Return cells with each method's mean ± sd, the best marked, and the number of values if some are missing."""
    first = best(means, lower) if len(c.methods) > 1 else None
    cells = []
    for method in c.methods:
        of = means.get(method, Mean(float("nan"), float("nan"), 0))
        covers = f"{of.pairs} of {c.units}" if 0 < of.pairs < c.units else ""
        more = ", ".join(filter(None, (sd_text(of), covers)))
        cells.append(_cell(of.mean, number(of.mean), more, best=of.mean == first))
    return cells


def best(means: dict[str, Mean], lower: bool) -> float | None:
    """Return the best mean; None if none is defined."""
    defined = [of.mean for of in means.values() if not isnan(of.mean)]
    return (min if lower else max)(defined, default=None)


def _rows(names: Iterable[str], columns: list[list[TableCell]]) -> list[tuple[str, list[TableCell]]]:
    return [(name, [column[i] for column in columns]) for i, name in enumerate(names)]
