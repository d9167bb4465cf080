"""The objective's metrics by domain and by client, equal to scikit-learn's.

Every round is evaluated for every domain and client, often on a handful of samples, where scikit-learn spends a
hundred times longer on checking its arguments than on the arithmetic. So objectives have their own formulas, and
tests check that they equal scikit-learn's values.

An undefined metric (AUC where all labels are equal) is NaN; averages leave it out, and their count is the number of
values they cover. Results are averages over the last rounds, never the best round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from feddar.data.cohort import Cohort
from feddar.lazy import pandas as pd
from feddar.objectives import Objective
from feddar.objectives.objective import lower_is_better

MEASURED_AT_ONCE = 2**16
"""The number of samples of small parts that are measured at once: enough to be fast, and few enough for memory."""

MANY_CLIENTS = 1000
"""With more clients than this, results have metrics of domains and means over clients, and none of each client."""

COLUMNS = ["scope", "name", "metric", "value", "count"]
Rows = list[tuple[str, str, str, float, int]]
"""Rows of these columns."""


def are_many(cohort: Cohort) -> bool:
    """Return whether a cohort has too many clients for metrics of each in every round."""
    return len(cohort.clients) > MANY_CLIENTS


def evaluate(cohort: Cohort, scores: Tensor, *, by_client: bool = True) -> pd.DataFrame:
    """Return the tidy frame scope, name, metric, value, count for scores [n, outputs] of a cohort's samples.

    Without ``by_client`` it has no rows of clients, but still the mean over them.
    """
    objective = cohort.objective
    predicted, y = objective.predictions(scores.double()).numpy(), cohort.y.numpy()
    parts = {
        "all": (("all",), np.zeros(len(y), np.int64)),
        "domain": (cohort.domains, cohort.domain.numpy()),
        "client": (cohort.clients, cohort.client.numpy()),
    }
    frames = [_measured(objective, y, predicted, scope, *part) for scope, part in parts.items()]
    summaries = summarise(pd.concat(frames, ignore_index=True))
    return pd.concat([*(frames if by_client else frames[:-1]), summaries], ignore_index=True)


def summarise(frame: pd.DataFrame) -> pd.DataFrame:
    """Return domain_min, domain_avg, domain_max and client_avg of each metric; count is the number of values used."""
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
    """Average the test metrics over the last ``last`` rounds; undefined values stay undefined."""
    test = history[history["split"] == "test"]
    recent = test[test["round"] > test["round"].max() - last]
    averaged = recent.groupby(["scope", "name", "metric"], sort=False, as_index=False)
    frame: pd.DataFrame = averaged.agg(value=("value", "mean"), count=("count", "first"))
    return frame[COLUMNS]


def worst(metric: str, values: pd.Series[float]) -> float:
    """Return the worst of the values: the largest if lower is better for the metric, else the smallest."""
    return float(values.max() if lower_is_better(metric) else values.min())


def _measured(
    objective: Objective,
    y: NDArray[Any],
    predicted: NDArray[np.floating],
    scope: str,
    names: Sequence[str],
    holder: NDArray[np.int64],
) -> pd.DataFrame:
    """Return the metrics of each domain or client with samples; those of equal size are measured at once."""
    order, sizes = np.argsort(holder, kind="stable"), np.bincount(holder)
    starts = np.cumsum(sizes) - sizes
    found = np.empty((len(sizes), len(objective.metrics)))
    for size in np.unique(sizes[sizes > 0]).tolist():
        parts = np.flatnonzero(sizes == size)
        together = max(1, MEASURED_AT_ONCE // size)
        for some in (parts[i : i + together] for i in range(0, len(parts), together)):
            rows = order[starts[some][:, None] + np.arange(size)]
            values = objective.measure_parts(y[rows], predicted[rows])
            found[some] = np.stack([values[metric] for metric in objective.metrics], axis=1)
    held, each = np.flatnonzero(sizes), len(objective.metrics)
    return pd.DataFrame({
        "scope": scope,
        "name": [names[part] for part in held.tolist() for _ in range(each)],
        "metric": [*objective.metrics] * len(held),
        "value": found[held].ravel(),
        "count": sizes[held].repeat(each),
    })  # fmt: skip
