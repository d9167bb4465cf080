"""Synthetic tables of which it is known whether domains differ: one outcome for all of them, or one for each.

    x ~ N(0, I_12),   P(y = 1 | x, m) = 1 / (1 + exp(-(w_m' h(x) + BIAS)))

with h(x) bends and products of the features. If domains are alike, all w_m are the same: the domains are one
population, and telling them apart only costs samples. If they are apart, half the variance of w_m is the domain's own.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from feddar.data.cohort import Cohort
from feddar.data.moments import Floats

ROWS, FEATURES, CLIENTS = 4000, 12, 6
SHARES = {"A": 0.50, "B": 0.25, "C": 0.14, "D": 0.08, "E": 0.03}
"""The share of each domain, the same at every client."""
BIAS = -0.8
STRENGTH = 2.5
"""The standard deviation of w_m' h(x)."""


def cohort(seed: int, *, apart: bool) -> Cohort:
    """Draw coefficients and rows, and return them as a table with domains that are apart or alike."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((ROWS, FEATURES))
    bent = bends(x)
    weights = _unit(np.tile(rng.standard_normal(bent.shape[1]), (len(SHARES), 1)))
    if apart:
        weights = _unit(weights + _unit(rng.standard_normal(weights.shape)))
    domain = rng.permutation(np.repeat(np.arange(len(SHARES)), counts()))
    client = rng.integers(0, CLIENTS, ROWS)
    logit = STRENGTH * (bent * weights[domain]).sum(1) + BIAS
    y = rng.random(ROWS) < 1 / (1 + np.exp(-logit))
    return Cohort.from_arrays(
        pd.DataFrame(x, columns=[f"x{place + 1}" for place in range(FEATURES)]),
        np.where(y, "yes", "no"),
        domain=np.array(list(SHARES))[domain],
        client=[f"site {number + 1}" for number in client],
    )


def counts() -> list[int]:
    """Return the rows of each domain, the rest being the first one's."""
    rest = [round(share * ROWS) for share in list(SHARES.values())[1:]]
    return [ROWS - sum(rest), *rest]


def bends(x: Floats) -> Floats:
    """Return what the outcome is made of: lines, bends and products of features, each of about unit variance."""
    lines, bent = x[:, :4], np.sqrt(2) * np.sin(2 * x[:, 4:6])
    hinges = (np.maximum(x[:, 6:8], 0) - 0.4) / 0.58
    return np.column_stack([lines, bent, hinges, x[:, 8] * x[:, 9], x[:, 10] * x[:, 11]])


def _unit(rows: Floats) -> Floats:
    unit: Floats = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return unit
