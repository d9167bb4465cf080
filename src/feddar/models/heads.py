"""Linear heads under squared, logistic and softmax loss: value, exact gradient, exact curvature.

A head is a matrix W [outputs, p] over features X [n, p] (the last feature is a constant 1 where there is a bias);
its scores are S = X W'. Everything here is a *sum* over samples, never a mean, so that contributions of clients add
and one division at the end gives section 4.3's risks:

======== ==================== =============== ==========================================
loss     value of one sample  dvalue/dscore   curvature d2value/dscore2
======== ==================== =============== ==========================================
squared  (s - y)^2 / 2        s - y           1
logistic log(1 + e^s) - y s   sigma(s) - y    sigma(s) (1 - sigma(s))
softmax  logsumexp(s) - s_y   p - e_y         diag(p) - p p'
======== ==================== =============== ==========================================

Curvature comes in three forms, all as a batch of square blocks H [blocks, q, q] that act on a head reshaped by
``as_blocks`` to [blocks, q, r]; so one solver serves them all:

* ``hessian``: the exact one, [1, outputs p, outputs p];
* ``block``: its diagonal blocks, one per output, X' diag(.) X, [outputs, p, p];
* ``gram``: X'X alone, [1, p, p], the same for all outputs. For the squared loss it is the Hessian. For softmax it is
  Boehning's bound (I - 11'/C)/2 kron X'X, whose class factor cancels when heads are combined, and which costs 1/C^2
  of the traffic.

All of these matrices are symmetric, and travel as their upper triangle (``triangle`` and ``whole``).
"""

from __future__ import annotations

from functools import lru_cache
from math import isqrt
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from feddar.data.cohort import Task

Curvature = Literal["hessian", "block", "gram"]
CURVATURES: tuple[Curvature, ...] = get_args(Curvature)
PIECE = 2048
"""Samples whose exact softmax curvature is added at a time."""


def default_curvature(task: Task) -> Curvature:
    """Exact where a head gives one number; the cheap bound where it gives one per class, at equal accuracy."""
    return "gram" if task == "multiclass" else "hessian"


def loss(task: Task, scores: Tensor, y: Tensor) -> Tensor:
    """Return the loss of each sample, from scores [n, outputs]."""
    if task == "regression":
        return 0.5 * (scores[:, 0] - y).square()
    if task == "binary":
        return functional.binary_cross_entropy_with_logits(scores[:, 0], y.to(scores.dtype), reduction="none")
    return functional.cross_entropy(scores, y, reduction="none")


def probabilities(task: Task, scores: Tensor) -> Tensor:
    """Turn scores into what a user reads: a number [n], or one probability per class [n, classes]."""
    if task == "regression":
        return scores[:, 0]
    if task == "binary":
        positive = torch.sigmoid(scores[:, 0])
        return torch.stack([1 - positive, positive], dim=1)
    return torch.softmax(scores, dim=1)


def as_scores(task: Task, predicted: Tensor) -> Tensor:
    """Undo ``probabilities``: scores [n, outputs] that give these predictions."""
    if task == "regression":
        return predicted[:, None]
    if task == "binary":
        return torch.logit(predicted[:, 1:])
    return predicted.log()


def residual(task: Task, scores: Tensor, y: Tensor) -> Tensor:
    """Return dvalue/dscore of each sample, [n, outputs]."""
    if task == "regression":
        return scores - y[:, None]
    if task == "binary":
        return torch.sigmoid(scores) - y[:, None].to(scores.dtype)
    p = torch.softmax(scores, dim=1)
    p[torch.arange(len(y)), y] -= 1
    return p


