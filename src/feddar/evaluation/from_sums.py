"""Evaluation between sites that keep their predictions: each says sums over its test samples, by domain, which add.

Errors and right answers are plain sums. The area under the ROC curve needs an order of all samples; here scores are
put in bins, narrow where most log-odds were in the round before and wider away from there, and each site says how many
samples of either kind are in a bin. A pair that shares a bin counts half, so that the merged area differs from that of
pooled predictions by at most half the share of such pairs, and in practice by far less, since within a bin both orders
are about as frequent: by less than 0.002 from some 200 samples on. Of few samples a single pair may weigh more. In the
first round it is not known yet where scores lie, and bins are narrow around log-odds of 0.

A narrow bin with one patient in it would tell that patient's score and label. So a site puts neighbours together, and
no bin that it fills has fewer patients of a domain than it may speak of (``Together``). With 5 of them the merged area
stays within 0.002 from some 200 test samples of a domain at each site on, and is too small by 0.002 on average with 60.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from feddar.data.cohort import Task
from feddar.evaluation.metrics import COLUMNS, METRICS, summarise
from feddar.lazy import pandas as pd

BINS = 4096
"""Bins of a histogram, of equal width in d / (bend + |d|), where d is how far log-odds are from a centre."""
NARROWEST = 1e-3
"""The least bend: more would tell single scores, and no model says as much."""
FIRST = (0.0, 4.0)
"""Centre and bend of the first round: bins of 0.002 at log-odds of 0, 0.01 at 5, 0.2 at 36."""

Tally = dict[str, Tensor]
"""Sums by domain: float64 or whole numbers, [domain, ...]."""


@dataclass(frozen=True)
class Together:
    """Patients who are next to each other by score are not told apart, so that a bin has ``least`` of them or none."""

    patient: Tensor
    least: int = 1

    def __call__(self, place: Tensor) -> Tensor:
        """Return bins [n] with those of neighbours replaced by their middle."""
        order = torch.argsort(place, stable=True)
        # A team is as many patients who were not met before, in order of scores; the last one takes the rest.
        met = self._first_of_each(self.patient[order]).cumsum(0)
        team = ((met - 1) // self.least).clamp_max(max(int(met[-1]) // self.least, 1) - 1)
        total = torch.zeros(int(team[-1]) + 1, dtype=torch.float64).index_add(0, team, place[order].double())
        result = torch.empty_like(place)
        result[order] = (total / torch.bincount(team)).round().long()[team]
        return result

    @staticmethod
    def _first_of_each(patient: Tensor) -> Tensor:
        _, number = patient.unique(return_inverse=True)
        first = torch.full((int(number.max()) + 1,), len(patient))
        first.scatter_reduce_(0, number, torch.arange(len(patient)), "amin")
        return torch.zeros(len(patient), dtype=torch.long).index_fill(0, first, 1)


def tally(
    task: Task,
    y: Tensor,
    predicted: Tensor,
    domain: Tensor,
    domains: int,
    focus: Tensor | None = None,
    together: Together | None = None,
) -> Tally:
    """Sum up, by domain, how well labels y are predicted by numbers [n] or probabilities [n, classes].

    ``focus`` [C, 2] says where log-odds of each class are to be told apart best: centre and bend.
    """

    def by_domain(values: Tensor) -> Tensor:
        return torch.zeros(domains, values.shape[1], dtype=torch.float64).index_add(0, domain, values)

    one = torch.ones(len(y), dtype=torch.float64)
    if task == "regression":
        label = y.double()
        return {"numbers": by_domain(torch.stack([one, (label - predicted).square(), label, label.square()], 1))}
    truth = torch.nn.functional.one_hot(y, predicted.shape[1])
    given = predicted[torch.arange(len(y)), y].clamp(EPSILON, 1 - EPSILON)
    right, squares = (predicted.argmax(1) == y).double(), (predicted - truth).square().sum(1)
    shown = slice(1, 2) if task == "binary" else slice(None)  # of two classes, one says all
    return {
        "numbers": by_domain(torch.stack([one, right, -given.log(), squares], 1)),
        "histogram": histogram(truth[:, shown], predicted[:, shown], domain, domains, focus, together),
    }


EPSILON = float(np.finfo(np.float64).eps)


def histogram(
    truth: Tensor,
    predicted: Tensor,
    domain: Tensor,
    domains: int,
    focus: Tensor | None = None,
    together: Together | None = None,
) -> Tensor:
    """Count samples by domain, class, whether they are of it, and the bin of its probability: [M, C, 2, BINS]."""
    classes = predicted.shape[1]
    centre, bend = _focused(focus, classes)
    away = predicted.clamp(EPSILON, 1 - EPSILON).logit() - centre
    place = ((away / (bend + away.abs()) + 1) * (BINS / 2)).floor().long()
    if together is not None and together.least > 1:
        for m in domain.unique().tolist():
            rows = torch.nonzero(domain == m).flatten()
            team = Together(together.patient[rows], together.least)
            place[rows] = torch.stack([team(column) for column in place[rows].T], dim=1)
    cell = ((domain[:, None] * classes + torch.arange(classes)) * 2 + truth) * BINS + place
    return torch.bincount(cell.flatten(), minlength=domains * classes * 2 * BINS).view(domains, classes, 2, BINS).int()


def refocused(tallies: Mapping[str, Tally], focus: Tensor | None) -> Tensor | None:
    """Return the focus for the next round: mean and twice the spread of this round's log-odds, for each class."""
    counts = [each["histogram"].sum((0, 2)).double() for each in tallies.values() if "histogram" in each]
    if not counts or not bool((total := torch.stack(counts).sum(0)).sum()):
        return focus
    centre, bend = _focused(focus, len(total))
    middle = (torch.arange(BINS, dtype=torch.float64) + 0.5) * (2 / BINS) - 1
    odds = centre[:, None] + bend[:, None] * middle / (1 - middle.abs())
    share = total / total.sum(1, keepdim=True)
    mean = (share * odds).sum(1)
    spread = (share * (odds - mean[:, None]).square()).sum(1).sqrt()
    return torch.stack([mean, 2 * spread], dim=1)


def _focused(focus: Tensor | None, classes: int) -> tuple[Tensor, Tensor]:
    given = torch.tensor([FIRST] * classes, dtype=torch.float64) if focus is None else focus.double()
    return given[:, 0], given[:, 1].clamp_min(NARROWEST)


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
