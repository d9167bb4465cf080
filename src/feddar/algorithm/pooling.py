"""Partial pooling: heads of domains in use are the most probable ones, given that domains resemble each other.

The head of domain m is w + d_m, with d_m normal around 0 (``algorithm.spreads``). The likelihood of a domain's labels
is taken to be quadratic around the head that was trained, by its gradient and curvature there: sums over samples, which
clients send once a round. So the server solves for all heads at once, a second-order step of all samples, in which a
domain with few samples, or one that does not differ, takes the others' head (docs/method.md, section Partial pooling).

Domains that are crossings, or belong to something, have more in common than w: the head of domain m is
w + sum_f Z_fm e_f + d_m, where Z_f is how domains share the parts of factor f (``DomainStructure.shared``) and e_f is
normal around 0 with spreads of its own. So the covariance over domains is s^2 I + sum_f s_f^2 Z_f Z_f', without a
matrix of that size.

Samples that an encoder was trained on ask for more than is good for others. So validation says whether heads are drawn
to their mean, where they are further from it than is probable, and which part of the step is taken; without validation
heads stay as they were trained.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from feddar.algorithm.protocol import Reply
from feddar.algorithm.spreads import Directions, covariance_of, directions, first_of_domains, next_spread
from feddar.models.heads import curvature_at, full_matrix, triangle, weighted
from feddar.models.parameters import Tensors
from feddar.objectives import Objective
from feddar.objectives.objective import Curvature

SLOPE, CURVATURE, ERRORS = "pooled_slope", "pooled_curvature", "pooled_errors"
AS_TRAINED = -1.0
"""In place of a part of the step: heads stay as they were trained."""
STEPS = 10
"""Steps of the spreads in a round; they go on from those of the round before."""


def head_sums(
    objective: Objective,
    features: Tensor,
    scores: Tensor,
    y: Tensor,
    domain: Tensor,
    weight: Tensor | None = None,
    kind: Curvature = "hessian",
) -> Tensors:
    """Return gradient and curvature in the head of each domain, summed over its samples, and squares of errors."""
    residuals, sums = objective.residual(scores, y), dict[str, Tensor]()
    for m in domain.unique().tolist():
        mine = domain == m
        own, x = None if weight is None else weight[mine], features[mine]
        sums[f"{SLOPE}/{m}"] = (weighted(residuals[mine], own).T @ x).flatten()
        sums[f"{CURVATURE}/{m}"] = triangle(curvature_at(objective, kind, scores[mine], x, own)[0])
    squares = weighted(residuals.square(), weight).sum()
    return sums | {ERRORS: torch.stack([squares, residuals.new_full((), residuals.numel())])}


@dataclass(frozen=True)
class PooledHeads:
    """Heads for use, and what the evidence says of them."""

    drawn: Tensors
    """The heads as trained, drawn to their mean where they are too far from it."""
    stepped: Tensors
    """The heads after the whole second-order step."""
    directions: Directions
    spreads: Tensor
    """By how much domains differ in constant terms and in slopes, the common head from the mean, and the parts of each
    factor in constant terms and in slopes, [3 + 2 factors]."""
    difference: float
    """The share of the slopes' squares that is not common to all (0: one population; 1: nothing is common)."""

    def part(self, share: float) -> Tensors:
        """Return the heads after this part (0 to 1) of the step; none, so those as trained, for ``AS_TRAINED``."""
        if share == AS_TRAINED:
            return {}
        return {key: head.lerp(self.stepped[key], share) for key, head in self.drawn.items()}