def gradient(task: Task, head: Tensor, features: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return the gradient of the summed (and weighted) loss by the head, [outputs, p]."""
    slope = residual(task, features @ head.T, y)
    return (slope if weight is None else weight[:, None] * slope).T @ features


def is_gram(task: Task, kind: Curvature | None) -> bool:
    """Whether that curvature is the Gram matrix X'X."""
    return kind == "gram" or (kind is not None and task == "regression")


def curvature(task: Task, kind: Curvature, head: Tensor, features: Tensor) -> Tensor:
    """Return the curvature of the summed loss at the head, as blocks [blocks, q, q] in the features' precision."""
    return curvature_by_scores(task, kind, features @ head.T, features)


def curvature_by_scores(task: Task, kind: Curvature, scores: Tensor, features: Tensor) -> Tensor:
    """Return the same where samples may each have their own head, of which only the scores matter."""
    if is_gram(task, kind):
        return (features.T @ features)[None]
    if task == "binary":
        p = torch.sigmoid(scores)
        return (features.T @ (p * (1 - p) * features))[None]
    p = torch.softmax(scores, dim=1)
    if kind == "block":
        return torch.stack([features.T @ ((q * (1 - q))[:, None] * features) for q in p.T])
    return _softmax_hessian(p, features)[None]


def _softmax_hessian(p: Tensor, features: Tensor) -> Tensor:
    """sum_j (diag(p_j) - p_j p_j') kron x_j x_j'."""
    classes, width = p.shape[1], features.shape[1]
    hessian = features.new_zeros(classes * width, classes * width)
    # In pieces: a sample's products of classes and features are many numbers.
    for some_p, some in zip(p.split(PIECE), features.split(PIECE), strict=True):
        weighted = (some_p[:, :, None] * some[:, None, :]).reshape(len(some), classes * width)
        hessian -= weighted.T @ weighted
        for c in range(classes):
            span = slice(c * width, (c + 1) * width)
            hessian[span, span] += some.T @ weighted[:, span]
    return hessian


def evidence(task: Task, mean: Tensor, own: Tensor, features: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Return what a domain's samples say about its difference from the others (``aggregate.Credibility``), as sums.

    ``slope`` [outputs, p] is the gradient at the mean of all heads, ``bend`` [] the curvature there along the line to
    the domain's own head, ``residuals`` [outputs, outputs] is r r' at its own head, and ``gram`` [p, p] is x x'.
    """
    residuals = residual(task, features @ own.T, y)
    along = features @ (own - mean).T
    bend = (along * _bent(task, "hessian", features @ mean.T, along)).sum()
    slope = gradient(task, mean, features, y)
    return {"slope": slope, "bend": bend, "residuals": residuals.T @ residuals, "gram": features.T @ features}


def curved(task: Task, kind: Curvature, scores: Tensor, own: Tensor, features: Tensor) -> Tensor:
    """Return sum_i H_i w_i over clients i, as blocks, from all their samples and without any one's H_i.

    ``scores`` are each sample's by the head at which its client takes curvature, ``own`` those by its head w_i.
    """
    return as_blocks(kind, _bent(task, kind, scores, own).T @ features)


def _bent(task: Task, kind: Curvature, scores: Tensor, along: Tensor) -> Tensor:
    """Multiply d2value/dscore2 of each sample, as the kind of curvature has it, by a direction [n, outputs]."""
    if is_gram(task, kind):
        return along
    p = torch.sigmoid(scores) if task == "binary" else torch.softmax(scores, dim=1)
    if kind == "block" or task == "binary":
        return p * (1 - p) * along
    return p * (along - (p * along).sum(1, keepdim=True))


def as_blocks(kind: Curvature, head: Tensor) -> Tensor:
    """Reshape a head [outputs, p] to [blocks, q, r], the form that its curvature multiplies."""
    if kind == "hessian":
        return head.reshape(1, -1, 1)
    if kind == "block":
        return head[:, :, None]
    return head.T[None]


def from_blocks(kind: Curvature, blocks: Tensor, shape: torch.Size) -> Tensor:
    """Undo ``as_blocks``."""
    return blocks[0].T.contiguous() if kind == "gram" else blocks.reshape(shape)


def triangle(matrix: Tensor) -> Tensor:
    """Return the upper triangle of symmetric matrices [..., q, q], row by row, as [..., q (q + 1) / 2].

    >>> triangle(torch.tensor([[1, 2], [2, 3]]))
    tensor([1, 2, 3])
    """
    taken, _ = _places(matrix.shape[-1])
    return matrix.flatten(-2).gather(-1, taken.expand(*matrix.shape[:-2], -1))


def whole(packed: Tensor) -> Tensor:
    """Undo ``triangle``.

    >>> whole(torch.tensor([1, 2, 3]))
    tensor([[1, 2],
            [2, 3]])
    """
    q = (isqrt(8 * packed.shape[-1] + 1) - 1) // 2
    if q * (q + 1) // 2 != packed.shape[-1]:
        raise ValueError(f"{packed.shape[-1]} numbers are no triangle of a matrix.")
    _, given = _places(q)
    return packed.gather(-1, given.expand(*packed.shape[:-1], -1)).view(*packed.shape[:-1], q, q)


@lru_cache(maxsize=8)
def _places(q: int) -> tuple[Tensor, Tensor]:
    """Where in a matrix [q q] each entry of its triangle is, and where in the triangle each entry of the matrix."""
    row, column = torch.triu_indices(q, q)
    taken, given = row * q + column, torch.empty(q, q, dtype=torch.long)
    given[row, column] = given[column, row] = torch.arange(len(taken))
    return taken, given.flatten()
