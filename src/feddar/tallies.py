"""Evaluation between sites that keep their predictions: each says sums over its test samples, by domain, which add.

Errors and right answers are plain sums. The area under the ROC curve needs an order of all samples; here scores are
put in bins, narrow where log-odds are small and wider towards 0 and 1, and each site says how many samples of either
kind are in a bin. A pair that shares a bin counts half, so that the merged area differs from that of pooled predictions
by at most half the share of such pairs, and in practice by far less, since within a bin both orders are about as
frequent: by less than 0.002 from some 200 samples on, unless their log-odds all lie within a tenth or two. Of few
samples a single pair weighs more than that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from feddar.cohort import Task
from feddar.evaluation import COLUMNS, METRICS, summarise

BINS, BEND = 4096, 4.0
"""Bins of a histogram, of equal width in l / (BEND + |l|) for log-odds l: 0.002 at l = 0, 0.01 at 5, 0.2 at 36."""

Tally = dict[str, Tensor]
"""Sums by domain: float64 or whole numbers, [domain, ...]."""


def tally(task: Task, y: Tensor, predicted: Tensor, domain: Tensor, domains: int) -> Tally:
    """Sum up, by domain, how well labels y are predicted by numbers [n] or probabilities [n, classes]."""

    def by_domain(values: Tensor) -> Tensor:
        return torch.zeros(domains, values.shape[1], dtype=torch.float64).index_add(0, domain, values)

    one = torch.ones(len(y), dtype=torch.float64)
    if task == "regression":
        label = y.double()
        return {"numbers": by_domain(torch.stack([one, (label - predicted).square(), label, label.square()], 1))}
    truth = torch.nn.functional.one_hot(y, predicted.shape[1])
    given = predicted[torch.arange(len(y)), y].clamp(EPSILON, 1 - EPSILON)
    right, squares = (predicted.argmax(1) == y).double(), (predicted - truth).square().sum(1)
    return {
        "numbers": by_domain(torch.stack([one, right, -given.log(), squares], 1)),
        "histogram": histogram(truth[:, _columns(task, truth)], predicted[:, _columns(task, truth)], domain, domains),
    }


EPSILON = float(np.finfo(np.float64).eps)


def _columns(task: Task, truth: Tensor) -> slice:
    """Of two classes, one says all."""
    return slice(1, 2) if task == "binary" else slice(0, truth.shape[1])


def histogram(truth: Tensor, predicted: Tensor, domain: Tensor, domains: int) -> Tensor:
    """Count samples by domain, class, whether they are of it, and the bin of its probability: [M, C, 2, BINS]."""
    classes = predicted.shape[1]
    odds = predicted.clamp(EPSILON, 1 - EPSILON).logit()
    place = ((odds / (BEND + odds.abs()) + 1) * (BINS / 2)).floor().long()
    cell = ((domain[:, None] * classes + torch.arange(classes)) * 2 + truth) * BINS + place
    return torch.bincount(cell.flatten(), minlength=domains * classes * 2 * BINS).view(domains, classes, 2, BINS).int()


def merged(task: Task, tallies: Mapping[str, Tally], domains: tuple[str, ...]) -> pd.DataFrame:
    """Return what ``evaluate`` would for pooled predictions, from the tallies of clients: scope, name, metric, ..."""
    if not tallies:
        return pd.DataFrame(columns=COLUMNS)
    by_client = {
        name: np.stack([each[name].numpy() for each in tallies.values()]) for name in next(iter(tallies.values()))
    }
    parts = {
        ("all", "all"): {name: values.sum((0, 1)) for name, values in by_client.items()},
        **{("domain", domain): {n: v[:, m].sum(0) for n, v in by_client.items()} for m, domain in enumerate(domains)},
        **{("client", client): {n: v[i].sum(0) for n, v in by_client.items()} for i, client in enumerate(tallies)},
    }
    rows = []
    for (scope, name), part in parts.items():
        count = int(part["numbers"][0])
        if count:
            found = metrics(task, **part)
            rows += [(scope, name, metric, found[metric], count) for metric in METRICS[task]]
    frame = pd.DataFrame(rows, columns=COLUMNS)
    return pd.concat([frame, summarise(frame)], ignore_index=True)


def metrics(task: Task, numbers: NDArray[Any], histogram: NDArray[Any] | None = None) -> dict[str, float]:
    """Return every metric of the task from sums."""
    count, first, second, third = numbers.tolist()
    if histogram is None:
        mean = second / count
        spread = third / count - mean**2
        varies = spread > 1e-12 * (1 + mean**2)
        return {"mse": first / count, "r2": 1 - first / count / spread if varies else float("nan")}
    return {
        "auc": _auc(histogram),
        "accuracy": first / count,
        "log_loss": second / count,
        "brier": third / count / (2 if task == "binary" else 1),
    }


def _auc(histogram: NDArray[Any]) -> float:
    """Mean over classes of the area under the ROC curve, where there are samples of the class and others."""
    areas = []
    for without, of_it in histogram.astype(np.float64):
        below = without.cumsum() - without / 2
        pairs = without.sum() * of_it.sum()
        if of_it.sum() == 0 and len(histogram) > 1:
            continue
        areas.append(float(of_it @ below / pairs) if pairs else float("nan"))
    return float(np.mean(areas)) if areas else float("nan")
