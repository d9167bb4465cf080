"""What the tests share: a small cohort whose domains differ, and the real data where it is present."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings

from feddar.cohort import Cohort

torch.set_num_threads(1)
settings.register_profile("no deadline", deadline=None)  # machines may be busy
settings.load_profile("no deadline")


@pytest.fixture(scope="session")
def data_folder() -> Path:
    folder = Path(os.environ.get("FEDDAR_DATA", Path(__file__).parents[2] / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no real data: {folder} is absent (set FEDDAR_DATA)")
    return folder


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


@pytest.fixture
def cohort() -> Cohort:
    return make_cohort()
