"""Partial pooling: heads of domains in use are the most probable ones, given that domains resemble each other.

The head of domain m is w + d_m, with d_m normal around 0 (``algorithm.spreads``). The likelihood of a domain's labels
is taken to be quadratic around the head that was trained, by its gradient and curvature there: sums over samples, which
clients send once a round. So the server solves for all heads at once, a second-order step of all samples, in which a
domain with few samples, or one that does not differ, takes the others' head (docs/method.md, section Partial pooling).

Samples that an encoder was trained on ask for more than is good for others. So validation says whether heads are drawn
to their mean, where they are further from it than is probable, and which part of the step is taken; without validation
heads stay as they were trained.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from feddar.algorithm.protocol import Reply
from feddar.algorithm.spreads import FIRST_OF_DOMAINS, Directions, covariance_of, directions, next_spread
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
    """By how much domains differ in constant terms and in slopes, and the common head from the mean, [3]."""
    difference: float
    """The share of the slopes' squares that is domains' own (0: domains are one population; 1: nothing is common)."""

    def part(self, share: float) -> Tensors:
        """Return the heads after this part (0 to 1) of the step; none, so those as trained, for ``AS_TRAINED``."""
        if share == AS_TRAINED:
            return {}
        return {key: head.lerp(self.stepped[key], share) for key, head in self.drawn.items()}


class Pooling:
    """Adds up the sums of clients, and solves for the heads of domains."""

    def __init__(self, objective: Objective, constant: bool) -> None:
        self.objective, self.constant = objective, constant
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

    def pooled(self, heads: Mapping[str, Tensor], before: Tensor | None) -> PooledHeads | None:
        """Return the most probable heads of all domains whose sums were added; None if there are none.

        ``heads`` are those at which the sums were taken, ``before`` the spreads of the round before, None in the first.
        """
        keys = self.keys
        if not keys:
            return None
        squares, count = self.sums[ERRORS].tolist()
        # A squared error is a log-likelihood in units of the errors' variance.
        unit = max(squares / count, 1e-12) if self.objective.in_units else 1.0
        slope = torch.stack([self.sums[f"{SLOPE}/{key}"] for key in keys]) / unit
        curvature = torch.stack([full_matrix(self.sums[f"{CURVATURE}/{key}"]) for key in keys]) / unit
        trained = torch.stack([heads[key].double().flatten() for key in keys])
        along = directions(curvature.sum(0), self.objective.outputs, self.constant)
        problem = _Problem(along, trained, slope, curvature)
        spreads = problem.spreads(FIRST_OF_DOMAINS if before is None else before)
        common, own, *_ = problem.solved(spreads)
        drawn, stepped = (
            {key: row.view_as(heads[key]).to(heads[key].dtype) for key, row in zip(keys, found, strict=True)}
            for found in (problem.drawn(own), problem.heads(common + own))
        )
        return PooledHeads(drawn, stepped, along, spreads, problem.difference(spreads, common))


class _Problem:
    """The heads of all domains as unknowns along the directions, and their likelihood as a quadratic."""

    def __init__(self, along: Directions, trained: Tensor, slope: Tensor, curvature: Tensor) -> None:
        self.along, self.trained = along, trained
        self.H = along.matrix.T @ curvature @ along.matrix
        self.at = along.coordinates(trained)
        self.linear = (self.H @ self.at[..., None])[..., 0] - slope @ along.matrix
        weight = self.H.diagonal(dim1=1, dim2=2).sum(1)
        self.mean = (weight[:, None] * self.at).sum(0) / weight.sum()
        """The mean of the heads as trained, by what is known of them."""

    def spreads(self, start: Tensor) -> Tensor:
        """Return the spreads after some steps; evidence is that of the whole likelihood, whatever heads follow it."""
        c, spreads = self.along.constants, start
        for _ in range(STEPS):
            common, own, certain, posterior = self.solved(spreads)
            moved = common - self.mean
            parts = ((own[:, :c], posterior[:, :c]), (own[:, c:], posterior[:, c:]), (moved, certain))
            rows = zip(spreads.tolist(), parts, strict=True)
            found = [next_spread(s, float(d.square().sum()), float(v.sum()), d.numel()) for s, (d, v) in rows]
            spreads = torch.tensor(found, dtype=torch.float64)
        return spreads

    def difference(self, spreads: Tensor, common: Tensor) -> float:
        """Return the squares of slopes that are expected of domains' own parts, over those and the common part's."""
        shared = common[self.along.constants :].square()
        own = float(spreads[1]) ** 2 * len(shared)
        return own / (own + float(shared.sum())) if len(shared) else 0.0

    def drawn(self, own: Tensor) -> Tensor:
        """Return the heads as trained [M, size], drawn to their mean where they are further from it than is probable.

        Training that stops early leaves a head on its way: where its domain's own part is larger, it stays as it is.
        """
        away = self.at - self.mean
        probable = torch.where(own * away > 0, own.abs(), 0)
        return self.heads(self.mean + away.sign() * away.abs().minimum(probable))

    def heads(self, coordinates: Tensor) -> Tensor:
        """Return the heads [M, size] with these coordinates; along flat directions they are as trained."""
        return self.trained + (coordinates - self.at) @ self.along.matrix.T

    def solved(self, spreads: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the common part, the domains' own parts and the posterior variances of both (``most_probable``)."""
        constant, slopes, step = spreads.tolist()
        return most_probable(self.H, self.linear, self.along.variances(constant, slopes), self.mean, step**2)


def most_probable(
    H: Tensor, linear: Tensor, variances: Tensor, mean: Tensor, variance: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the common part [r], the domains' own parts [M, r], and the posterior variances of both.

    The log-likelihood of domain m at u is linear_m u - u H_m u / 2; own parts have these prior variances [r] around 0,
    and the common part has ``variance`` around ``mean`` [r].
    """
    covariance = covariance_of(H, variances)  # of own parts, given the common one
    gain = H @ covariance
    one = torch.eye(len(variances), dtype=H.dtype)
    certain = torch.linalg.inv((H - gain @ H).sum(0) + one / variance)
    common = certain @ ((linear - (gain @ linear[..., None])[..., 0]).sum(0) + mean / variance)
    own = (covariance @ (linear - H @ common)[..., None])[..., 0]
    posterior = covariance + gain.mT @ certain @ gain
    return common, own, certain.diagonal(), posterior.diagonal(dim1=1, dim2=2)


def total_of(replies: Iterable[Reply], objective: Objective, constant: bool) -> Pooling:
    """Return the pooling of all replies."""
    pooling = Pooling(objective, constant)
    for reply in replies:
        pooling.add(reply)
    return pooling
