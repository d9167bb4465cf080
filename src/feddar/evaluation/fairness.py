"""How far domains are apart: gaps between groups by fairlearn's ``MetricFrame``, and what every small cell holds.

For two classes the gaps are those of AUC, true and false positive rate and selection rate, decisions being taken at
one half; for several classes those of accuracy and AUC, for numbers that of the mean squared error. A rate that a
domain does not have (a true positive rate without positives) is undefined there and left out of the gap; fairlearn's
own rates would call it 0 and so invent a gap. A gap needs two domains.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from torch import Tensor

from feddar.data.cohort import Cohort, Task
from feddar.errors import UserError
from feddar.evaluation.metrics import COLUMNS, METRICS, measure
from feddar.models.heads import probabilities

RATES = ("tpr", "fpr", "selection_rate")

GAPS: dict[Task, tuple[str, ...]] = {
    "regression": ("mse",),
    "binary": ("auc", *RATES),
    "multiclass": ("accuracy", "auc"),
}
"""The metrics whose largest difference between domains is reported."""

Rows = list[tuple[str, str, str, float, int]]


def load_metric_frame() -> Any:
    """Return fairlearn's MetricFrame, which is an optional extra."""
    try:
        from fairlearn.metrics import MetricFrame
    except ImportError:
        raise UserError("comparing needs fairlearn: pip install 'feddar[compare]'.") from None
    return MetricFrame


def observe(test: Cohort, scores: Tensor) -> pd.DataFrame:
    """Return scope, name, metric, value, count: rates and gaps, positives, and the main metric of every cell."""
    predicted, y = probabilities(test.task, scores.double()).numpy(), test.y.numpy()
    cells = _cells(test, y, predicted)
    return pd.DataFrame([*_positives(test, y), *cells, *_groups(test, y, predicted)], columns=COLUMNS)


def _groups(test: Cohort, y: NDArray[Any], predicted: NDArray[np.floating]) -> Rows:
    """Rates by domain, and the largest difference between domains."""
    domain = test.domain.numpy()
    metrics = {name: partial(_metric, name, test.task, predicted) for name in GAPS[test.task]}
    # Predictions are handed over as row numbers, since they may have a column for each class.
    columns = {"y_true": y, "y_pred": np.arange(len(y)), "sensitive_features": pd.Series(domain, name="domain")}
    frame = load_metric_frame()(metrics=metrics, **columns)
    by_domain, gaps = frame.by_group.astype(float), frame.difference(method="between_groups").astype(float)
    sizes = np.bincount(domain)
    rows: Rows = [
        ("domain", test.domains[m], name, float(by_domain.loc[m, name]), int(sizes[m]))
        for name in GAPS[test.task]
        if name in RATES
        for m in by_domain.index
    ]
    for name in GAPS[test.task]:
        defined = int(by_domain[name].notna().sum())
        rows.append(("summary", "domain_gap", name, float(gaps[name]) if defined > 1 else float("nan"), defined))
    return rows


def _metric(
    name: str, task: Task, predicted: NDArray[np.floating], y: NDArray[Any], rows: NDArray[np.integer]
) -> float:
    if name not in RATES:
        return measure(task, y, predicted[rows])[name]
    chosen = predicted[rows].argmax(1) == 1
    among = {"tpr": y == 1, "fpr": y == 0, "selection_rate": np.ones_like(y, bool)}[name]
    return float(chosen[among].mean()) if among.any() else float("nan")


def cell_name(client: str, domain: str) -> str:
    """Name one client's samples of one domain; a bar in a name is doubled, so that no two cells have one name.

    >>> cell_name("site 1", "White"), cell_name("a|b", "c")
    ('site 1 | White', 'a||b | c')
    """
    return " | ".join(name.replace("|", "||") for name in (client, domain))


def _cells(test: Cohort, y: NDArray[Any], predicted: NDArray[np.floating]) -> Rows:
    """The main metric of each client's samples of each domain, and how many of them are positive."""
    main = METRICS[test.task][0]
    cell = (test.client * len(test.domains) + test.domain).numpy()
    rows: Rows = []
    for number in np.unique(cell):
        held = cell == number
        client, domain = divmod(int(number), len(test.domains))
        name, count = cell_name(test.clients[client], test.domains[domain]), int(held.sum())
        rows.append(("cell", name, main, measure(test.task, y[held], predicted[held])[main], count))
        if test.task == "binary":
            rows.append(("cell", name, "positives", float(y[held].sum()), count))
    return rows


def _positives(test: Cohort, y: NDArray[Any]) -> Rows:
    """The number of positive samples of all, of each domain and of each client."""
    if test.task != "binary":
        return []
    rows: Rows = [("all", "all", "positives", float(y.sum()), len(y))]
    for scope, names, holder in (
        ("domain", test.domains, test.domain.numpy()),
        ("client", test.clients, test.client.numpy()),
    ):
        positives, sizes = (np.bincount(holder, weights, len(names)) for weights in (y, None))
        held = np.flatnonzero(sizes)
        rows += [(scope, names[i], "positives", float(positives[i]), int(sizes[i])) for i in held]
    return rows
