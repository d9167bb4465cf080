"""Names of metrics and formats of numbers, for the terminal, tables and pages."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from math import isnan
from typing import NamedTuple

from feddar.evaluation.figures import EXACT
from feddar.objectives.objective import lower_is_better, metric_kind

UNDEFINED = "–"
AREAS = ("auc", "auprc")
"""The metrics that are of one class; of several classes there is their mean."""


class MetricNames(NamedTuple):
    """The names of a metric."""

    short: str
    title: str


METRICS = {
    "auc": MetricNames("AUC", "AUC"),
    "auprc": MetricNames("AUPRC", "Area under the precision-recall curve"),
    "accuracy": MetricNames("accuracy (%)", "Accuracy (%)"),
    "log_loss": MetricNames("log-loss", "Log-loss"),
    "brier": MetricNames("Brier score", "Brier score"),
    "mse": MetricNames("MSE", "Mean squared error"),
    "rmse": MetricNames("RMSE", "Root of the mean squared error"),
    "mae": MetricNames("MAE", "Mean absolute error"),
    "r2": MetricNames("R²", "R²"),
    "tpr": MetricNames("TPR", "True positive rate"),
    "fpr": MetricNames("FPR", "False positive rate"),
    "selection_rate": MetricNames("selection rate", "Selection rate"),
    "sensitivity": MetricNames("sensitivity", "Sensitivity"),
    "specificity": MetricNames("specificity", "Specificity"),
    "ppv": MetricNames("PPV", "Positive predictive value"),
    "npv": MetricNames("NPV", "Negative predictive value"),
    "net_benefit": MetricNames("net benefit", "Net benefit"),
    "calibration_slope": MetricNames("slope", "Calibration slope"),
    "calibration_intercept": MetricNames("intercept", "Calibration intercept"),
    "ece": MetricNames("ECE", "Expected calibration error"),
    "threshold": MetricNames("threshold", "Threshold"),
}


def metric_name(metric: str) -> str:
    """Return the short name of a metric; that of one of several outcomes names the outcome.

    >>> metric_name("auc"), metric_name("log_loss:died")
    ('AUC', 'log-loss of died')
    """
    return _names(metric).short + _of_outcome(metric)


def metric_title(metric: str) -> str:
    """Return the name of a metric as the heading of a table has it."""
    return _names(metric).title + _of_outcome(metric)


def direction(metric: str) -> str:
    """Return a phrase that says which values of a metric are better."""
    return f"{better(metric)} is better"


def better(metric: str) -> str:
    """Return whether lower or higher values of a metric are better."""
    return "lower" if lower_is_better(metric) else "higher"


def percent(metric: str) -> int:
    """Return what values of a metric are multiplied by where they are shown: accuracy is in per cent everywhere."""
    return 100 if metric_kind(metric) == "accuracy" else 1


def number(value: float, scale: float | None = None, sign: bool = False, metric: str = "") -> str:
    """Return a number with the digits that fit ``scale`` (by default its own size), or as the metric is written.

    >>> number(0.85149), number(-0.0123, scale=0.9, sign=True), number(2.5e-8), number(12345.6), number(float("nan"))
    ('0.851', '-0.012', '2.50e-08', '12,346', '–')
    >>> number(0.85149, metric="accuracy"), number(0.85149, metric="auc")
    ('85.1', '0.851')
    """
    if isnan(value):
        return UNDEFINED
    if percent(metric) == 100:
        return format(100 * value, ("+" if sign else "") + ".1f")
    size = abs(value if scale is None else scale)
    form = ".3f" if size == 0 or 0.01 <= size < 1000 else ",.0f" if size >= 1000 else ".2e"
    return format(value, ("+" if sign else "") + form)


def paper_number(metric: str, value: float, sign: bool = False) -> str:
    """Return a value as in the paper: .761 for values of about 0 to 1, percent for accuracy.

    >>> paper_number("auc", 0.7612), paper_number("auc", -0.01, sign=True), paper_number("accuracy", 0.7612)
    ('.761', '-.010', '76.1')
    >>> paper_number("mse", 1234.5), paper_number("auc:died", 0.5)
    ('1.23e+03', '.500')
    """
    if isnan(value):
        return UNDEFINED
    plus, kind = "+" if sign else "", metric_kind(metric)
    if kind == "accuracy":
        return f"{100 * value:{plus}.1f}"
    if kind not in ("auc", "auprc", "log_loss", "brier", "ece", "tpr", "fpr", "selection_rate"):
        return f"{value:{plus}.3g}"
    text = f"{value:{plus}.3f}"
    return text.replace("0.", ".", 1) if abs(value) < 0.9995 else text


def counted(things: Sized | int, one: str, many: str | None = None) -> str:
    """Return how many things there are, in words; ``many`` is the plural, if it does not end in s.

    >>> counted(["a", "b"], "site"), counted(1, "category", "categories"), counted(1200, "category", "categories")
    ('2 sites', '1 category', '1,200 categories')
    """
    n = things if isinstance(things, int) else len(things)
    return f"{n:,} {one if n == 1 else many or f'{one}s'}"


def interval_kinds(kinds: Iterable[str]) -> str:
    """Return the kinds of the intervals of figures in words; empty ones, of figures without interval, are left out.

    >>> interval_kinds(["exact", "bootstrap by sample", "", "exact"])
    'bootstrap by sample; exact for shares of 0 or 100 %'
    """
    words = {EXACT: "exact for shares of 0 or 100 %"}
    return "; ".join(words.get(kind, kind) for kind in sorted({*kinds} - {""}))


def byte_size(count: float) -> str:
    """Return a number of bytes in the unit that fits.

    >>> byte_size(512), byte_size(20_500), byte_size(3.2e9)
    ('512 B', '20 kB', '3.2 GB')
    """
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def duration(seconds: float) -> str:
    """Return a time in its one or two largest units.

    >>> duration(0.4), duration(59), duration(192), duration(7300)
    ('0 s', '59 s', '3 min 12 s', '2 h 1 min')
    """
    minutes, rest = divmod(int(seconds), 60)
    if not minutes:
        return f"{rest} s"
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _names(metric: str) -> MetricNames:
    kind = metric_kind(metric)
    return METRICS.get(kind, MetricNames(kind, kind))


def _of_outcome(metric: str) -> str:
    _, _, outcome = metric.partition(":")
    return f" of {outcome}" if outcome else ""
