"""The paper's synthetic cohort: linear regression with one shared representation and a head per domain.

    z ~ shares_i,   x ~ N(0, I_d),   y = w_z' B' x + noise,   shares_i ~ Dirichlet(alpha p), p uniform

B [d, k] and W [M, k] are the Q of the QR factorisation of Gaussian matrices, as the paper's appendix says.
W is left at that scale: its columns are orthonormal, so the heads' mean squared norm is k/M = 0.4, and a model that
always predicts 0 has a mean squared error of 0.4. The theory's normalisation, 1/2 sqrt(k) <= ||w_m|| <= sqrt(k),
asks for heads about sqrt(M) times as long. That does not matter for the theorem: with eta in units of
1/sigma_max^2, neither the algorithm (without noise) nor the bound depends on the scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from feddar.data.moments import Floats, Ints, Moments, orthonormal
from feddar.errors import UserError


@dataclass(frozen=True)
class Truth:
    """The true model that generates samples: B [d, k], W [M, k] and the clients' domain shares [n, M]."""

    B: Floats
    W: Floats
    shares: Floats

    @property
    def coefficients(self) -> Floats:
        """The domains' coefficient vectors B w_m, [M, d]."""
        return self.W @ self.B.T

    @property
    def spectrum(self) -> Floats:
        """Singular values of W / sqrt(M), largest first: the theorem's sigma_max to sigma_min."""
        return np.asarray(np.linalg.svd(self.W / np.sqrt(len(self.W)), compute_uv=False))


class Samples(NamedTuple):
    """Samples as equally long arrays: x [N, d], y [N], domain [N] and client [N], counted from 0."""

    x: Floats
    y: Floats
    domain: Ints
    client: Ints


def make_truth(
    seed: int | np.random.Generator,
    *,
    d: int = 20,
    k: int = 2,
    domains: int = 5,
    clients: int = 100,
    alpha: float = 0.4,
) -> Truth:
    """Draw a true model. The smaller alpha is, the fewer domains each client has samples of."""
    if not 1 <= k <= min(d, domains):
        raise UserError(f"k must lie between 1 and both d={d} and the number of domains, {domains}; it is {k}.")
    if clients < 1:
        raise UserError(f"At least one client is needed, not {clients}.")
    if not (np.isfinite(alpha) and alpha > 0):
        raise UserError(f"alpha must be positive, not {alpha}.")
    rng = np.random.default_rng(seed)
    return Truth(
        B=orthonormal(rng.standard_normal((d, k))),
        W=orthonormal(rng.standard_normal((domains, k))),
        shares=rng.dirichlet(np.full(domains, alpha / domains), size=clients),
    )


def draw(truth: Truth, samples: int, seed: int | np.random.Generator, *, noise: float = 1e-3) -> Samples:
    """Draw `samples` samples for every client; `noise` is the standard deviation of y about its mean."""
    if samples < 1:
        raise UserError(f"Every client needs at least one sample, not {samples}.")
    if not noise >= 0:
        raise UserError(f"The noise's standard deviation cannot be negative, not {noise}.")
    rng = np.random.default_rng(seed)
    clients, domains = truth.shares.shape
    client = np.repeat(np.arange(clients), samples)
    steps = np.cumsum(truth.shares, axis=1)[client, : domains - 1]
    domain = (rng.random(len(client))[:, None] >= steps).sum(axis=1)
    x = rng.standard_normal((len(client), len(truth.B)))
    y = np.einsum("nd,nd->n", x, truth.coefficients[domain]) + noise * rng.standard_normal(len(client))
    return Samples(x, y, domain, client)


def draw_moments(truth: Truth, samples: int, rng: np.random.Generator) -> Moments:
    """Draw the moments by domain of noise-free samples, `samples` per client, without drawing the samples.

    X'X of L Gaussian samples is Wishart distributed, and Bartlett's decomposition draws it as A A' from a
    lower triangular A: chi with L, L-1, ... degrees of freedom on the diagonal, standard normals below, and
    only L columns if L < d. That costs the same for ten samples as for a million.
    """
    domains, d = len(truth.W), len(truth.B)
    count = rng.multinomial(samples, truth.shares).sum(axis=0)
    freedom = np.maximum(count[:, None] - np.arange(d), 0)
    A = np.tril(rng.standard_normal((domains, d, d)), -1) * (freedom > 0)[:, None, :]
    diagonal = np.arange(d)
    A[:, diagonal, diagonal] = np.sqrt(2 * rng.standard_gamma(freedom / 2))
    xx = A @ A.mT
    return Moments(count, xx, (xx @ truth.coefficients[:, :, None])[:, :, 0])
