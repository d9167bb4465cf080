"""Private corrections: what a client adds to the heads of domains for its own samples, and never sends.

Habits differ from site to site: of two equal patients one site admits more. The head of domain m at client i is
w_m + a_i + b_im: a_i moves the heads of all domains, b_im that of one, both normal around 0 (``algorithm.spreads``).
For given spreads a client finds the most probable corrections by Newton steps; it returns only
sums over them, from which the server finds the next spreads. Where sites do not differ the spreads fall to 0, and
so do all corrections (docs/method.md, section Corrections of sites).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from feddar.algorithm.protocol import OwnState
from feddar.algorithm.spreads import Directions, covariance_of, next_spread
from feddar.models.devices import like
from feddar.models.heads import by_output, weighted
from feddar.models.parameters import ALL, Parameters, Tensors, keys
from feddar.objectives import Objective
from feddar.objectives.objective import mean_by_sample

OFFSETS, MOMENTS = "offsets", "offset_moments"
"""The name of a client's corrections of heads [M, outputs, width] among its own tensors, and of the sums it returns."""
_MOST_STEPS, _ENOUGH, _LONGEST = 30, 1e-6, 2.0
"""Newton steps square the error: after one of 1e-6 only rounding is left."""


class Cells:
    """Which samples belong to which client and domain; a cell is a client with a domain of which it has samples."""

    def __init__(self, owner: Tensor, domain: Tensor, clients: int, domains: int) -> None:
        """``owner`` [n] and ``domain`` [n] are the client and domain of each sample, by number."""
        self.clients, self.domains, self.samples = clients, domains, torch.bincount(owner, minlength=clients)
        self.number, self.place = (owner * domains + domain).unique(return_inverse=True)
        """The cells that have samples, [H], and the place of each sample's cell among them, [n]."""
        self.owner = self.number // domains
        self.order = torch.argsort(self.place, stable=True)
        self.sizes = torch.bincount(self.place, minlength=len(self.number)).tolist()

    def total(self, values: Tensor) -> Tensor:
        """Return the sums of values [H, ...] over the cells of each client, [clients, ...]."""
        return values.new_zeros(self.clients, *values.shape[1:]).index_add(0, self.owner, values)

    def split(self, values: Tensor) -> tuple[Tensor, ...]:
        """Return values [n, ...] of the samples of each cell."""
        found: tuple[Tensor, ...] = values[self.order].split(self.sizes)
        return found


@dataclass(frozen=True)
class Corrections:
    """The most probable corrections of clients, along the directions, and sums for the next spreads."""

    client: Tensor
    """a, [clients, r]."""
    cell: Tensor
    """b of each domain, [clients, M, r]; 0 for domains without samples."""
    moved: Tensor
    """By how much they change the scores of the samples, [n, outputs]."""
    moments: Tensor
    """For each of the four spreads: sum of squares, sum of posterior variances and number of differences, [4, 3]."""

    def of_heads(self, along: Directions, outputs: int) -> Tensor:
        """Return what is added to the head of each domain, [clients, M, outputs, width]."""
        corrections = (self.client[:, None] + self.cell) @ along.matrix.T
        return corrections.view(*corrections.shape[:2], outputs, -1)


