"""Aggregation at the server: replies are added one by one as they arrive, and the result is computed at the end.

``Average`` is the weighted average (WA), theta = sum_i a_i theta_i / sum_i a_i. ``SecondOrder`` is second-order
aggregation (SA, the paper's equation for w^{t+1}), anchored at that average so that it is defined for every
curvature, singular ones (every softmax Hessian) included:

    w = w_avg + (S + lam I)^-1 (sum_i a_i H_i w_i - S w_avg),    S = sum_i a_i H_i,    lam = damping * mean(diag S)

which for damping = 0 and invertible S is the paper's S^-1 sum_i a_i H_i w_i, and tends to w_avg as damping grows.
Sums are kept in float64 and memory does not grow with the number of clients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from feddar.errors import UserError

# Eigenvectors of S whose eigenvalue is below this share of the largest count as flat: there the weighted average is
# kept. (For curvature computed in float32, ``second_order`` sets a larger share, since rounding noise is larger.)
FLAT = 1e-12


class Average:
    """Streaming weighted average of named tensors."""

    def __init__(self) -> None:
        self.weight = 0.0
        self.sums: dict[str, Tensor] = {}
        self.dtypes: dict[str, torch.dtype] = {}

    def add(self, tensors: dict[str, Tensor], weight: float) -> None:
        """Add one contribution; whole-number tensors (batch-norm counters) are not averaged."""
        if weight < 0:
            raise UserError(f"a weight must not be negative, and is {weight}.")
        self.weight += weight
        for name, tensor in tensors.items():
            if not tensor.is_floating_point():
                continue
            if name in self.sums:
                # In place, so that there is only one float64 copy however many clients reply.
                self.sums[name].add_(tensor, alpha=weight)
            else:
                self.dtypes[name] = tensor.dtype
                self.sums[name] = tensor.double() * weight

    def result(self) -> dict[str, Tensor]:
        """Return the average in each tensor's own dtype; empty if nothing with a positive weight was added."""
        if self.weight == 0:
            return {}
        return {name: (total / self.weight).to(self.dtypes[name]) for name, total in self.sums.items()}


class SecondOrder:
    """Streaming second-order aggregation of heads in block form ([blocks, q, r], see ``heads.as_blocks``)."""

    def __init__(self, damping: float, flat: float = FLAT) -> None:
        if damping < 0:
            raise UserError(f"damping must not be negative, and is {damping}.")
        self.damping = damping
        self.flat = flat
        self.weight = 0.0
        self.head = self.times_head = self.curvature = torch.zeros((), dtype=torch.float64)

    def add(self, head: Tensor, curvature: Tensor, weight: float, times_head: Tensor | None = None) -> None:
        """Add one client's head w_i, its curvature *summed* over samples (L_i H_i), and its weight L_i.

        For several clients at once: their mean head by weight, summed curvatures, summed weights, and as ``times_head``
        the sum of their L_i H_i w_i.
        """
        head, curvature = head.double(), curvature.double()
        self.weight += weight
        self.head = self.head + weight * head
        self.times_head = self.times_head + (curvature @ head if times_head is None else times_head)
        self.curvature = self.curvature + curvature

    def result(self) -> Tensor:
        """Return the aggregated head, in float64."""
        average = self.head / self.weight
        pull = self.times_head - self.curvature @ average
        return average + _solve(self.curvature, pull, self.damping, self.flat)


def _solve(matrix: Tensor, right: Tensor, damping: float, flat: float) -> Tensor:
    """Solve (S + lam I) d = r for positive semidefinite S [blocks, q, q]; d is 0 along flat directions."""
    scale = matrix.diagonal(dim1=-2, dim2=-1).mean(-1)
    damped = matrix + torch.diag_embed((damping * scale)[:, None].expand(-1, matrix.shape[-1]))
    if damping > 0:
        factor, info = torch.linalg.cholesky_ex(damped)
        if not info.any():
            return torch.cholesky_solve(right, factor)
    values, vectors = torch.linalg.eigh(damped)
    inverse = torch.where(values > flat * values[:, -1:], 1 / values, torch.zeros_like(values))
    solved: Tensor = vectors @ (inverse[:, :, None] * (vectors.mT @ right))
    return solved


def project_to_simplex(values: Tensor) -> Tensor:
    """Return the point of the probability simplex (coordinates >= 0 that add up to 1) nearest to ``values``.

    >>> project_to_simplex(torch.tensor([0.5, 0.9, -0.4]))
    tensor([0.3000, 0.7000, 0.0000])
    """
    sorted_values = values.sort(descending=True).values
    excess = (sorted_values.cumsum(0) - 1) / torch.arange(1, len(values) + 1)
    kept = int((sorted_values > excess).sum())
    projected = (values - excess[kept - 1]).clamp_min(0)
    return projected / projected.sum()


def second_order(heads: Tensor, curvatures: Tensor, weights: Tensor, damping: float = 0.0) -> Tensor:
    """Combine n heads [n, p] into one [p] by second-order aggregation.

    ``curvatures`` [n, p, p] are means over samples (H_i), and ``weights`` [n] are counts of samples (L_i).

    >>> heads, curvatures = torch.tensor([[0.0], [1.0]]), torch.tensor([[[1.0]], [[3.0]]])
    >>> second_order(heads, curvatures, torch.tensor([1.0, 1.0]))
    tensor([0.7500])
    """
    heads, curvatures, weights = (torch.as_tensor(given) for given in (heads, curvatures, weights))
    n, p = heads.shape
    if curvatures.shape != (n, p, p) or weights.shape != (n,):
        raise UserError(
            f"heads [n, p] = {tuple(heads.shape)} need curvatures [n, p, p] and weights [n]; given were "
            f"{tuple(curvatures.shape)} and {tuple(weights.shape)}."
        )
    if (weights < 0).any() or not weights.sum() > 0:
        raise UserError("weights must not be negative, and one at least must be positive.")
    if not all(bool(torch.isfinite(given).all()) for given in (heads, curvatures, weights)):
        raise UserError("heads, curvatures and weights must be finite.")
    total = SecondOrder(damping, flat=max(FLAT, p * torch.finfo(curvatures.dtype).eps))
    for head, curved, weight in zip(heads, curvatures, weights.tolist(), strict=True):
        total.add(head[None, :, None], weight * curved.double()[None], weight)
    return total.result()[0, :, 0].to(heads.dtype)
