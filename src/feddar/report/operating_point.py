"""The figures of a run at its operating point, by domain with their intervals, as a table on the terminal."""

from __future__ import annotations

from math import isnan

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from feddar.evaluation.figures import Figure, Figures
from feddar.evaluation.operating_point import OperatingPoint, nobody_or_everybody
from feddar.report.numbers import interval_kinds, metric_name

SHOWN = ("sensitivity", "specificity", "ppv", "npv", "calibration_slope")
WIDE = 140
"""A terminal of fewer columns has no room for intervals, thresholds and slopes."""
FEW_POSITIVES = 10
"""With fewer positives a domain's figures say little, and that is said beside them."""
FEW = f"fewer than {FEW_POSITIVES} positives"
FEW_SAMPLES = f"fewer than {FEW_POSITIVES} samples"
FEW_NOTE, FEW_SAMPLES_NOTE = f"* {FEW}: too few to judge by", f"* {FEW_SAMPLES}"


def show_operating_point(console: Console, figures: Figures | None) -> None:
    """Print rates of decisions and calibration slope of each domain; nothing if there is no single yes/no outcome."""
    if figures is None or "sensitivity" not in figures.overall:
        return
    overall = figures.overall
    parts = {**figures.by_domain, "all": overall}
    kind = interval_kinds(found[metric].interval for found in parts.values() for metric in SHOWN)
    whole = console.width >= WIDE
    intervals = f"with 95 % intervals ({kind})" if whole else "with intervals on a wider terminal and in figures.csv"
    console.print(f"\nAt the operating point, {intervals}", style="bold", highlight=False)
    rates = SHOWN if whole else SHOWN[:-1]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("domain")
    for title in ("positives", *(["threshold"] if whole else []), "flagged", *map(metric_name, rates)):
        table.add_column(title, justify="right")
    for name, found in parts.items():
        positives = f"{found['sensitivity'].positives:,.0f}{'*' if few_positives(found['sensitivity']) else ''}"
        threshold = found["threshold"].value
        at = f"{threshold:.3f}" if not isnan(threshold) else "by domain"
        flagged = f"{100 * found['selection_rate'].value:.1f} %"
        shown = (with_interval(found[metric], shown=whole) for metric in rates)
        table.add_row(escape(name), positives, *([at] if whole else []), flagged, *shown)
    console.print(table)
    if any(few_positives(found["sensitivity"]) for found in parts.values()):
        console.print(FEW_NOTE, highlight=False)
    said = nobody_or_everybody(selection_rates(figures))
    if said:
        console.print(said, highlight=False)


def selection_rates(figures: Figures, end: str = "") -> dict[str, float]:
    """Return the share of each domain that is flagged for an outcome, by the end of its metrics' names."""
    return {name: found[f"selection_rate{end}"].value for name, found in figures.by_domain.items()}


def about_point(point: OperatingPoint) -> str:
    """Return a sentence on who is flagged, and on how the threshold was found."""
    if not point.chosen:
        return f"A sample is flagged when its predicted risk is above {point.at:g}."
    aim = f"{100 * point.at:g} % of them are flagged"
    if point.kind == "sensitivity":
        aim = f"{100 * point.at:g} % of those with the outcome are flagged"
    each = ", for each domain on its own" if point.by_domain else ""
    return (
        "A sample is flagged when its predicted risk is above the threshold, which was chosen on validation samples so "
        f"that {aim}{each}."
    )


def few_positives(figure: Figure) -> bool:
    """Return whether a figure is of so few positives that this is said beside it."""
    return is_few(figure.positives)


def is_few(positives: float | None) -> bool:
    """Return whether a number of positives is too small; one that is not known (None or NaN) is not."""
    return positives is not None and bool(positives < FEW_POSITIVES)


def with_interval(figure: Figure, *, shown: bool = True) -> str:
    """Return a figure in two digits and, if it is to be shown, its interval, such as .82 (.75 to .88)."""
    if isnan(figure.value):
        return "–"
    value, low, high = (f"{each:.2f}".replace("0.", ".", 1) for each in (figure.value, figure.low, figure.high))
    return f"{value} ({low} to {high})" if figure.interval and shown else value
