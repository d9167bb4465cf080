"""Credibility: shrinks the head of a domain towards the mean of all heads (docs/method.md, section Credibility)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from feddar.models.parameters import Tensors

# Eigenvalues of a second-moment matrix below this share of the largest are rounding errors and count as 0.
NO_RANK = 1e-10


@dataclass(frozen=True)
class WeighedHeads:
    """Heads for use, and what the evidence says of them."""

    heads: Tensors
    """mean + kept_m (w_m - mean), by key."""
    difference: float
    """How much of its own head a domain of mean size would keep (0: domains are one population)."""


class Credibility:
    """Weighs heads of domains against their mean by the evidence that domains differ.

    Evidence is measured at the start of a round. A sample's gradient at the mean head is r x', with residual r and
    features x. Within a domain its covariance is about C = mean(r r') kron mean(x x'), with r at the domain's own head;
    between domains it is C / prior. The best head of a domain with L_m samples is then L_m / (L_m + prior) of the way
    from the mean head to the domain's own optimum. Evidence may be of a part of the samples, where only some clients
    take part in a round; ``behind`` are then all samples of each domain [M], which its head was trained on over time.
    """

    def __init__(self, start: Mapping[str, Tensor]) -> None:
        """``start`` are the heads sent at the start of the round, by key: evidence was measured at them."""
        self.start = dict(start)
        self.samples: dict[str, float] = {}
        self.gradients: Tensors = {}
        self.curvatures: Tensors = {}
        self.residuals = self.gram = torch.zeros((), dtype=torch.float64)

    def add(self, key: str, evidence: Mapping[str, Tensor], samples: float) -> None:
        """Add the evidence (``models.heads.evidence``) of a domain's samples, from one client or several."""
        self.samples[key] = self.samples.get(key, 0.0) + samples
        self.gradients[key] = self.gradients.get(key, 0) + evidence["slope"].double()
        self.curvatures[key] = self.curvatures.get(key, 0) + evidence["bend"].double()
        self.residuals = self.residuals + evidence["residuals"].double()
        self.gram = self.gram + evidence["gram"].double()

    def prior(self) -> float:
        """Return how many samples the mean head is worth: variance within domains over variance between them.

        It is the moment estimator of DerSimonian and Laird, for gradients whitened by C (``prior`` in docs/method.md).
        """
        counts, total = self._counts(), self._counts().sum()
        left, right = (_whitening(matrix / total) for matrix in (self.residuals, self.gram))
        directions = left.shape[1] * right.shape[1]
        if not directions:  # all residuals or all features are 0
            return 0.0
        spread = ((left.T @ self._centred_gradients() @ right).square().sum((1, 2)) / counts).sum()
        between = (spread - (len(counts) - 1) * directions) / (total - counts.square().sum() / total)
        return float(directions / between) if between > 0 else float("inf")

    def weighed(self, heads: Mapping[str, Tensor], behind: Tensor | None = None) -> WeighedHeads:
        """Return the heads for use of all domains whose evidence was added, and how much domains differ."""
        prior, size = self.prior(), float(self._of_evidence(behind).mean())
        mean, away = self._centred(heads, behind)
        weighed = mean + self._kept(prior, behind)[:, None, None] * away
        by_key = {key: head.to(heads[key].dtype) for key, head in zip(self.samples, weighed, strict=True)}
        return WeighedHeads(by_key, size / (size + prior))

    def _kept(self, prior: float, behind: Tensor | None) -> Tensor:
        """Return kept_m of docs/method.md: the share, 0 to 1, of its difference from the mean that each head keeps."""
        counts = self._of_evidence(behind)
        _, along = self._centred(self.start, behind)
        # Where the domain's optimum is on the line from the mean (0) to the head (1). It is beyond 1 where training
        # stopped early, which has already left the head closer to the mean than the optimum is.
        curvatures = torch.stack([self.curvatures[key] for key in self.samples])
        optimum = -(self._centred_gradients() * along).sum((1, 2)) / curvatures
        return (counts / (counts + prior) * optimum.nan_to_num(1).clamp_min(1)).clamp_max(1)

    def _of_evidence(self, behind: Tensor | None) -> Tensor:
        """Return all samples of those domains whose evidence was added."""
        return self._counts() if behind is None else behind[[int(key) for key in self.samples]].double()

    def _counts(self) -> Tensor:
        """Return the samples that evidence is of, by domain."""
        return torch.tensor(list(self.samples.values()), dtype=torch.float64)

    def _centred_gradients(self) -> Tensor:
        """Return g_m of docs/method.md: each domain's summed gradient less L_m / L of the sum over all domains."""
        counts, gradients = self._counts(), torch.stack([self.gradients[key] for key in self.samples])
        return gradients - (counts / counts.sum())[:, None, None] * gradients.sum(0)

    def _centred(self, heads: Mapping[str, Tensor], behind: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the mean of the heads weighted by samples, and the heads' differences from it."""
        own, counts = torch.stack([heads[key] for key in self.samples]).double(), self._of_evidence(behind)
        mean = (counts[:, None, None] * own).sum(0) / counts.sum()
        return mean, own - mean


def _whitening(matrix: Tensor) -> Tensor:
    """Return A [n, rank] with A' M A = I; its columns span the directions in which M is not 0."""
    values, vectors = torch.linalg.eigh(matrix)
    curved = values > NO_RANK * values[-1].clamp_min(0)
    found: Tensor = vectors[:, curved] / values[curved].sqrt()
    return found
