"""How well a model does, by domain and by client, with scikit-learn's metrics.

Every round is evaluated for every domain and client, often on a handful of samples, where scikit-learn spends a
hundred times longer on checking its arguments than on the arithmetic. So the formulas stand here, and the tests hold
each of them to scikit-learn's value.

A metric that is undefined (AUC where all labels are equal) is NaN with its count; averages leave it out and count how
many values they cover. Results are averages over the last rounds, never the best one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from feddar.data.cohort import Cohort, Task
from feddar.lazy import pandas as pd
from feddar.models.heads import probabilities

METRICS: dict[Task, tuple[str, ...]] = {
    "regression": ("mse", "r2"),
    "binary": ("auc", "accuracy", "log_loss", "brier"),
    "multiclass": ("accuracy", "auc", "log_loss", "brier"),
}
"""The metrics of each task; the first is the one shown where there is room for one."""

LOWER_IS_BETTER = {"mse", "log_loss", "brier", "loss"}

TOGETHER = 2**16
"""Samples of small parts that are measured at once: enough to be fast, little enough to stay in memory."""

COLUMNS = ["scope", "name", "metric", "value", "count"]


def measure(task: Task, y: NDArray[Any], predicted: NDArray[np.floating]) -> dict[str, float]:
    """Return every metric of the task for labels y (class numbers) and predictions (numbers or probabilities)."""
    return {name: float(values[0]) for name, values in measure_parts(task, y[None], predicted[None]).items()}


def measure_parts(task: Task, y: NDArray[Any], predicted: NDArray[np.floating]) -> dict[str, NDArray[np.floating]]:
    """Return every metric of each of several parts of equal size, y [parts, n], to the bit as ``measure`` does."""
    if task == "regression":
        error, spread = ((y - predicted) ** 2).mean(-1), y.var(-1)
        r2 = 1 - error / np.where(spread > 0, spread, np.nan)
        return {"mse": error, "r2": r2}
    truth = np.eye(predicted.shape[-1])[y]
    smallest = np.finfo(np.float64).eps
    given_to_truth = np.clip(np.take_along_axis(predicted, y[..., None], -1)[..., 0], smallest, 1 - smallest)
    squares = ((predicted - truth) ** 2).sum(-1).mean(-1)
    return {
        "auc": _mean_auc(truth == 1, predicted),
        "accuracy": (predicted.argmax(-1) == y).mean(-1),
        "log_loss": -np.log(given_to_truth).mean(-1),
        "brier": squares / 2 if task == "binary" else squares,
    }


def evaluate(cohort: Cohort, scores: Tensor) -> pd.DataFrame:
    """Return the tidy frame scope, name, metric, value, count for scores [n, outputs] of a cohort's samples."""
    task = cohort.task
    predicted, y = probabilities(task, scores.double()).numpy(), cohort.y.numpy()
    rows = []
    for scope, names, holder in (
        ("all", ("all",), np.zeros(len(y), np.int64)),
        ("domain", cohort.domains, cohort.domain.numpy()),
        ("client", cohort.clients, cohort.client.numpy()),
    ):
        found = {part: (values, size) for part, values, size in _by_part(task, y, predicted, holder)}
        for part in sorted(found):
            values, size = found[part]
            rows += [(scope, names[part], metric, values[metric], size) for metric in METRICS[task]]
    frame = pd.DataFrame(rows, columns=COLUMNS)
    return pd.concat([frame, summarise(frame)], ignore_index=True)


def summarise(frame: pd.DataFrame) -> pd.DataFrame:
    """Return domain_min, domain_avg, domain_max and client_avg of each metric; count says how many they cover."""
    rows = []
    for metric in dict.fromkeys(frame["metric"]):
        for scope, statistics in (("domain", ("min", "mean", "max")), ("client", ("mean",))):
            values = frame[(frame["scope"] == scope) & (frame["metric"] == metric)]["value"].dropna()
            for statistic in statistics:
                name = f"{scope}_{'avg' if statistic == 'mean' else statistic}"
                value = float(values.agg(statistic)) if len(values) else float("nan")
                rows.append(("summary", name, metric, value, len(values)))
    return pd.DataFrame(rows, columns=COLUMNS)


def last_rounds(history: pd.DataFrame, last: int) -> pd.DataFrame:
    """Average the test metrics of the last rounds; undefined values stay undefined."""
    test = history[history["split"] == "test"]
    recent = test[test["round"] > test["round"].max() - last]
    averaged = recent.groupby(["scope", "name", "metric"], sort=False, as_index=False)
    frame: pd.DataFrame = averaged.agg(value=("value", "mean"), count=("count", "first"))
    return frame[COLUMNS]


def worst(metric: str, values: pd.Series[float]) -> float:
    """Return the worst of the values, whichever way the metric points."""
    return float(values.max() if metric in LOWER_IS_BETTER else values.min())


def _by_part(
    task: Task, y: NDArray[Any], predicted: NDArray[np.floating], holder: NDArray[np.int64]
) -> Iterator[tuple[int, dict[str, float], int]]:
    """Give each part that holds samples with its metrics and size; parts of one size are measured together."""
    order, sizes = np.argsort(holder, kind="stable"), np.bincount(holder)
    starts = np.cumsum(sizes) - sizes
    for size in np.unique(sizes[sizes > 0]).tolist():
        parts = np.flatnonzero(sizes == size)
        together = max(1, TOGETHER // size)
        for some in (parts[i : i + together] for i in range(0, len(parts), together)):
            rows = order[starts[some][:, None] + np.arange(size)]
            found = measure_parts(task, y[rows], predicted[rows])
            for place, part in enumerate(some.tolist()):
                yield part, {metric: float(values[place]) for metric, values in found.items()}, size


def _mean_auc(truth: NDArray[np.bool_], predicted: NDArray[np.floating]) -> NDArray[np.floating]:
    """Area under the ROC curve of each part; for several classes the mean of one-against-rest over those present."""
    columns = [1] if truth.shape[-1] == 2 else range(truth.shape[-1])
    by_class = np.stack([_auc(truth[..., c], predicted[..., c]) for c in columns], axis=-1)
    defined = [values[~np.isnan(values)] for values in by_class]
    return np.array([values.mean() if len(values) else np.nan for values in defined])


def _auc(positive: NDArray[np.bool_], score: NDArray[np.floating]) -> NDArray[np.floating]:
    """The chance that a positive scores above a negative (ties count half), from the scores' mean ranks."""
    order = np.argsort(score, axis=-1)
    ordered, place = np.take_along_axis(score, order, -1), np.arange(score.shape[-1])
    differs = ordered[:, 1:] != ordered[:, :-1]
    edge = np.ones((len(score), 1), bool)
    first = np.maximum.accumulate(np.where(np.hstack([edge, differs]), place, 0), axis=-1)
    last = np.minimum.accumulate(np.where(np.hstack([differs, edge]), place, len(place))[:, ::-1], axis=-1)[:, ::-1]
    ranks = np.where(np.take_along_axis(positive, order, -1), (first + last) / 2 + 1, 0).sum(-1)
    positives = positive.sum(-1)
    pairs = positives * (score.shape[-1] - positives)
    areas: NDArray[np.floating] = (ranks - positives * (positives + 1) / 2) / np.where(pairs > 0, pairs, np.nan)
    return areas
