"""Three or more classes, with the softmax loss.

The loss is logsumexp(s) - s_y; its derivatives by the scores are p - e_y and diag(p) - p p', with p = softmax(s). The
Gram matrix is Boehning's bound (I - 11'/C)/2 kron X'X of the curvature, whose class factor cancels when heads are
combined, and which costs 1/C^2 of the traffic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from feddar.objectives.classification import Classification
from feddar.objectives.objective import Curvature

PIECE = 2048
"""The number of samples whose exact curvature is computed at a time."""


@dataclass(frozen=True)
class Multiclass(Classification):
    """Each sample has one of three or more classes."""

    task = "multiclass"
    metrics = ("accuracy", "auc", "auprc", "log_loss", "brier")
    gaps = ("accuracy", "auc")
    # The exact Hessian has C^2 times as many numbers, and the bound gives the same accuracy.
    default_curvature = "gram"

    @classmethod
    def _takes(cls, classes: int) -> bool:
        return classes > 2

    @property
    def outputs(self) -> int:
        """The number of outputs: one for each class."""
        return len(self.names)

    def loss(self, scores: Tensor, y: Tensor) -> Tensor:
        """Return logsumexp(s) - s_y."""
        return functional.cross_entropy(scores, y, reduction="none")

    def scores_of_factors(self, factors: Tensor) -> Tensor:
        """Return what is added to the scores of classes: the logarithms of their factors."""
        return factors[..., 0, :]

    def residual(self, scores: Tensor, y: Tensor) -> Tensor:
        """Return p - e_y."""
        p = torch.softmax(scores, dim=1)
        p[torch.arange(len(y), device=y.device), y] -= 1
        return p

    def bend(self, kind: Curvature, scores: Tensor, along: Tensor) -> Tensor:
        """Return (diag(p) - p p') d; for ``block`` only its diagonal times d, and for ``gram`` d itself."""
        if kind == "gram":
            return along
        p = torch.softmax(scores, dim=1)
        if kind == "block":
            return p * (1 - p) * along
        return p * (along - (p * along).sum(1, keepdim=True))

    def curvature(self, kind: Curvature, scores: Tensor, features: Tensor) -> Tensor:
        """Return sum_j (diag(p_j) - p_j p_j') kron x_j x_j', its diagonal blocks, or X'X."""
        if kind == "gram":
            return (features.T @ features)[None]
        p = torch.softmax(scores, dim=1)
        if kind == "block":
            return torch.stack([features.T @ ((q * (1 - q))[:, None] * features) for q in p.T])
        return _hessian(p, features)[None]

    def predictions(self, scores: Tensor) -> Tensor:
        """Return a probability for each class, [n, classes]."""
        return torch.softmax(scores, dim=1)

    def scores_of(self, predicted: Tensor) -> Tensor:
        """Return the logarithms of the probabilities."""
        return predicted.log()


def _hessian(p: Tensor, features: Tensor) -> Tensor:
    classes, width = p.shape[1], features.shape[1]
    hessian = features.new_zeros(classes * width, classes * width)
    # Some samples at a time: the products of classes and features of all would need much memory.
    for some_p, some in zip(p.split(PIECE), features.split(PIECE), strict=True):
        weighted = (some_p[:, :, None] * some[:, None, :]).reshape(len(some), classes * width)
        hessian -= weighted.T @ weighted
        for c in range(classes):
            span = slice(c * width, (c + 1) * width)
            hessian[span, span] += some.T @ weighted[:, span]
    return hessian
