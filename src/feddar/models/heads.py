"""Linear heads over features: gradient, curvature, evidence for credibility, and the packed forms of curvature.

A head is a matrix W [outputs, p] over features X [n, p] (the last feature is a constant 1 if there is a bias); its
scores are S = X W'. The loss and its derivatives in the scores are the objective's (``feddar.objectives``). Everything
here is a *sum* over samples, never a mean, so that contributions of clients can be added, and one division at the end
gives the risks of the paper's section 4.3.

Curvature is a batch of square blocks H [blocks, q, q] that act on a head reshaped by ``as_blocks`` to [blocks, q, r];
so one solver serves all kinds. All of these matrices are symmetric, and are sent as their upper triangle (``triangle``
and ``full_matrix``).
"""

from __future__ import annotations

from functools import lru_cache
from math import isqrt

import torch
from torch import Tensor

from feddar.models.devices import moved
from feddar.objectives import Objective
from feddar.objectives.objective import Curvature, mean_by_sample


def gradient(objective: Objective, head: Tensor, features: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return the gradient of the summed (and weighted) loss in the head, [outputs, p]."""
    slope = objective.residual(features @ head.T, y)
    return weighted(slope, weight).T @ features


def weighted(values: Tensor, weight: Tensor | None) -> Tensor:
    """Return values [n, ...] of samples times their weights [n] or [n, outputs]; None: as they are."""
    return values if weight is None else by_output(weight) * values


def by_output(weight: Tensor) -> Tensor:
    """Return weights [n] as [n, 1]; those of each output, [n, outputs], as they are."""
    return weight[:, None] if weight.dim() == 1 else weight


def curvature(
    objective: Objective, kind: Curvature, head: Tensor, features: Tensor, weight: Tensor | None = None
) -> Tensor:
    """Return the curvature of the summed (and weighted) loss at the head, as blocks in the features' precision."""
    return curvature_at(objective, kind, features @ head.T, features, weight)


def curvature_at(
    objective: Objective, kind: Curvature, scores: Tensor, features: Tensor, weight: Tensor | None = None
) -> Tensor:
    """Return the same from the samples' scores, as blocks [blocks, q, q]."""
    if weight is None:
        return objective.curvature(kind, scores, features)
    return objective.weighted_curvature(kind, scores, features, weight)


def evidence(
    objective: Objective, mean: Tensor, own: Tensor, features: Tensor, y: Tensor, weight: Tensor | None = None
) -> dict[str, Tensor]:
    """Return the evidence for credibility (``algorithm.credibility``): sums over the samples of one domain.

    ``slope`` [outputs, p] is the gradient at the mean head; ``bend`` [] is the second derivative there along the line
    to the domain's own head; ``residuals`` [outputs, outputs] is r r' at its own head, and ``gram`` [p, p] is x x'.
    """
    residuals = objective.residual(features @ own.T, y)
    along = features @ (own - mean).T
    bend = (along * weighted(objective.bend("hessian", features @ mean.T, along), weight)).sum()
    slope = gradient(objective, mean, features, y, weight)
    pairs = residuals.T @ residuals if weight is None else _weighted_pairs(residuals, weight)
    gram = features.T @ weighted(features, None if weight is None else mean_by_sample(weight))
    return {"slope": slope, "bend": bend, "residuals": pairs, "gram": gram}


def _weighted_pairs(residuals: Tensor, weight: Tensor) -> Tensor:
    """Return the weighted sum of r r'; that of two outputs is weighted by the root of both weights."""
    rooted = weighted(residuals, weight.sqrt())
    return rooted.T @ rooted


def curvature_times_heads(
    objective: Objective, kind: Curvature, scores: Tensor, own: Tensor, features: Tensor, weight: Tensor | None = None
) -> Tensor:
    """Return sum_i H_i w_i over clients i, as blocks, from all their samples, without computing each H_i.

    ``scores`` [n, outputs] are by the head at which the sample's client takes curvature, ``own`` by its head w_i.
    """
    if weight is not None and kind == "gram":
        weight = mean_by_sample(weight)
    return as_blocks(kind, weighted(objective.bend(kind, scores, own), weight).T @ features)


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
    taken, _ = _places(matrix.shape[-1], matrix.device)
    return matrix.flatten(-2).gather(-1, taken.expand(*matrix.shape[:-2], -1))


def full_matrix(packed: Tensor) -> Tensor:
    """Undo ``triangle``.

    >>> full_matrix(torch.tensor([1, 2, 3]))
    tensor([[1, 2],
            [2, 3]])
    """
    q = (isqrt(8 * packed.shape[-1] + 1) - 1) // 2
    if q * (q + 1) // 2 != packed.shape[-1]:
        raise ValueError(f"{packed.shape[-1]} numbers are no triangle of a matrix.")
    _, given = _places(q, packed.device)
    return packed.gather(-1, given.expand(*packed.shape[:-1], -1)).view(*packed.shape[:-1], q, q)


@lru_cache(maxsize=8)
def _places(q: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the index in a flat matrix [q q] of each entry of its triangle, and the reverse."""
    row, column = torch.triu_indices(q, q)
    taken, given = row * q + column, torch.empty(q, q, dtype=torch.long)
    given[row, column] = given[column, row] = torch.arange(len(taken))
    return moved((taken, given.flatten()), device)
