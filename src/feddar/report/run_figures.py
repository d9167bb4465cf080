"""What the page shows of the figures of runs: intervals, operating point, calibration and decision curves by domain.

They come from ``figures.csv``, ``calibration.csv`` and ``decisions.csv`` of run folders, which runs on one machine and
runs between sites alike have. There is a view for each run and each of its outcomes, and the page shows one at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isnan

import pandas as pd

from feddar.evaluation.figures import RATES, Figure, Figures
from feddar.evaluation.operating_point import nobody_or_everybody
from feddar.objectives.objective import metric_kind
from feddar.report import figures
from feddar.report.figures import AxisScale, Panel
from feddar.report.folders import Compared, Tested
from feddar.report.missing_domains import cost_table
from feddar.report.numbers import interval_kinds, metric_name
from feddar.report.operating_point import about_point, selection_rates
from feddar.report.page_tables import (
    MOST_PANELS,
    PageTable,
    TableCell,
    bracketed,
    largest,
    number,
    positives,
    samples,
)

MOST_VIEWS = 20
"""Of so many runs and outcomes, the first, a page has the figures: it is to stay small."""
CALIBRATION = ("calibration_slope", "calibration_intercept", "ece")
THRESHOLD, FLAGGED = "threshold", "selection_rate"
ALSO = {"sensitivity": "TPR", "specificity": "1 − FPR", FLAGGED: "selection rate"}
"""The names that rates have where their gaps between domains are."""
IN_UNITS = ("mse", "rmse", "mae")
"""Metrics that may be of any size; the others are of about 1, and have three decimals."""
EVERYBODY = "all samples"
TOLD = (0.05, 0.1, 0.2, 0.3, 0.5)
"""The thresholds whose net benefits are in words and tables."""
LINES = {"the model": "net_benefit", "flagging everybody": "flag_all", "flagging nobody": "nobody"}
"""The lines of a decision curve, and the columns that they are of."""

Found = Mapping[str, Figure]
PanelWithNumbers = tuple[Panel, PageTable]


@dataclass(frozen=True)
class FigureView:
    """The figures of one run and one outcome; parts that do not apply are None or empty."""

    title: str
    kinds: str
    """How intervals were computed, in words; empty if there is none."""
    from_counts: bool
    metrics: PageTable
    point: str
    operating: PageTable | None
    notice: str | None
    """Said if gaps between domains mean nothing."""
    gaps: PageTable | None
    gap_names: list[str]
    calibration: PageTable | None
    calibration_panels: list[Panel]
    decision_panels: list[Panel]
    missing: PageTable | None
    """What missing domains would cost, in the view of all outcomes."""
    tables: dict[str, PageTable]
    """The numbers of panels, by their keys."""


def figure_views(c: Compared) -> tuple[list[FigureView], int]:
    """Return a view for each run and outcome (the first of many), and how many there are.

    There are none if the runs have no figures, as those of earlier versions.
    """
    pairs = [(name, outcome) for name in c.methods if name in c.figures for outcome in _outcomes(c.figures[name])]
    runs, outcomes = (len(set(each)) for each in zip(*pairs, strict=True)) if pairs else (0, 0)
    found = []
    for place, (name, outcome) in enumerate(pairs[:MOST_VIEWS]):
        parts = [name] * (runs > 1) + [outcome or "all outcomes"] * (outcomes > 1)
        found.append(_view(c, name, outcome, ": ".join(parts) or name, f"figure-{place}"))
    return found, len(pairs)


def _outcomes(of: Figures) -> list[str]:
    """Return the outcomes that have figures: several, and then all together (""), or the only one ("")."""
    return [*(name for name in of.calibration["outcome"].unique() if name), ""]


def _view(c: Compared, run: str, outcome: str, title: str, key: str) -> FigureView:
    of = c.figures[run]
    end = f":{outcome}" if outcome else ""
    parts = {name: _of_outcome(found, end) for name, found in of.by_domain.items()} | {
        EVERYBODY: _of_outcome(of.overall, end)
    }
    everybody, gaps = parts[EVERYBODY], {} if outcome else of.gaps
    first = metric_kind(c.metric)
    metrics = sorted((name for name in everybody if name not in (*RATES, *CALIBRATION, THRESHOLD)), key=first.__ne__)
    decided, shown = "sensitivity" in everybody, _shown(parts)
    calibrated = _calibration_panels(_by_part(of.calibration, outcome), shown, key)
    decisions = _decision_panels(_by_part(of.decisions, outcome), shown, key)
    kinds = interval_kinds(each.interval for found in parts.values() for each in found.values())
    return FigureView(
        title=title,
        kinds=kinds,
        from_counts="counts" in kinds,
        metrics=_table(parts, metrics),
        point=about_point(c.points[run]) if decided else "",
        operating=_table(parts, (THRESHOLD, FLAGGED, *RATES[:-1])) if decided else None,
        notice=nobody_or_everybody(selection_rates(of, end)) if decided else None,
        gaps=_gap_table(gaps) if gaps else None,
        gap_names=list(gaps),
        calibration=_table(parts, CALIBRATION) if decided else None,
        calibration_panels=[panel for panel, _ in calibrated],
        decision_panels=[panel for panel, _ in decisions],
        missing=_missing_table(c.missing_domains[run], c.metric) if run in c.missing_domains and not outcome else None,
        tables={panel.key: table for panel, table in (*calibrated, *decisions)},
    )


def _of_outcome(found: Found, end: str) -> dict[str, Figure]:
    """Return the figures of one outcome by their kinds; without an end, those that are of no single outcome."""
    wanted = (name for name in found if name.endswith(end) and (":" in name) == bool(end))
    return {name.removesuffix(end): found[name] for name in wanted}


def _shown(parts: Mapping[str, Found]) -> dict[str, Tested]:
    """Return the samples of the parts that have a panel: the (at most 12) largest domains, and all samples."""
    held = {name: _tested(found) for name, found in parts.items()}
    return {name: held[name] for name in largest({name: of.n for name, of in held.items()}, MOST_PANELS + 1)}


def _tested(found: Found) -> Tested:
    """Return the numbers of samples and positives that figures are of."""
    counted = [each for each in found.values() if not isnan(each.positives)]
    return Tested(next(iter(found.values())).count, int(counted[0].positives) if counted else None)


def _cell(of: Figure, metric: str, factor: int = 1) -> TableCell:
    """Return a figure with its interval, both multiplied by a factor (100 for per cent)."""
    if metric == THRESHOLD and isnan(of.value):
        return TableCell("by domain")
    scale = of.value if metric in IN_UNITS else 1.0
    value, low, high = (
        f"{factor * each:.1f}" if factor > 1 and not isnan(each) else number(each, metric, scale)
        for each in (of.value, of.low, of.high)
    )
    return TableCell(value, bracketed(low, high) if of.interval else "", None if isnan(of.value) else of.value)


def _table(parts: Mapping[str, Found], metrics: Iterable[str]) -> PageTable:
    """Return the table of domains by metrics, with the samples and positives of each domain; shares flagged in %."""
    names = list(metrics)
    columns = [TableCell("flagged (%)" if name == FLAGGED else metric_name(name), ALSO.get(name, "")) for name in names]
    rows = [
        (part, [_samples(found), *(_cell(found[name], name, 100 if name == FLAGGED else 1) for name in names)])
        for part, found in parts.items()
    ]
    return PageTable("domain", [TableCell("samples"), *columns], rows)


def _samples(found: Found) -> TableCell:
    of = _tested(found)
    return TableCell(f"{of.n:,}", positives(of, ",\n"), of.n)


def _gap_table(gaps: Found) -> PageTable:
    rows = [
        (f"{metric_name(name)} (%)", [_cell(of, name, 100)])
        if name == FLAGGED
        else (metric_name(name), [_cell(of, name)])
        for name, of in gaps.items()
    ]
    return PageTable("gap in", [TableCell("largest difference between two domains")], rows)


def _missing_table(frame: pd.DataFrame, metric: str) -> PageTable:
    titles, rows = cost_table(frame, metric)
    cells = [
        (part, [TableCell(number(value, each), value=None if isnan(value) else value) for each, value in values])
        for part, values in rows.items()
    ]
    return PageTable("domain", [TableCell(title) for title in titles], cells)


def _by_part(frame: pd.DataFrame, outcome: str) -> dict[str, pd.DataFrame]:
    """Return the rows of one outcome for each domain and for all samples."""
    rows = frame[frame["outcome"] == outcome].groupby(["scope", "name"], sort=False)
    return {EVERYBODY if scope == "all" else str(name): part for (scope, name), part in rows}


def _calibration_panels(
    curves: Mapping[str, pd.DataFrame], shown: Mapping[str, Tested], key: str
) -> list[PanelWithNumbers]:
    """Return for each part that is shown its calibration curve, and the numbers of it."""
    panels = []
    for place, name in enumerate(name for name in shown if name in curves):
        rows = curves[name]
        shares = [tuple(map(float, row)) for row in rows[["predicted", "observed", "low", "high"]].to_numpy()]
        cells = [
            [TableCell(_share(predicted)), TableCell(_share(observed), _ends(low, high)), TableCell(f"{count:,}")]
            for (predicted, observed, low, high), count in zip(shares, rows["count"], strict=True)
        ]
        words = "; ".join(f"predicted {_share(each[0])}, observed {_share(each[1])}" for each in shares)
        panel = Panel(
            f"{key}-calibration-{place}", name, samples(shown[name]), f"{words}.", figures.calibration(shares)
        )
        columns = [TableCell(text) for text in ("predicted", "observed", "samples")]
        panels.append((panel, PageTable("tenth", columns, list(zip(map(str, rows["group"]), cells, strict=True)))))
    return panels


def _decision_panels(
    curves: Mapping[str, pd.DataFrame], shown: Mapping[str, Tested], key: str
) -> list[PanelWithNumbers]:
    """Return for each part that is shown its decision curve, and net benefits at some thresholds."""
    every = {name: curves[name].assign(nobody=0.0) for name in shown if name in curves}
    # Intervals of small domains may reach far above all lines, which are to be told apart.
    most = max((float(rows[["net_benefit", "flag_all"]].max().max()) for rows in every.values()), default=0.0) * 1.2
    scale = AxisScale(-0.15 * most, 1.04 * most) if most > 0 else AxisScale(-0.1, 0.1)
    panels = []
    for place, (name, rows) in enumerate(every.items()):
        told = rows[rows["threshold"].round(2).isin(TOLD)]
        columns = [TableCell(f"{100 * at:.0f} %") for at in told["threshold"]]
        cells = [(line, [TableCell(_share(value)) for value in told[column]]) for line, column in LINES.items()]
        words = f"Net benefit at {', '.join(cell.text for cell in columns)}: " + "; ".join(
            f"{line} {', '.join(cell.text for cell in of)}" for line, of in cells
        )
        figure = figures.decision_curve(rows, LINES, scale)
        panel = Panel(f"{key}-decision-{place}", name, samples(shown[name]), f"{words}.", figure)
        panels.append((panel, PageTable("threshold", columns, cells)))
    return panels


def _share(value: float) -> str:
    return number(value, "", scale=1.0)


def _ends(low: float, high: float) -> str:
    return "" if isnan(low) else bracketed(_share(low), _share(high))
