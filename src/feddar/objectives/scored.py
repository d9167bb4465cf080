"""Test samples with their predictions, and the sums over them that a site may send."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from feddar.objectives.score_bins import BINS, CoarseBins, bins_of


@dataclass(frozen=True)
class Scored:
    """Test samples with their labels and predictions, which a site sums up by domain."""

    y: Tensor
    predicted: Tensor
    domain: Tensor
    domains: int
    """The number of domains, M."""
    score_range: Tensor | None = None
    """The range of scores in which bins are narrow."""
    coarse: CoarseBins | None = None
    """Joins neighbouring bins, so that none has too few patients."""

    def total(self, values: Tensor) -> Tensor:
        """Return the sums of values [n, k] over the samples of each domain, [M, k] in float64."""
        return torch.zeros(self.domains, values.shape[1], dtype=torch.float64).index_add(0, self.domain, values)

    def histogram(self, truth: Tensor, predicted: Tensor) -> Tensor:
        """Return counts [M, C, 2, BINS] of samples by domain, class, membership, and bin of its probability."""
        shape = (self.domains, predicted.shape[1], 2, BINS)
        by_class = self.domain[:, None] * shape[1] + torch.arange(shape[1])
        cell = (by_class * 2 + truth) * BINS + self._bins(predicted)
        return torch.bincount(cell.flatten(), minlength=math.prod(shape)).view(shape).int()

    def _bins(self, predicted: Tensor) -> Tensor:
        """Return the bin of each probability [n, C]; every bin that is not empty has enough patients of its domain."""
        place = bins_of(predicted, self.score_range)
        if self.coarse is not None and self.coarse.least > 1:
            for m in self.domain.unique().tolist():
                rows = torch.nonzero(self.domain == m).flatten()
                team = CoarseBins(self.coarse.patient[rows], self.coarse.least)
                place[rows] = torch.stack([team(column) for column in place[rows].T], dim=1)
        return place
