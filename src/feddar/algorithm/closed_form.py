"""Heads of domains in closed form: analytic federated learning (He et al. 2025) over the encoder of FedAvg.

A head is the least-squares fit of labels on features. For classes labels are centred one-hot columns times a constant,
by which a second-order step from zero heads differs from least squares; for a number they are the number. So for all
outcomes, with b the negative gradient of the loss at zero heads times that constant, and G the Gram matrix X'X, both
summed over the samples of all clients,

    w = (G + r s)^-1 b,        w_m = w + (G_m + r s)^-1 (b_m - G_m w).

w is the head of all domains together, and w_m that of domain m, which a ridge draws to w instead of to 0: s is the mean
square of a feature, so that the ridge counts as much as r samples. A domain of which no sums come has w.
"""

from __future__ import annotations

import torch
from torch import Tensor

from feddar.algorithm.pooling import CURVATURE, ERRORS, SLOPE, Pooling
from feddar.models.heads import full_matrix
from feddar.models.parameters import Tensors
from feddar.objectives import Objective

NO_RANK = 1e-10
"""Eigenvalues below this share of the largest are rounding errors: along them nothing can be learned."""


def closed_form_heads(total: Pooling, ridge: float, domains: int) -> Tensors | None:
    """Return the heads of all domains from sums taken at zero heads, in float64; None if there are no sums."""
    if not total.keys:
        return None
    found = {key: _equations(total, key) for key in total.keys}
    b, G = (torch.stack(each).sum(0) for each in zip(*found.values(), strict=True))
    pull = ridge * float(G.diagonal().mean()) / _samples(total)
    common = _solved(G, b, pull)
    heads = {key: common + _solved(own, right - common @ own, pull) for key, (right, own) in found.items()}
    return {key: heads.get(key, common).clone() for key in map(str, range(domains))}


def length_of_scores(total: Pooling) -> tuple[float, float]:
    """Return how long scores are by the common head without a ridge, and how long its labels are, which is no less."""
    if not total.keys:
        return 0.0, 0.0
    b, G = (torch.stack(each).sum(0) for each in zip(*(_equations(total, key) for key in total.keys), strict=True))
    head = _solved(G, b, 0.0)
    squares = float(total.sums[ERRORS][0]) * scale_of_labels(total.objective) ** 2
    return float((head @ G * head).sum() / _samples(total)) ** 0.5, (squares / _samples(total)) ** 0.5


def scale_of_labels(objective: Objective) -> float:
    """Return 1 over the curvature of the loss at zero scores: 4 for two classes, C for C of them, 1 for a number."""
    outputs = objective.outputs
    along = torch.eye(outputs, dtype=torch.float64)[:1]
    along = along - along.mean() if outputs > 1 else along  # a softmax is flat along equal scores
    return float(along.square().sum() / (along * objective.bend("hessian", torch.zeros_like(along), along)).sum())


def _equations(total: Pooling, key: str) -> tuple[Tensor, Tensor]:
    """Return b [outputs, p] and G [p, p] of a domain."""
    slope, gram = total.sums[f"{SLOPE}/{key}"], full_matrix(total.sums[f"{CURVATURE}/{key}"])
    return -scale_of_labels(total.objective) * slope.view(total.objective.outputs, -1), gram


def _samples(total: Pooling) -> float:
    return max(1.0, float(total.sums[ERRORS][1]) / total.objective.outputs)


def _solved(gram: Tensor, right: Tensor, pull: float) -> Tensor:
    """Return w of w (G + pull) = right; along directions without features it is 0."""
    ridged = gram + pull * torch.eye(len(gram), dtype=gram.dtype)
    solved: Tensor = right @ torch.linalg.pinv(ridged, rtol=NO_RANK, hermitian=True)
    return solved
