"""Fairness: gaps between domains by fairlearn's ``MetricFrame``, metrics of each (client, domain) cell, calibration.

For two classes the gaps are those of AUC, true and false positive rate and selection rate, with the decision
threshold 1/2; for several classes those of accuracy and AUC, for numbers that of the mean squared error. A rate that
is undefined in a domain (a true positive rate without positives) is left out of the gap; fairlearn's own rates would
be 0 there and so create a gap that does not exist. A gap needs two domains.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from torch import Tensor

from feddar.data.cohort import Cohort
from feddar.errors import UserError
from feddar.evaluation.calibration import calibration_errors
from feddar.evaluation.metrics import COLUMNS, Rows, are_many
from feddar.objectives import Objective

RATES = ("tpr", "fpr", "selection_rate")
"""Rates of decisions, for outcomes with a positive class; other gaps are of metrics of the objective."""


def load_metric_frame() -> Any:
    """Return fairlearn's MetricFrame; fairlearn is an optional dependency."""
    try:
        from fairlearn.metrics import MetricFrame
    except ImportError:
        raise UserError("comparing needs fairlearn: pip install 'feddar[compare]'.") from None
    return MetricFrame


def observe(test: Cohort, scores: Tensor) -> pd.DataFrame:
    """Return scope, name, metric, value, count: rates and gaps, positives, calibration, metrics of every cell.

    Of many clients there are neither cells nor positives.
    """
    predicted, y = test.objective.predictions(scores.double()).numpy(), test.y.numpy()
    cells = [] if are_many(test) else _cells(test, y, predicted)
    calibration = calibration_errors(test, scores)
    rows = [*_positives(test, y), *cells, *_groups(test, y, predicted), *calibration]
    return pd.DataFrame(rows, columns=COLUMNS)


def _groups(test: Cohort, y: NDArray[Any], predicted: NDArray[np.floating]) -> Rows:
    """Return rates by domain, and the largest difference between domains of each rate and metric."""
    domain, objective = test.domain.numpy(), test.objective
    metrics = {name: partial(_metric, name, objective, y, predicted) for name in objective.gaps}
    # MetricFrame gets row numbers in place of labels and predictions, since both may have several columns.
    rows_of = np.arange(len(y))
    columns = {"y_true": rows_of, "y_pred": rows_of, "sensitive_features": pd.Series(domain, name="domain")}
    frame = load_metric_frame()(metrics=metrics, **columns)
    by_domain, gaps = frame.by_group.astype(float), frame.difference(method="between_groups").astype(float)
    sizes = np.bincount(domain)
    rows: Rows = [
        ("domain", test.domains[m], name, float(by_domain.loc[m, name]), int(sizes[m]))
        for name in objective.gaps
        if name in RATES
        for m in by_domain.index
    ]
    for name in objective.gaps:
        defined = int(by_domain[name].notna().sum())
        rows.append(("summary", "domain_gap", name, float(gaps[name]) if defined > 1 else float("nan"), defined))
    return rows


def _metric(
    name: str,
    objective: Objective,
    y: NDArray[Any],
    predicted: NDArray[np.floating],
    rows: NDArray[np.integer],
    _: NDArray[np.integer],
) -> float:
    y, predicted = y[rows], predicted[rows]
    if name not in RATES:
        return objective.measure(y, predicted)[name]
    chosen = predicted.argmax(1) == 1
    among = {"tpr": y == 1, "fpr": y == 0, "selection_rate": np.ones_like(y, bool)}[name]
    return float(chosen[among].mean()) if among.any() else float("nan")


def cell_name(client: str, domain: str) -> str:
    """Return the name of a (client, domain) cell; a bar in a name is doubled, so that names are unique.

    >>> cell_name("site 1", "White"), cell_name("a|b", "c")
    ('site 1 | White', 'a||b | c')
    """
    return " | ".join(name.replace("|", "||") for name in (client, domain))


def _cells(test: Cohort, y: NDArray[Any], predicted: NDArray[np.floating]) -> Rows:
    """Return the metrics (not those of single outcomes) and the number of positives of each (client, domain) cell."""
    cell = (test.client * len(test.domains) + test.domain).numpy()
    rows: Rows = []
    for number in np.unique(cell):
        held = cell == number
        client, domain = divmod(int(number), len(test.domains))
        name, count = cell_name(test.clients[client], test.domains[domain]), int(held.sum())
        measured = test.objective.measure(y[held], predicted[held])
        rows += [("cell", name, metric, value, count) for metric, value in measured.items() if ":" not in metric]
        if test.objective.positive is not None:
            rows.append(("cell", name, "positives", float(y[held].sum()), count))
    return rows


def _positives(test: Cohort, y: NDArray[Any]) -> Rows:
    """Return the number of positive samples: in all, of each domain and of each client."""
    if test.objective.positive is None:
        return []
    rows: Rows = [("all", "all", "positives", float(y.sum()), len(y))]
    holders = [("domain", test.domains, test.domain.numpy())]
    holders += [] if are_many(test) else [("client", test.clients, test.client.numpy())]
    for scope, names, holder in holders:
        positives, sizes = (np.bincount(holder, weights, len(names)) for weights in (y, None))
        held = np.flatnonzero(sizes)
        rows += [(scope, names[i], "positives", float(positives[i]), int(sizes[i])) for i in held]
    return rows
