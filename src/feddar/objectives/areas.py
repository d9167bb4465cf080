"""Areas under two curves: under the ROC curve (AUC), and under the precision-recall curve (AUPRC).

The AUC is the probability that a positive sample scores above a negative one; ties count half. The AUPRC is the average
precision: the mean, over positive samples, of the share of positives among all that score at least as high.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Values = NDArray[np.floating]


def mean_areas(truth: NDArray[np.bool_], predicted: Values) -> tuple[Values, Values]:
    """Return AUC and AUPRC of each part; for several classes their one-vs-rest means over classes that are present."""
    columns = [1] if truth.shape[-1] == 2 else range(truth.shape[-1])
    found = [areas(truth[..., c], predicted[..., c]) for c in columns]
    roc, precision = (mean_of_defined(np.stack(each, axis=-1)) for each in zip(*found, strict=True))
    return roc, precision


def mean_of_defined(values: Values) -> Values:
    """Return the mean over the last axis, ignoring NaN; NaN if all are."""
    defined = ~np.isnan(values)
    count = defined.sum(-1)
    means: Values = np.where(defined, values, 0).sum(-1) / np.where(count > 0, count, np.nan)
    return means


def areas(positive: NDArray[np.bool_], score: Values) -> tuple[Values, Values]:
    """Return AUC and AUPRC of each part [parts, n]; AUC is NaN if labels are equal, AUPRC without positives."""
    n = score.shape[-1]
    order = np.argsort(score, axis=-1)
    ordered, place = np.take_along_axis(score, order, -1), np.arange(n)
    differs = ordered[:, 1:] != ordered[:, :-1]
    edge = np.ones((len(score), 1), bool)
    first = np.maximum.accumulate(np.where(np.hstack([edge, differs]), place, 0), axis=-1)
    last = np.minimum.accumulate(np.where(np.hstack([differs, edge]), place, n)[:, ::-1], axis=-1)[:, ::-1]
    found = np.take_along_axis(positive, order, -1)
    ranks = np.where(found, (first + last) / 2 + 1, 0).sum(-1)
    positives = positive.sum(-1)
    pairs = positives * (n - positives)
    roc: Values = (ranks - positives * (positives + 1) / 2) / np.where(pairs > 0, pairs, np.nan)
    above = found[:, ::-1].cumsum(-1)[:, ::-1]  # positives from a place on upwards
    precision = np.where(found, np.take_along_axis(above, first, -1) / (n - first), 0).sum(-1)
    return roc, precision / np.where(positives > 0, positives, np.nan)


def auc_from_counts(counts: NDArray[Any]) -> Values:
    """Return the AUC from histograms of scores of negatives and positives, [..., 2, bins]; NaN if one is empty."""
    without, of_it = _both(counts)
    below = without.cumsum(-1) - without / 2
    pairs = without.sum(-1) * of_it.sum(-1)
    roc: Values = (of_it * below).sum(-1) / np.where(pairs > 0, pairs, np.nan)
    return roc


def auprc_from_counts(counts: NDArray[Any]) -> Values:
    """Return the expected AUPRC if samples in a bin are in random order, from [..., 2, bins]; NaN without positives.

    Above a bin are N samples, T of them positive. Of its m samples a are positive, so the j-th from above is positive
    with probability a / m, and then T + 1 + (j - 1) c positives are among the first N + j, where c = (a - 1) / (m - 1).
    The sum of their ratios over j has a closed form, since the sum of 1 / (N + j) is a difference of digammas.
    """
    without, of_it = _both(counts)
    held = without + of_it
    above, found = (values[..., ::-1].cumsum(-1)[..., ::-1] - values for values in (held, of_it))
    slope = (of_it - 1) / np.maximum(held - 1, 1)
    digammas = (torch.digamma(torch.from_numpy(values)).numpy() for values in (above + held + 1, above + 1))
    harmonic = np.subtract(*digammas)
    ratios = slope * held + (found + 1 - slope - slope * above) * harmonic
    total = of_it.sum(-1)
    precision: Values = (of_it / np.maximum(held, 1) * ratios).sum(-1) / np.where(total > 0, total, np.nan)
    return precision


def _both(counts: NDArray[Any]) -> tuple[Values, Values]:
    """Return the counts of negatives and of positives, [..., bins]."""
    values = counts.astype(np.float64)
    return values[..., 0, :], values[..., 1, :]
