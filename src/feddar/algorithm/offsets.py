"""Private corrections: what a client adds to the heads of domains for its own samples, and never sends.

Habits differ from site to site: of two equal patients one site admits more. The head of domain m at client i is
w_m + a_i + b_im: a_i moves the constant terms of all domains, b_im the head of one, both normal around 0
(``algorithm.spreads``). For given spreads a client finds the most probable corrections by Newton steps; it returns only
sums over them, from which the server finds the next spreads. Where sites do not differ the spreads fall to 0, and
so do all corrections (docs/method.md, section Corrections of sites).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from feddar.algorithm.protocol import OwnState
from feddar.algorithm.spreads import START, Directions, next_spread
from feddar.models.parameters import Parameters, Tensors
from feddar.objectives import Objective

OFFSETS, MOMENTS = "offsets", "offset_moments"
"""The name of a client's corrections of heads [M, outputs, width] among its own tensors, and of the sums it returns."""
SPREADS = (START["constant"], START["constant"], START["slopes"])
"""The first spreads: of clients' constant terms, and of clients x domains' constant terms and slopes."""
_MOST_STEPS, _ENOUGH, _LONGEST = 30, 1e-3, 2.0
"""Newton steps square the error: after one of 1e-3 it is about 1e-6."""


@dataclass(frozen=True)
class Corrections:
    """The most probable corrections of a client, along the directions, and sums for the next spreads."""

    client: Tensor
    """a, [r]; 0 along slopes."""
    cell: Tensor
    """b of each domain, [M, r]; 0 for domains without samples."""
    moments: Tensor
    """For each of the three spreads: sum of squares, sum of posterior variances and number of differences, [3, 3]."""

    def of_heads(self, along: Directions, shape: torch.Size) -> Tensor:
        """Return what is added to the head of each domain, [M, outputs, width]."""
        return ((self.client + self.cell) @ along.matrix.T).view(-1, *shape)


class CorrectedSamples:
    """A client's samples as far as corrections need them: features, scores without corrections, labels, domains."""

    def __init__(
        self, objective: Objective, features: Tensor, scores: Tensor, y: Tensor, domain: Tensor, along: Directions
    ) -> None:
        self.objective, self.scores, self.y, self.along = objective, scores.double(), y, along
        self.held, self.place = domain.unique(return_inverse=True)
        self.rows = [torch.nonzero(self.place == m).flatten() for m in range(len(self.held))]
        matrix = along.matrix.view(objective.outputs, -1, along.matrix.shape[1])
        self.design = torch.einsum("np,opr->nor", features.double(), matrix)
        """By how much each direction changes the scores of each sample, [n, outputs, r]."""
        # A squared error is a log-likelihood in units of the errors' variance; that before corrections is the careful
        # one, since corrections could make it as small as they like.
        errors = objective.residual(self.scores, y).square().mean()
        self.unit = float(errors.clamp_min(1e-12)) if objective.in_units and len(y) else 1.0

    def fitted(self, spreads: Tensor, domains: int) -> Corrections:
        """Return the most probable corrections for the three spreads."""
        client, constant, slopes = spreads.tolist()
        wide_a, wide_b = self.along.variances(client, 0.0), self.along.variances(constant, slopes)
        a = torch.zeros_like(wide_a)
        b = torch.zeros(len(self.held), len(wide_b), dtype=torch.float64)
        for _ in range(_MOST_STEPS):
            slope, bend = self._derivatives(a + b)
            da, db, *_ = _newton(slope, bend, a, b, wide_a, wide_b)
            moved = self._moved(da + db).abs().max() if len(b) else 0.0
            # A longer step could pass the place where a logistic loss bends, and Newton's method would run away.
            short = float(_LONGEST / max(moved, _LONGEST))
            a, b = a + short * da, b + short * db
            if moved < _ENOUGH:
                break
        *_, variance_a, variance_b = _newton(*self._derivatives(a + b), a, b, wide_a, wide_b)
        c = self.along.constants
        parts = ((a[:c], variance_a[:c]), (b[:, :c], variance_b[:, :c]), (b[:, c:], variance_b[:, c:]))
        moments = [torch.stack([m.square().sum(), v.sum(), torch.tensor(float(m.numel())).double()]) for m, v in parts]
        cell = torch.zeros(domains, len(wide_b), dtype=torch.float64).index_copy(0, self.held, b)
        return Corrections(a, cell, torch.stack(moments))

    def _moved(self, corrections: Tensor) -> Tensor:
        """Return by how much corrections [H, r] change the scores, [n, outputs]."""
        return torch.einsum("nor,nr->no", self.design, corrections[self.place])

    def _derivatives(self, total: Tensor) -> tuple[Tensor, Tensor]:
        """Return slope [H, r] and negative curvature [H, r, r] of the log-likelihood in the corrections [H, r]."""
        scores = self.scores + self._moved(total)
        residual = self.objective.residual(scores, self.y)
        units = torch.eye(scores.shape[1], dtype=torch.float64)
        bent = torch.stack([self.objective.bend("hessian", scores, unit.expand_as(scores)) for unit in units], 1)
        curved = torch.einsum("nop,npr->nor", bent, self.design)
        slope = [-(self.design[rows].flatten(0, 1).T @ residual[rows].flatten()) for rows in self.rows]
        bend = [self.design[rows].flatten(0, 1).T @ curved[rows].flatten(0, 1) for rows in self.rows]
        r = self.design.shape[2]
        if not bend:
            return torch.zeros(0, r, dtype=torch.float64), torch.zeros(0, r, r, dtype=torch.float64)
        return torch.stack(slope) / self.unit, torch.stack(bend) / self.unit


