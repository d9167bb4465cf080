"""Small cohorts whose domains differ."""

from pathlib import Path

import numpy as np
import pandas as pd

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


def write_table(cohort: Cohort, path: Path) -> None:
    """Write a cohort of two classes as a CSV file, with columns hospital, race and outcome."""
    table = pd.DataFrame(cohort.x[0].numpy(), columns=list("abcdefghij")[: cohort.x[0].shape[1]])
    table["outcome"], table["race"], table["hospital"] = cohort.y.numpy(), cohort.domain_names, cohort.client_names
    table.to_csv(path, index=False)
