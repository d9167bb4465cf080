"""Spreads: by how much heads of domains, and of clients, differ, and the directions in which they are measured.

A head of a domain or client is a common head plus a difference. Differences are taken to be normal, with one standard
deviation (spread) for constant terms and one for slopes; small spreads draw heads together. Spreads follow from the
evidence in the samples: each step makes them those at which the likelihood of all labels, with differences integrated
out, has its maximum, if the quadratic around the most probable differences is taken for the likelihood (MacKay, 1992).

The formulas are in docs/method.md, section Partial pooling.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST_POOLED = 128
"""Heads with so many numbers are pooled number by number; larger ones as a whole (``algorithm.credibility``)."""
SMALLEST = 1e-4
"""Spreads are kept above this: from 0 no evidence leads back."""
NO_CURVATURE = 1e-6
"""Directions with less than this share of the largest curvature are flat: nothing can be learned along them."""
_CONSTANT, _SLOPES = 0.3, 0.05  # in units of the scores, before there is any evidence
FIRST_OF_CLIENTS = torch.tensor([_CONSTANT, _SLOPES, _CONSTANT, _SLOPES], dtype=torch.float64)
"""The first spreads: of clients' constant terms and slopes, and of clients x domains' constant terms and slopes."""


def first_of_domains(factors: int) -> Tensor:
    """Return the first spreads: of domains' constant terms, of their slopes, of the common head around the mean, and
    of the constant terms and slopes of each factor's parts, [3 + 2 factors].
    """
    return torch.tensor([_CONSTANT, _SLOPES, _SLOPES, *[_CONSTANT, _SLOPES] * factors], dtype=torch.float64)


@dataclass(frozen=True)
class Directions:
    """Directions of a head, in which differences are independent and have the same spread: constants, then slopes.

    Along a slope the scores of a sample vary by 1 on average (weighted by curvature), and their mean does not change.
    """

    matrix: Tensor
    """Each column is a direction, [outputs x width, r]."""
    constants: int
    """How many of the columns move constant terms alone."""

    @classmethod
    def of(cls, matrix: Tensor, outputs: int) -> Directions:
        """Return directions from their matrix alone, as it is sent."""
        found = cls(matrix, 0)
        return cls(matrix, int((found.by_output(outputs)[:, :-1] == 0).all(1).all(0).sum()))

    def by_output(self, outputs: int) -> Tensor:
        """Return the directions by output, [outputs, width, r]; there are none if all curvature is 0."""
        size, count = self.matrix.shape
        return self.matrix.view(outputs, size // outputs, count)

    def variances(self, constant: float, slopes: float) -> Tensor:
        """Return the variance of differences along each direction, [r], for spreads of constants and slopes."""
        variances = self.matrix.new_full((self.matrix.shape[1],), slopes**2)
        variances[: self.constants] = constant**2
        return variances

    def coordinates(self, heads: Tensor) -> Tensor:
        """Return the coordinates [..., r] of heads [..., outputs x width]; what is flat is left out."""
        found: Tensor = heads @ torch.linalg.pinv(self.matrix).T
        return found


def directions(curvature: Tensor, outputs: int, constant: bool) -> Directions:
    """Return the directions for heads with this curvature, summed over all samples, [outputs x width, same].

    If ``constant``, the last number of each output's head is its constant term.
    """
    size = len(curvature)
    last = torch.zeros(outputs, size // outputs, dtype=torch.bool)
    last[:, -1] = constant
    last = last.flatten()
    levels, shared = curvature[last][:, last], curvature[last][:, ~last]
    unit = levels.diagonal().mean() if constant else curvature.diagonal().mean()
    vectors, values = _spanned(levels)
    # A slope changes the constant terms so that the mean of the scores stays where it is.
    follows = -(vectors / values) @ (vectors.T @ shared)
    across, along = _spanned(curvature[~last][:, ~last] + shared.T @ follows)
    slopes = across * (unit / along).sqrt()
    matrix = torch.zeros(size, vectors.shape[1] + slopes.shape[1], dtype=torch.float64)
    matrix[last, : vectors.shape[1]] = vectors
    matrix[~last, vectors.shape[1] :] = slopes
    matrix[last, vectors.shape[1] :] = follows @ slopes
    return Directions(matrix, vectors.shape[1])


def constants_only(outputs: int, width: int) -> Directions:
    """Return directions that move the constant terms of heads alone, for heads too large for slopes."""
    matrix = torch.zeros(outputs, width, outputs, dtype=torch.float64)
    matrix[:, -1] = torch.eye(outputs, dtype=torch.float64)
    return Directions(matrix.flatten(0, 1), outputs)


def directions_sent(matrix: Tensor | None, outputs: int, width: int) -> Directions:
    """Return the directions in which a request has heads corrected: those it sends, or constant terms only."""
    return constants_only(outputs, width) if matrix is None else Directions.of(matrix, outputs)


def _spanned(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eigenvectors of a symmetric matrix, as columns, and its eigenvalues, without those that are 0."""
    if not len(matrix):
        return matrix, matrix.diagonal()
    values, vectors = torch.linalg.eigh(matrix)
    curved = values > NO_CURVATURE * values[-1].clamp_min(torch.finfo(torch.float64).tiny)
    return vectors[:, curved], values[curved]


def covariance_of(H: Tensor, variances: Tensor) -> Tensor:
    """Return (H + 1 / variance)^-1 for matrices H [..., r, r], written so that a variance may be 0."""
    deviation = variances.sqrt()
    one = torch.eye(len(variances), dtype=H.dtype, device=H.device)
    found: Tensor = deviation[:, None] * torch.linalg.inv(one + deviation[:, None] * H * deviation) * deviation
    return found


def next_spread(before: float, squares: float, variance: float, count: float) -> float:
    """Return the spread after one step of MacKay's rule: sum of squares over the number of differences that are known.

    ``squares`` is the sum over the most probable differences, ``variance`` that of their posterior variances.
    """
    known = count - variance / before**2
    return max((squares / max(known, 1e-9)) ** 0.5, SMALLEST) if count else before
