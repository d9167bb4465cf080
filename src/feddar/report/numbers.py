"""Names of metrics and formats of numbers, for the terminal, tables and pages."""

from __future__ import annotations

from math import isnan
from typing import NamedTuple

from feddar.objectives.objective import lower_is_better, metric_kind

UNDEFINED = "–"


class MetricNames(NamedTuple):
    """The names of a metric."""

    short: str
    title: str


METRICS = {
    "auc": MetricNames("AUC", "AUC"),
    "accuracy": MetricNames("accuracy", "Accuracy (%)"),
    "log_loss": MetricNames("log-loss", "Log-loss"),
    "brier": MetricNames("Brier score", "Brier score"),
    "mse": MetricNames("MSE", "Mean squared error"),
    "r2": MetricNames("R²", "R²"),
    "tpr": MetricNames("TPR", "True positive rate"),
    "fpr": MetricNames("FPR", "False positive rate"),
    "selection_rate": MetricNames("selection rate", "Selection rate"),
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


def number(value: float, scale: float | None = None, sign: bool = False) -> str:
    """Return a number with the digits that fit ``scale`` (by default its own size).

    >>> number(0.85149), number(-0.0123, scale=0.9, sign=True), number(2.5e-8), number(12345.6), number(float("nan"))
    ('0.851', '-0.012', '2.50e-08', '12,346', '–')
    """
    if isnan(value):
        return UNDEFINED
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
    if kind not in ("auc", "log_loss", "brier", "tpr", "fpr", "selection_rate"):
        return f"{value:{plus}.3g}"
    text = f"{value:{plus}.3f}"
    return text.replace("0.", ".", 1) if abs(value) < 0.9995 else text


def _names(metric: str) -> MetricNames:
    kind = metric_kind(metric)
    return METRICS.get(kind, MetricNames(kind, kind))


def _of_outcome(metric: str) -> str:
    _, _, outcome = metric.partition(":")
    return f" of {outcome}" if outcome else ""
