"""Histograms of scores, which sites may send: from their sum follows the area under the ROC curve (AUC).

AUC needs the order of all samples. Here scores are put in bins, which are narrow where most log-odds were in the round
before and wider elsewhere, and each site sends how many positive and negative samples are in each bin. A pair of
samples in one bin counts half, so the AUC from sums differs from that of pooled predictions by at most half the share
of such pairs. In practice it is far less, since within a bin both orders are about as frequent: less than 0.002 from
about 200 samples on. With few samples a single pair may matter more. In the first round the range of scores is not
known, and bins are narrow around log-odds of 0.

A narrow bin with one patient in it would reveal that patient's score and label. So a site joins neighbouring bins until
each has at least the minimum number of patients of the domain (``CoarseBins``). With a minimum of 5, AUC stays within
0.002 from about 200 test samples of a domain at each site on; with 60 samples it is too small by 0.002 on average,
with 30 by 0.006, with 15 by 0.03 and with 8 by 0.2.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

BINS = 4096
"""The number of bins, of equal width in d / (width + |d|), where d is the log-odds minus the centre."""
NARROWEST = 1e-3
"""The least width: narrower bins would reveal single scores, and no model is as precise."""
FIRST = (0.0, 4.0)
"""Centre and width of the first round: bins of 0.002 at log-odds of 0, 0.01 at 5, 0.2 at 36."""
EPSILON = float(np.finfo(np.float64).eps)


@dataclass(frozen=True)
class CoarseBins:
    """Joins bins of neighbouring scores, so that each bin has at least ``least`` patients or none."""

    patient: Tensor
    """The patient of each sample."""
    least: int = 1

    def __call__(self, place: Tensor) -> Tensor:
        """Return the bins [n] of samples, with the bins of a group of neighbours replaced by their mean."""
        order = torch.argsort(place, stable=True)
        # A group (`team`) is the next ``least`` new patients in the order of scores; the last group takes the rest.
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


def bins_of(predicted: Tensor, score_range: Tensor | None) -> Tensor:
    """Return the bin of each probability [n, C]; ``score_range`` says where bins are narrow."""
    centre, width = _centre_and_width(score_range, predicted.shape[1])
    away = predicted.clamp(EPSILON, 1 - EPSILON).logit() - centre
    return ((away / (width + away.abs()) + 1) * (BINS / 2)).floor().long()


def next_score_range(total: Tensor, score_range: Tensor | None) -> Tensor | None:
    """Return where bins should be narrow next: mean and twice the standard deviation of log-odds by class, [C, 2].

    ``total`` [C, BINS] counts the samples in the bins of ``score_range``; without samples it is returned unchanged.
    """
    if not bool(total.sum()):
        return score_range
    odds = middles_of_bins(score_range, len(total))
    share = total / total.sum(1, keepdim=True)
    mean = (share * odds).sum(1)
    spread = (share * (odds - mean[:, None]).square()).sum(1).sqrt()
    return torch.stack([mean, 2 * spread], dim=1)


def middles_of_bins(score_range: Tensor | None, classes: int) -> Tensor:
    """Return the log-odds in the middle of each bin, [C, BINS]."""
    centre, width = _centre_and_width(score_range, classes)
    middle = (torch.arange(BINS, dtype=torch.float64) + 0.5) * (2 / BINS) - 1
    return centre[:, None] + width[:, None] * middle / (1 - middle.abs())


def _centre_and_width(score_range: Tensor | None, classes: int) -> tuple[Tensor, Tensor]:
    given = torch.tensor([FIRST] * classes, dtype=torch.float64) if score_range is None else score_range.double()
    return given[:, 0], given[:, 1].clamp_min(NARROWEST)
