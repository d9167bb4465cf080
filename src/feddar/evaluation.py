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
import torch
from numpy.typing import NDArray
from torch import Tensor

from feddar.cohort import Cohort, Task
from feddar.heads import probabilities
from feddar.later import pandas as pd

METRICS: dict[Task, tuple[str, ...]] = {
    "regression": ("mse", "r2"),
    "binary": ("auc", "accuracy", "log_loss", "brier"),
    "multiclass": ("accuracy", "auc", "log_loss", "brier"),
}
"""The metrics of each task; the first is the one shown where there is room for one."""

LOWER_IS_BETTER = {"mse", "log_loss", "brier", "loss"}

COLUMNS = ["scope", "name", "metric", "value", "count"]


def measure(task: Task, y: NDArray[Any], predicted: NDArray[np.floating]) -> dict[str, float]:
    """Return every metric of the task for labels y (class numbers) and predictions (numbers or probabilities)."""
    if task == "regression":
        error, spread = np.mean((y - predicted) ** 2), np.var(y)
        return {"mse": float(error), "r2": float(1 - error / spread) if spread > 0 else float("nan")}
    truth = np.eye(predicted.shape[1])[y]
    smallest = np.finfo(np.float64).eps
    given_to_truth = np.clip(predicted[truth == 1], smallest, 1 - smallest)
    squares = ((predicted - truth) ** 2).sum(1).mean()
    return {
        "auc": _mean_auc(truth, predicted),
        "accuracy": float(np.mean(predicted.argmax(1) == y)),
        "log_loss": float(-np.log(given_to_truth).mean()),
        "brier": float(squares / 2 if task == "binary" else squares),
    }


def evaluate(cohort: Cohort, scores: Tensor) -> pd.DataFrame:
    """Return the tidy frame scope, name, metric, value, count for scores [n, outputs] of a cohort's samples."""
    task = cohort.task
    predicted, y = probabilities(task, scores.double()).numpy(), cohort.y.numpy()
    rows = []
    for scope, name, held in [("all", "all", np.ones(len(y), bool)), *_parts(cohort)]:
        found = measure(task, y[held], predicted[held])
        rows += [(scope, name, metric, found[metric], int(held.sum())) for metric in METRICS[task]]
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


def _parts(cohort: Cohort) -> Iterator[tuple[str, str, NDArray[np.bool_]]]:
    for scope, names, holder in (
        ("domain", cohort.domains, cohort.domain),
        ("client", cohort.clients, cohort.client),
    ):
        for index, name in enumerate(names):
            held = (holder == torch.tensor(index)).numpy()
            if held.any():
                yield scope, name, held


def _mean_auc(truth: NDArray[np.floating], predicted: NDArray[np.floating]) -> float:
    """Area under the ROC curve; for several classes the mean of one-against-rest over the classes present."""
    present = np.flatnonzero(truth.any(0))
    if len(present) < 2:
        return float("nan")
    columns = [1] if truth.shape[1] == 2 else present
    return float(np.mean([_auc(truth[:, c] == 1, predicted[:, c]) for c in columns]))


def _auc(positive: NDArray[np.bool_], score: NDArray[np.floating]) -> float:
    """The chance that a positive scores above a negative (ties count half), from the scores' mean ranks."""
    _, place, count = np.unique(score, return_inverse=True, return_counts=True)
    rank = (np.cumsum(count) - (count - 1) / 2)[place]
    positives, negatives = positive.sum(), (~positive).sum()
    return float((rank[positive].sum() - positives * (positives + 1) / 2) / (positives * negatives))
