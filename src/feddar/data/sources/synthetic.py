"""The source `synthetic`: the paper's linear regression, with samples drawn by ``synthetic_samples``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from feddar.data.sources.drawn import Alpha, Samples
from feddar.data.sources.source import Source
from feddar.settings import DataSettings

if TYPE_CHECKING:
    from feddar.data.cohort import Cohort


class SyntheticOptions(DataSettings):
    """How the samples are drawn."""

    samples: Samples = 20
    alpha: Alpha = 0.4


def load(options: SyntheticOptions, seed: int) -> Cohort:
    """Return 100 clients with samples of a true model that is drawn with the seed."""
    import torch

    from feddar.data.cohort import Cohort
    from feddar.data.sources.synthetic_samples import draw, make_truth

    truth = make_truth(seed, alpha=options.alpha)
    data = draw(truth, options.samples, seed + 1)
    names = [f"client-{i + 1:03d}" for i in range(len(truth.shares))]
    return Cohort.from_arrays(
        data.x,
        data.y,
        domain=data.domain + 1,
        client=[names[i] for i in data.client],
        task="regression",
        dtype=torch.float64,
    )


SOURCE = Source(
    "synthetic",
    "synthetic: linear regression, 100 clients, 5 domains, 20 features, after the paper's section 5.1",
    SyntheticOptions,
    load,
    {"encoder": "linear", "k": 2, "bias": False, "dtype": "float64", "lr": 0.03, "batch_size": 8, "damping": 1e-3},
)
