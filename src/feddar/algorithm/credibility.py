"""Credibility: how far the head of a domain may stand apart from the mean of all (``docs/method.md``, same name)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from feddar.models.parameters import Tensors

# A residual or feature without variance is 0 up to rounding: below this share of the largest variance.
NO_RANK = 1e-10


class Credibility:
    """Weighs heads of domains against their mean by the evidence that domains differ.

    Evidence is taken at the start of a round. A sample's gradient at the heads' mean is r x', with residual r and
    features x. Within a domain its covariance is about C = mean(r r') kron mean(x x'), with r at the domain's own head;
    between domains it is C / prior. Then a domain with L_m samples is to go L_m / (L_m + prior) of the way from the
    mean to its own optimum.
    """

    def __init__(self, start: Mapping[str, Tensor]) -> None:
        """``start`` are the heads at which evidence is taken, by key."""
        self.start = dict(start)
        self.samples: dict[str, float] = {}
        self.slopes: Tensors = {}
        self.bends: Tensors = {}
        self.residuals = self.gram = torch.zeros((), dtype=torch.float64)

    def add(self, key: str, evidence: Mapping[str, Tensor], samples: float) -> None:
        """Add samples of a domain, of one client or several: what ``models.heads.evidence`` gives."""
        self.samples[key] = self.samples.get(key, 0.0) + samples
        self.slopes[key] = self.slopes.get(key, 0) + evidence["slope"].double()
        self.bends[key] = self.bends.get(key, 0) + evidence["bend"].double()
        self.residuals = self.residuals + evidence["residuals"].double()
        self.gram = self.gram + evidence["gram"].double()

    def prior(self) -> float:
        """Return how many samples the mean is worth: variance within domains over variance between them.

        It is the moment estimator of DerSimonian and Laird, for gradients in the metric of C.
        """
        counts, total = self._counts(), self._counts().sum()
        left, right = (_whitening(matrix / total) for matrix in (self.residuals, self.gram))
        directions = left.shape[1] * right.shape[1]
        if not directions:  # samples without noise
            return 0.0
        spread = ((left.T @ self._slopes() @ right).square().sum((1, 2)) / counts).sum()
        between = (spread - (len(counts) - 1) * directions) / (total - counts.square().sum() / total)
        return float(directions / between) if between > 0 else float("inf")

    def weighed(self, heads: Mapping[str, Tensor]) -> Tensors:
        """Return the heads of all domains that were added, drawn towards their mean where evidence is thin."""
        mean, away = self._centred(heads)
        weighed = mean + self._kept()[:, None, None] * away
        return {key: head.to(heads[key].dtype) for key, head in zip(self.samples, weighed, strict=True)}

    def _kept(self) -> Tensor:
        """Return which part of its difference from the mean each head keeps, from 0 to 1."""
        counts = self._counts()
        _, along = self._centred(self.start)
        # Where on the line from the mean (0) to the head (1) the domain's optimum is: beyond 1, where training stopped
        # early and so has left the head nearer to the mean already.
        optimum = -(self._slopes() * along).sum((1, 2)) / torch.stack([self.bends[key] for key in self.samples])
        return (counts / (counts + self.prior()) * optimum.nan_to_num(1).clamp_min(1)).clamp_max(1)

    def _counts(self) -> Tensor:
        return torch.tensor(list(self.samples.values()), dtype=torch.float64)

    def _slopes(self) -> Tensor:
        """Each domain's gradient at the mean, less its part of the one that all have in common."""
        counts, slopes = self._counts(), torch.stack([self.slopes[key] for key in self.samples])
        return slopes - (counts / counts.sum())[:, None, None] * slopes.sum(0)

    def _centred(self, heads: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the mean of heads by their samples, and their differences from it."""
        own, counts = torch.stack([heads[key] for key in self.samples]).double(), self._counts()
        mean = (counts[:, None, None] * own).sum(0) / counts.sum()
        return mean, own - mean


def _whitening(matrix: Tensor) -> Tensor:
    """Return A with A' M A = I on the directions in which M is not flat, which are A's columns."""
    values, vectors = torch.linalg.eigh(matrix)
    curved = values > NO_RANK * values[-1].clamp_min(0)
    found: Tensor = vectors[:, curved] / values[curved].sqrt()
    return found
