"""The area under the ROC curve (AUC): the probability that a positive sample scores above a negative one."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def mean_auc(truth: NDArray[np.bool_], predicted: NDArray[np.floating]) -> NDArray[np.floating]:
    """Return the AUC of each part; for several classes the mean of one-vs-rest AUCs over classes that are present."""
    columns = [1] if truth.shape[-1] == 2 else range(truth.shape[-1])
    return mean_of_defined(np.stack([auc(truth[..., c], predicted[..., c]) for c in columns], axis=-1))


def mean_of_defined(values: NDArray[np.floating]) -> NDArray[np.floating]:
    """Return the mean over the last axis, ignoring NaN; NaN if all are."""
    defined = [each[~np.isnan(each)] for each in values]
    return np.array([each.mean() if len(each) else np.nan for each in defined])


def auc(positive: NDArray[np.bool_], score: NDArray[np.floating]) -> NDArray[np.floating]:
    """Return the AUC of each part [parts, n], from mean ranks of scores (ties count half); NaN if labels are equal."""
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


def auc_from_counts(counts: NDArray[Any]) -> float:
    """Return the AUC from histograms of scores of negatives and positives, [2, bins]; NaN if one is empty."""
    without, of_it = counts.astype(np.float64)
    below = without.cumsum() - without / 2
    pairs = without.sum() * of_it.sum()
    return float(of_it @ below / pairs) if pairs else float("nan")
