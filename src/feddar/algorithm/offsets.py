"""Private offsets: what a client adds to the scores of its samples, fitted on its own samples and never sent.

Habits differ from site to site: of two equal patients one site admits more. An offset of client i in domain m is
o_im = a_i + b_im, with a_i ~ N(0, s_a^2) and b_im ~ N(0, s_b^2), one for each output. For given spreads (s_a, s_b) a
client finds the most probable offsets by Newton steps. The spreads are the pair of a grid with the largest marginal
likelihood of all labels: each client sends, for every pair, the logarithm of its own marginal likelihood by Laplace's
method, and the server adds them up. Where sites do not differ the likeliest spread is 0, and so are all offsets.

The formulas are in docs/method.md, section Offsets.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from feddar.algorithm.protocol import OwnState
from feddar.models.parameters import Parameters
from feddar.objectives import Objective

OFFSETS, LIKELIHOOD = "offsets", "likelihood"
"""The name of offsets [M, outputs] among a client's own tensors, and of the grid of likelihoods in its reply."""
SPREADS = (0.0, 0.1, 0.3, 1.0, 3.0)
"""Standard deviations that are tried, for clients and for clients x domains, in units of the scores."""
# Newton steps square the error: after one of 1e-4 it is about 1e-8.
_MOST_STEPS, _ENOUGH, _LONGEST = 50, 1e-4, 2.0
_AT_ONCE = 2**17
"""So many samples times pairs of spreads are computed at once."""


@dataclass(frozen=True)
class Offsets:
    """The most probable offsets of a client for each of G pairs of spreads, and how likely each makes its labels."""

    client: Tensor
    """a, [G, outputs]."""
    cell: Tensor
    """b of each domain, [G, M, outputs]; 0 for domains without samples."""
    log_likelihood: Tensor
    """The logarithm of the marginal likelihood of the labels, up to a constant, [G]."""

    @property
    def total(self) -> Tensor:
        """a + b of each domain, [G, M, outputs]."""
        return self.client[:, None] + self.cell


class ScoredSamples:
    """A client's samples as far as offsets need them: scores without offsets, labels and domains."""

    def __init__(self, objective: Objective, scores: Tensor, y: Tensor, domain: Tensor, domains: int) -> None:
        self.objective, self.scores, self.y = objective, scores.double(), y
        self.domain, self.domains = domain, domains
        # A squared error is a log-likelihood in units of the errors' variance; that before offsets is the careful one.
        errors = objective.residual(self.scores, y).square().mean()
        self.unit = float(errors.clamp_min(1e-12)) if objective.in_units and len(y) else 1.0

    def fitted(self, spreads: Tensor) -> Offsets:
        """Return the most probable offsets for each pair of spreads (of clients, of clients x domains), [G, 2]."""
        outputs = self.scores.shape[1]
        variance_a, variance_b = spreads.double().square()[:, :, None].unbind(1)
        a = torch.zeros(len(spreads), outputs, dtype=torch.float64)
        b = torch.zeros(len(spreads), self.domains, outputs, dtype=torch.float64)
        for _ in range(_MOST_STEPS):
            da, db = self._step(a, b, variance_a, variance_b)
            a, b = a + da.clamp(-_LONGEST, _LONGEST), b + db.clamp(-_LONGEST, _LONGEST)
            if max(da.abs().max(), db.abs().max()) < _ENOUGH:
                break
        return Offsets(a, b, self._log_likelihood(a, b, variance_a, variance_b))

    def _step(self, a: Tensor, b: Tensor, variance_a: Tensor, variance_b: Tensor) -> tuple[Tensor, Tensor]:
        """Return the Newton step of a and b; equations are multiplied by the variances, which may be 0."""
        _, slope, bend = self._derivatives(a, b)
        one = torch.eye(a.shape[1], dtype=torch.float64)
        wide = variance_b[:, None]
        down_b, cells = wide * slope - b, one + wide[..., None] * bend
        # What is left of the slope and the curvature in a, once each domain's b has followed.
        followed = torch.linalg.solve(cells, torch.cat([down_b[..., None], bend], 3))
        down = (slope - (bend @ followed[..., :1])[..., 0]).sum(1)
        shared = (bend - wide[..., None] * bend @ followed[..., 1:]).sum(1)
        da = torch.linalg.solve(one + variance_a[..., None] * shared, variance_a * down - a)
        pulled = (bend @ da[:, None, :, None])[..., 0]
        return da, torch.linalg.solve(cells, down_b - wide * pulled)

    def _derivatives(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the log-likelihood [G], and its slope [G, M, outputs] and negative curvature in the offsets."""
        pairs, domains, outputs = b.shape
        sums = torch.zeros(pairs * domains, 1 + outputs + outputs**2, dtype=torch.float64)
        units = torch.eye(outputs, dtype=torch.float64)
        for rows in torch.arange(len(self.domain)).split(max(1, _AT_ONCE // pairs)):
            domain = self.domain[rows]
            offsets = (a[:, None] + b)[:, domain]
            scores = (self.scores[rows] + offsets).flatten(0, 1)
            y = self.y[rows].expand(pairs, *self.y[rows].shape).flatten(0, 1)
            loss, residual = self.objective.loss(scores, y), self.objective.residual(scores, y)
            bends = [self.objective.bend("hessian", scores, unit.expand_as(scores)) for unit in units]
            cell = (torch.arange(pairs)[:, None] * domains + domain).flatten()
            sums.index_add_(0, cell, torch.cat([-loss[:, None], -residual, *bends], 1))
        likelihood, slope, bend = (sums / self.unit).view(pairs, domains, -1).split([1, outputs, outputs**2], 2)
        return likelihood.sum((1, 2)), slope, bend.reshape(pairs, domains, outputs, outputs)

    def _log_likelihood(self, a: Tensor, b: Tensor, variance_a: Tensor, variance_b: Tensor) -> Tensor:
        """Return the log-likelihood at the mode, the prior's there, and the volume around it (Laplace's method)."""
        found, _, bend = self._derivatives(a, b)
        one = torch.eye(a.shape[1], dtype=torch.float64)
        cells = one + variance_b[:, None, :, None] * bend
        shared = torch.linalg.solve(cells, bend).sum(1)
        volume = torch.logdet(cells).sum(1) + torch.logdet(one + variance_a[..., None] * shared)
        least = torch.finfo(torch.float64).tiny  # 0 / 0 is 0 here: an offset without spread is 0
        prior = (a.square() / variance_a.clamp_min(least)).sum(1)
        prior += (b.square() / variance_b[:, None].clamp_min(least)).sum((1, 2))
        return found - 0.5 * (prior + volume)


def every_pair() -> Tensor:
    """Return all pairs of ``SPREADS``, [G, 2]."""
    return torch.cartesian_prod(*[torch.tensor(SPREADS, dtype=torch.float64)] * 2)


def likeliest(total: Tensor) -> Tensor:
    """Return the pair of spreads [2] with the largest log-likelihood [G] over all clients; of equal ones the first."""
    return every_pair()[int(total.nan_to_num(-float("inf")).argmax())]


def with_offsets(parameters: Parameters, own: OwnState) -> Parameters:
    """Return the parameters with a client's offsets added to the constant terms of the domains' heads."""
    if OFFSETS not in own.extra:
        return parameters
    heads = dict(parameters.heads)
    for domain, offset in enumerate(own.extra[OFFSETS]):
        head = heads[str(domain)].clone()
        head[:, -1] += offset.to(head.dtype)
        heads[str(domain)] = head
    return replace(parameters, heads=heads)