class Pooling:
    """Adds up the sums of clients, and solves for the heads of domains."""

    def __init__(self, objective: Objective, constant: bool, shared: Sequence[Tensor] = ()) -> None:
        """``shared`` is how domains share the parts of each factor, [M, parts]."""
        self.objective, self.constant, self.shared = objective, constant, tuple(shared)
        self.sums: Tensors = {}

    def add(self, reply: Reply) -> None:
        """Add the sums of one client or of several."""
        for name, value in reply.sums.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value

    @property
    def keys(self) -> list[str]:
        """The domains whose sums were added."""
        # Sorted, since the order of additions decides the last bits, and tensors come in any order.
        return sorted((name.split("/")[1] for name in self.sums if name.startswith(f"{SLOPE}/")), key=int)

    def _stacked(self, name: str, keys: Sequence[str], known: str) -> Tensor:
        """Return the sums of all these domains, which are 0 for those without any."""
        nothing = torch.zeros_like(self.sums[f"{name}/{known}"])
        return torch.stack([self.sums.get(f"{name}/{key}", nothing) for key in keys])

    def pooled(self, heads: Mapping[str, Tensor], before: Tensor | None) -> PooledHeads | None:
        """Return the most probable heads of all domains whose sums were added; None if there are none.

        With factors they are those of all domains: one without samples has what it shares with others. ``heads`` are
        those at which the sums were taken, ``before`` the spreads of the round before, None in the first.
        """
        known = self.keys
        if not known:
            return None
        keys = [str(m) for m in range(len(self.shared[0]))] if self.shared else known
        squares, count = self.sums[ERRORS].tolist()
        # A squared error is a log-likelihood in units of the errors' variance.
        unit = max(squares / count, 1e-12) if self.objective.in_units else 1.0
        slope, packed = (self._stacked(name, keys, known[0]) for name in (SLOPE, CURVATURE))
        curvature = torch.stack([full_matrix(each) for each in packed]) / unit
        trained = torch.stack([heads[key].double().flatten() for key in keys])
        along = directions(curvature.sum(0), self.objective.outputs, self.constant)
        problem = _Problem(along, trained, slope / unit, curvature, self.shared)
        spreads = problem.spreads(first_of_domains(len(self.shared)) if before is None else before)
        parts = problem.solved(spreads)
        drawn, stepped = (
            {key: row.view_as(heads[key]).to(heads[key].dtype) for key, row in zip(keys, found, strict=True)}
            for found in (problem.drawn(parts.cells - parts.common), problem.heads(parts.cells))
        )
        return PooledHeads(drawn, stepped, along, spreads, problem.difference(spreads, parts.common))


@dataclass(frozen=True)
class Parts:
    """The most probable parts of heads along the directions, and their posterior variances."""

    shared: Tensor
    """The common part, and then the parts of each factor, [parts, r]."""
    own: Tensor
    """The domains' own parts, [M, r]."""
    certain: Tensor
    """The posterior variances of shared parts, [parts, r]."""
    posterior: Tensor
    """The posterior variances of own parts, [M, r]."""
    cells: Tensor
    """The heads, [M, r]: sums of their parts."""

    @property
    def common(self) -> Tensor:
        """The part that all heads have, [r]."""
        return self.shared[0]


