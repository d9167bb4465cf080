"""Algorithm 2 of the paper: FedDAR for linear regression, in closed form (NumPy, float64).

The model is y = w_m' B' x: a shared representation B [d, k] with orthonormal columns, and a head w_m [k] for
each domain m. One round is two exchanges:

1. heads: every w_m solves (sum_i A_im) w_m = sum_i a_im exactly, where A_im = B'X'XB and a_im = B'X'y over
   the samples that client i holds of domain m;
2. representation: one gradient step of size eta on B with these heads, then QR.

A client contributes only its second moments X'X and X'y and its count, which can be added. They are summed over
clients once, so a round costs the same however many clients and samples there are. The key of the sums decides
the method: summed by domain it is FedDAR, by client FedRep, with a single key for all samples FedAvg.

How we read the paper's misprints, and the conventions used here:

- The objective is f = 1/2 sum_j (y_j - w'B'x_j)^2; its gradient in B is (X'XBw - X'y) w', without a factor 2.
- The step's `1/m sum_m 1/L_m` is the mean over the M domains of each domain's mean gradient. A domain without
  samples has no gradient; the mean runs over the domains that have some.
- The sum in Z_i runs over samples j, so the start is the top-k eigenvectors of the mean of y^2 x x'.
- A singular system (fewer samples than k) takes its minimum-norm solution; a key without samples gets zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

import numpy as np

from feddar.data.moments import Floats, Ints, Moments, orthonormal
from feddar.errors import UserError

# Eigenvalues of a Gram matrix below this share of the largest are rounding errors and count as 0.
_RANK_TOLERANCE = 1e-10


class Fit(NamedTuple):
    """A fitted model: the representation B [d, k] and one head per key, W [K, k]."""

    B: Floats
    W: Floats

    def coefficients(self) -> Floats:
        """Return the model as one coefficient vector per key, [K, d]."""
        return self.W @ self.B.T


Draw = Callable[[int], Moments]
"""Returns the moments of new samples; it is called with 0, 1, 2, ..."""
HeadRule = Callable[[Floats, Moments], Floats]
"""Returns the heads W [K, k] for a representation B [d, k] and moments."""


def random_start(d: int, k: int, rng: np.random.Generator) -> Floats:
    """Return an orthonormal basis [d, k] of a uniformly random subspace."""
    if not 1 <= k <= d:
        raise UserError(f"The representation needs 1 <= k <= d, not k={k} and d={d}.")
    return orthonormal(rng.standard_normal((d, k)))


def moment_start(x: Floats, y: Floats, k: int) -> Floats:
    """Return Algorithm 2's start: the top-k eigenvectors of the mean of y^2 x x'."""
    if not 1 <= k <= x.shape[1]:
        raise UserError(f"The representation needs 1 <= k <= d, not k={k} and d={x.shape[1]}.")
    weighted = x * y[:, None]
    _, vectors = np.linalg.eigh(weighted.T @ weighted / len(x))
    return np.asarray(vectors[:, -k:])


def distance(A: Floats, B: Floats) -> float:
    """Return the principal angle distance ||A_perp' B||_2 between the column spaces of A and B.

    It is computed as ||B - A A'B||_2. The textbook sqrt(1 - s^2), with s the smallest singular value of A'B, cannot
    resolve distances below 1e-8.
    """
    A, B = orthonormal(A), orthonormal(B)
    return float(np.linalg.norm(B - A @ (A.T @ B), 2))


def solve_heads(B: Floats, moments: Moments) -> Floats:
    """Return the heads W [K, k] that minimise each key's squared error for given B (the minimum-norm solution)."""
    gram = B.T @ moments.xx @ B
    values, vectors = np.linalg.eigh(gram)
    kept = values > _RANK_TOLERANCE * values[:, -1:]
    inverse = kept / np.where(kept, values, 1.0)
    rotated = vectors.mT @ (moments.xy @ B)[:, :, None]
    return np.asarray((vectors @ (inverse[:, :, None] * rotated))[:, :, 0])


def average_heads(parts: Moments, domain: Ints, domains: int) -> HeadRule:
    """Return FedDAR-WA's rule: a head is solved for each part (a client's samples of one domain), then averaged.

    Part p belongs to domain[p] and has the weight L_im / L_m. A part with fewer than k samples does not determine its
    head, and averaging does not repair that. Second-order aggregation does; its exact form is `solve_heads`.
    """
    weight = np.zeros((domains, len(domain)))
    weight[domain, np.arange(len(domain))] = parts.count
    weight /= np.maximum(weight.sum(axis=1, keepdims=True), 1)
    return lambda B, _: weight @ solve_heads(B, parts)


def gradient(B: Floats, W: Floats, moments: Moments) -> Floats:
    """Return the gradient in B of the mean, over keys with samples, of the mean of 1/2 (y - w'B'x)^2."""
    # For a key without samples the moments are 0, and so is the slope.
    slope = np.einsum("mij,mj->mi", moments.xx, W @ B.T) - moments.xy
    slope /= np.maximum(moments.count, 1)[:, None]
    return np.asarray(slope.T @ W / max(np.count_nonzero(moments.count), 1))


def step(B: Floats, W: Floats, moments: Moments, eta: float) -> Floats:
    """Take one gradient step of size eta on B, and make its columns orthonormal again."""
    return orthonormal(B - eta * gradient(B, W, moments))


def representations(
    moments: Moments | Draw, start: Floats, eta: float, heads: HeadRule = solve_heads
) -> Iterator[Floats]:
    """Yield B_0, B_1, B_2, ... of Algorithm 2, without end.

    `moments` are the same samples in every round, or a function that draws new ones: as in the algorithm it
    is called twice a round, for the heads and for the step, with 0, 1, 2, ...
    """
    if not (np.isfinite(eta) and eta > 0):
        raise UserError(f"The step size eta must be positive, not {eta}.")
    draw = moments if callable(moments) else lambda _: moments
    B, call = start, 0
    while True:
        yield B
        W = heads(B, draw(call))
        B = step(B, W, draw(call + 1), eta)
        call += 2


def fit(moments: Moments, start: Floats, rounds: int, eta: float, heads: HeadRule = solve_heads) -> Fit:
    """Run `rounds` rounds on the same samples from `start`, and return B and the heads solved for it."""
    if rounds < 0:
        raise UserError(f"The number of rounds cannot be negative, not {rounds}.")
    B = next(islice(representations(moments, start, eta, heads), rounds, None))
    return Fit(B, heads(B, moments))


def least_squares(moments: Moments, ridge: float = 0.0) -> Floats:
    """Return each key's own coefficients [K, d], without a shared representation (Local, if keyed by client).

    They minimise the sum of squared errors plus `ridge` times their squared norm; for `ridge` 0 it is the minimum-norm
    solution.
    """
    if not (np.isfinite(ridge) and ridge >= 0):
        raise UserError(f"The ridge penalty cannot be negative, not {ridge}.")
    identity = np.eye(moments.xx.shape[-1])
    return solve_heads(identity, replace(moments, xx=moments.xx + ridge * identity))