class CorrectedSamples:
    """Samples of clients as far as corrections need them: features, scores without corrections, labels and cells."""

    def __init__(
        self,
        objective: Objective,
        features: Tensor,
        scores: Tensor,
        y: Tensor,
        cells: Cells,
        along: Directions,
        weight: Tensor | None = None,
    ) -> None:
        """``weight`` [n] or [n, outputs] is by how much each sample counts; None: all the same."""
        self.weight = weight
        self.objective, self.scores, self.y, self.cells, self.along = objective, scores.double(), y, cells, along
        self.design = torch.einsum("np,opr->nor", features.double(), along.by_output(objective.outputs))
        """By how much each direction changes the scores of each sample, [n, outputs, r]."""
        # A squared error is a log-likelihood in units of the errors' variance; that before corrections is the careful
        # one, since corrections could make it as small as they like.
        self.unit = self.scores.new_ones(cells.clients)
        if objective.in_units:
            owner = cells.owner[cells.place]
            errors = weighted(objective.residual(self.scores, y).square(), weight).mean(1)
            total = torch.zeros_like(self.unit).index_add(0, owner, errors)
            samples = cells.samples.clamp_min(1)
            if weight is not None:
                mass = torch.zeros_like(self.unit).index_add(0, owner, mean_by_sample(weight))
                samples = torch.where(mass > 0, mass, 1)
            self.unit = (total / samples).clamp_min(1e-12)

    def fitted(self, spreads: Tensor) -> Corrections:
        """Return the most probable corrections for the four spreads."""
        cells, of_client, of_cell = self.cells, spreads[:2].tolist(), spreads[2:].tolist()
        wide_a, wide_b = self.along.variances(*of_client), self.along.variances(*of_cell)
        a = self.scores.new_zeros(cells.clients, len(wide_a))
        b = self.scores.new_zeros(len(cells.number), len(wide_b))
        for _ in range(_MOST_STEPS):
            da, db, *_ = self._newton(a, b, wide_a, wide_b)
            longest = self._longest(da[cells.owner] + db)
            # A longer step could pass the place where a logistic loss bends, and Newton's method would run away.
            short = (_LONGEST / longest.clamp_min(_LONGEST))[:, None]
            a, b = a + short * da, b + short[cells.owner] * db
            if not bool((longest > _ENOUGH).any()):
                break
        *_, variance_a, variance_b = self._newton(a, b, wide_a, wide_b)
        c = self.along.constants
        both = ((a, variance_a), (b, variance_b))
        parts = [(m[:, some], v[:, some]) for m, v in both for some in (slice(c), slice(c, None))]
        moments = [torch.stack([m.square().sum(), v.sum(), m.new_full((), m.numel())]) for m, v in parts]
        every = self.scores.new_zeros(cells.clients * cells.domains, len(wide_b))
        cell = every.index_copy(0, cells.number, b).view(cells.clients, cells.domains, -1)
        return Corrections(a, cell, self._moved(a[cells.owner] + b), torch.stack(moments))

    def _moved(self, corrections: Tensor) -> Tensor:
        """Return by how much corrections [H, r] of cells change the scores, [n, outputs]."""
        return torch.einsum("nor,nr->no", self.design, corrections[self.cells.place])

    def _longest(self, corrections: Tensor) -> Tensor:
        """Return by how much corrections [H, r] of cells change a score of each client at most, [clients]."""
        moved = self._moved(corrections).abs().amax(1)
        owner = self.cells.owner[self.cells.place]
        return moved.new_zeros(self.cells.clients).scatter_reduce(0, owner, moved, "amax")

    def _derivatives(self, total: Tensor) -> tuple[Tensor, Tensor]:
        """Return slope [H, r] and negative curvature [H, r, r] of the log-likelihood in the corrections [H, r]."""
        scores, cells = self.scores + self._moved(total), self.cells
        residual = weighted(self.objective.residual(scores, self.y), self.weight)
        units = torch.eye(scores.shape[1], dtype=torch.float64, device=scores.device)
        bent = torch.stack([self.objective.bend("hessian", scores, unit.expand_as(scores)) for unit in units], 1)
        if self.weight is not None:
            bent = bent * by_output(self.weight)[:, None]
        curved = torch.einsum("nop,npr->nor", bent, self.design)
        pairs = zip(cells.split(self.design), cells.split(curved), strict=True)
        bend = [x.flatten(0, 1).T @ w.flatten(0, 1) for x, w in pairs]
        down = torch.einsum("nor,no->nr", self.design, residual)
        slope = -torch.zeros_like(total).index_add(0, cells.place, down)
        unit = self.unit[cells.owner]
        r = self.design.shape[2]
        curvature = torch.stack(bend) if bend else scores.new_zeros(0, r, r)
        return slope / unit[:, None], curvature / unit[:, None, None]

    def _newton(self, a: Tensor, b: Tensor, wide_a: Tensor, wide_b: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the Newton steps of a [C, r] and b [H, r], and their posterior variances; prior variances may be 0."""
        cells = self.cells
        slope, bend = self._derivatives(a[cells.owner] + b)
        spread = covariance_of(bend, wide_b)
        # The prior pulls b back by b / variance; where the variance is 0, b is 0 and stays there.
        least = torch.finfo(torch.float64).tiny
        pull_a, pull_b = a / wide_a.clamp_min(least), b / wide_b.clamp_min(least)
        alone = (spread @ (slope - pull_b)[..., None])[..., 0]
        followed = bend @ spread
        # What is left of slope and curvature in a, once each domain's b has followed.
        down = cells.total(slope - (bend @ alone[..., None])[..., 0]) - pull_a
        spread_a = covariance_of(cells.total(bend - followed @ bend), wide_a)
        da = (spread_a @ down[..., None])[..., 0]
        db = alone - (followed.mT @ da[cells.owner][..., None])[..., 0]
        spread_b = spread + followed.mT @ spread_a[cells.owner] @ followed
        return da, db, spread_a.diagonal(dim1=1, dim2=2), spread_b.diagonal(dim1=1, dim2=2)


def next_spreads(before: Tensor, moments: Tensor) -> Tensor:
    """Return the four spreads after one step, from the sums [4, 3] over all clients."""
    rows = zip(before.tolist(), moments.tolist(), strict=True)
    return torch.tensor([next_spread(spread, *row) for spread, row in rows], dtype=torch.float64)


def with_offsets(parameters: Parameters, own: OwnState) -> Parameters:
    """Return the parameters with a client's corrections added to the heads."""
    if OFFSETS not in own.extra:
        return parameters
    heads: Tensors = dict(parameters.heads)
    by_domain = keys("domain", len(own.extra[OFFSETS]))
    names = by_domain if by_domain[0] in heads else [ALL]
    for name, correction in zip(names, own.extra[OFFSETS], strict=True):
        heads[name] = heads[name] + like(correction, heads[name])
    return replace(parameters, heads=heads)
