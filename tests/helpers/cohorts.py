"""Small cohorts whose domains differ."""

import numpy as np

from feddar.data.cohort import Cohort


def make_cohort(
    n: int = 600, domains: int = 3, clients: int = 4, classes: int = 2, seed: int = 0, features: int = 6
) -> Cohort:
    """Return samples whose labels depend on x differently in each domain; classes=0 gives regression."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, features))
    z, c = rng.integers(0, domains, n), rng.integers(0, clients, n)
    W = rng.normal(size=(domains, max(classes, 1), features))
    scores = np.einsum("nd,ncd->nc", x, W[z]) + 0.1 * rng.normal(size=(n, max(classes, 1)))
    y = scores[:, 0] if classes == 0 else scores.argmax(1)
    names = {"domain": [f"domain-{m}" for m in z], "client": [f"site-{i}" for i in c]}
    return Cohort.from_arrays(x, y, **names)
