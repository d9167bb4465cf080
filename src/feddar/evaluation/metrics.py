"""The objective's metrics by domain and by client, equal to scikit-learn's.

Every round is evaluated for every domain and client, often on a handful of samples, where scikit-learn spends a
hundred times longer on checking its arguments than on the arithmetic. So objectives have their own formulas, and
tests check that they equal scikit-learn's values.

An undefined metric (AUC where all labels are equal) is NaN; averages leave it out, and their count is the number of
values they cover. Results are averages over the last rounds, never the best round.
"""

from __future__ import annotations

from collections.abc import Iterator
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

COLUMNS = ["scope", "name", "metric", "value", "count"]


def evaluate(cohort: Cohort, scores: Tensor) -> pd.DataFrame:
    """Return the tidy frame scope, name, metric, value, count for scores [n, outputs] of a cohort's samples."""
    objective = cohort.objective
    predicted, y = objective.predictions(scores.double()).numpy(), cohort.y.numpy()
    rows = []
    for scope, names, holder in (
        ("all", ("all",), np.zeros(len(y), np.int64)),
        ("domain", cohort.domains, cohort.domain.numpy()),
        ("client", cohort.clients, cohort.client.numpy()),
    ):
        found = {part: (values, size) for part, values, size in _by_part(objective, y, predicted, holder)}
        for part in sorted(found):
            values, size = found[part]
            rows += [(scope, names[part], metric, values[metric], size) for metric in objective.metrics]
    frame = pd.DataFrame(rows, columns=COLUMNS)
    return pd.concat([frame, summarise(frame)], ignore_index=True)


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


def _by_part(
    objective: Objective, y: NDArray[Any], predicted: NDArray[np.floating], holder: NDArray[np.int64]
) -> Iterator[tuple[int, dict[str, float], int]]:
    """Yield each domain or client with samples, its metrics and its size; those of equal size are measured at once."""
    order, sizes = np.argsort(holder, kind="stable"), np.bincount(holder)
    starts = np.cumsum(sizes) - sizes
    for size in np.unique(sizes[sizes > 0]).tolist():
        parts = np.flatnonzero(sizes == size)
        together = max(1, MEASURED_AT_ONCE // size)
        for some in (parts[i : i + together] for i in range(0, len(parts), together)):
            rows = order[starts[some][:, None] + np.arange(size)]
            found = objective.measure_parts(y[rows], predicted[rows])
            for place, part in enumerate(some.tolist()):
                yield part, {metric: float(values[place]) for metric, values in found.items()}, size