def _newton(
    slope: Tensor, bend: Tensor, a: Tensor, b: Tensor, wide_a: Tensor, wide_b: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the Newton steps of a [r] and b [H, r], and their posterior variances; prior variances may be 0."""
    one = torch.eye(len(a), dtype=torch.float64)
    narrow_a, narrow_b = wide_a.sqrt(), wide_b.sqrt()
    cells = narrow_b[:, None] * torch.linalg.inv(one + narrow_b[:, None] * bend * narrow_b) * narrow_b
    # The prior pulls b back by b / variance; where the variance is 0, b is 0 and stays there.
    pull_a, pull_b = (
        value / wide.clamp_min(torch.finfo(wide.dtype).tiny) for value, wide in ((a, wide_a), (b, wide_b))
    )
    alone = (cells @ (slope - pull_b)[..., None])[..., 0]
    followed = bend @ cells
    # What is left of slope and curvature in a, once each domain's b has followed.
    down = (slope - (bend @ alone[..., None])[..., 0]).sum(0) - pull_a
    shared = (bend - followed @ bend).sum(0)
    spread_a = narrow_a[:, None] * torch.linalg.inv(one + narrow_a[:, None] * shared * narrow_a) * narrow_a
    da = spread_a @ down
    db = alone - followed.mT @ da
    spread_b = cells + followed.mT @ spread_a @ followed
    return da, db, spread_a.diagonal(), spread_b.diagonal(dim1=1, dim2=2)


def next_spreads(before: Tensor, moments: Tensor) -> Tensor:
    """Return the three spreads after one step, from the sums [3, 3] over all clients."""
    rows = zip(before.tolist(), moments.tolist(), strict=True)
    return torch.tensor([next_spread(spread, *row) for spread, row in rows], dtype=torch.float64)


def with_offsets(parameters: Parameters, own: OwnState) -> Parameters:
    """Return the parameters with a client's corrections added to the heads of domains."""
    if OFFSETS not in own.extra:
        return parameters
    heads: Tensors = dict(parameters.heads)
    for domain, correction in enumerate(own.extra[OFFSETS]):
        heads[str(domain)] = heads[str(domain)] + correction.to(heads[str(domain)].dtype)
    return replace(parameters, heads=heads)