class _Problem:
    """The heads of all domains as unknowns along the directions, and their likelihood as a quadratic."""

    def __init__(
        self, along: Directions, trained: Tensor, slope: Tensor, curvature: Tensor, shared: Sequence[Tensor]
    ) -> None:
        self.along, self.trained, self.factors = along, trained, shared
        self.design = torch.cat([trained.new_ones(len(trained), 1), *shared], 1)
        """How much of each shared part a domain's head has, [M, parts]; of the common one all have all."""
        self.H = along.matrix.T @ curvature @ along.matrix
        self.at = along.coordinates(trained)
        self.linear = (self.H @ self.at[..., None])[..., 0] - slope @ along.matrix
        weight = self.H.diagonal(dim1=1, dim2=2).sum(1)
        self.mean = (weight[:, None] * self.at).sum(0) / weight.sum()
        """The mean of the heads as trained, by what is known of them."""

    def spreads(self, start: Tensor) -> Tensor:
        """Return the spreads after some steps; evidence is that of the whole likelihood, whatever heads follow it."""
        spreads = start
        for _ in range(STEPS):
            found = self.solved(spreads)
            sizes = [1, *(shared.shape[1] for shared in self.factors)]
            (moved, *factors), (certain, *variances) = found.shared.split(sizes), found.certain.split(sizes)
            rows = [*self._by_kind(found.own, found.posterior), (moved - self.mean, certain)]
            for factor, variance in zip(factors, variances, strict=True):
                rows += self._by_kind(factor, variance)
            steps = zip(spreads.tolist(), rows, strict=True)
            after = [next_spread(s, float(d.square().sum()), float(v.sum()), d.numel()) for s, (d, v) in steps]
            spreads = torch.tensor(after, dtype=torch.float64)
        return spreads

    def _by_kind(self, parts: Tensor, variances: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return parts [n, r] and their variances for constant terms, and for slopes."""
        c = self.along.constants
        return [(parts[:, :c], variances[:, :c]), (parts[:, c:], variances[:, c:])]

    def difference(self, spreads: Tensor, common: Tensor) -> float:
        """Return the squares of slopes that are expected of what is not common, over those and the common part's."""
        slopes = common[self.along.constants :].square()
        of_factors = zip(spreads[4::2].tolist(), self.factors, strict=True)
        square = float(spreads[1]) ** 2 + sum(s**2 * float(each.square().sum(1).mean()) for s, each in of_factors)
        own = square * len(slopes)
        return own / (own + float(slopes.sum())) if len(slopes) else 0.0

    def drawn(self, own: Tensor) -> Tensor:
        """Return the heads as trained [M, size], drawn to their mean where they are further from it than is probable.

        Training that stops early leaves a head on its way: where what is not common is larger, it stays as it is.
        """
        away = self.at - self.mean
        probable = torch.where(own * away > 0, own.abs(), 0)
        return self.heads(self.mean + away.sign() * away.abs().minimum(probable))

    def heads(self, coordinates: Tensor) -> Tensor:
        """Return the heads [M, size] with these coordinates; along flat directions they are as trained."""
        return self.trained + (coordinates - self.at) @ self.along.matrix.T

    def solved(self, spreads: Tensor) -> Parts:
        """Return the most probable parts of all heads for these spreads."""
        constant, slopes, step, *rest = spreads.tolist()
        means = torch.cat([self.mean[None], self.mean.new_zeros(self.design.shape[1] - 1, len(self.mean))])
        factors = zip(rest[::2], rest[1::2], self.factors, strict=True)
        of_factors = [self.along.variances(*pair).expand(shared.shape[1], -1) for *pair, shared in factors]
        wide = torch.cat([torch.full_like(means[:1], step**2), *of_factors])
        return most_probable(self.H, self.linear, self.along.variances(constant, slopes), self.design, means, wide)


def most_probable(H: Tensor, linear: Tensor, own: Tensor, design: Tensor, means: Tensor, variances: Tensor) -> Parts:
    """Return the most probable shared and own parts of heads, and their posterior variances.

    The log-likelihood of domain m at u is linear_m u - u H_m u / 2. Its head u is the shared parts times its row of the
    ``design`` [M, parts], and a part of its own, with these prior variances [r] around 0; shared parts have
    ``variances`` [parts, r] around ``means``.
    """
    covariance = covariance_of(H, own)  # of own parts, given the shared ones
    gain = H @ covariance
    # What is left of slope and curvature in shared parts, once each domain's own part has followed.
    bent = H - gain @ H
    down = linear - (gain @ linear[..., None])[..., 0]
    columns, (parts, r) = design.unbind(1), means.shape
    rows = [torch.cat([((a * b)[:, None, None] * bent).sum(0) for b in columns], 1) for a in columns]
    certain = torch.linalg.inv(torch.cat(rows) + torch.diag(1 / variances.flatten()))
    right = torch.stack([(a[:, None] * down).sum(0) for a in columns]) + means / variances
    shared = (certain @ right.flatten()).view(parts, r)
    followed = sum(a[:, None] * (H @ part) for a, part in zip(columns, shared, strict=True))
    found = (covariance @ (linear - followed)[..., None])[..., 0]
    # The covariance of what each domain shares with others, [M, r, r].
    among = torch.einsum("mp,piqj,mq->mij", design, certain.view(parts, r, parts, r), design)
    posterior = covariance + gain.mT @ among @ gain
    diagonals = certain.diagonal().view(parts, r), posterior.diagonal(dim1=1, dim2=2)
    return Parts(shared, found, *diagonals, design @ shared + found)


def total_of(replies: Iterable[Reply], objective: Objective, constant: bool, shared: Sequence[Tensor] = ()) -> Pooling:
    """Return the pooling of all replies; ``shared`` as for ``Pooling``."""
    pooling = Pooling(objective, constant, shared)
    for reply in replies:
        pooling.add(reply)
    return pooling
