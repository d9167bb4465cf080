"""Options of cohorts whose clients are drawn from a pool, as in the paper's experiments with controlled mixtures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from feddar.settings import DataSettings

if TYPE_CHECKING:
    from feddar.data.cohort import Cohort
    from feddar.data.sources.image_pool import Pool

Samples = Annotated[int, Field(ge=2, description="Samples per client.")]
Alpha = Annotated[float, Field(gt=0, description="Domain mixtures of clients are Dir(alpha p).")]


class DrawnOptions(DataSettings):
    """How clients are drawn from a pool of images."""

    clients: int = Field(5, ge=1, description="How many clients are drawn.")
    samples: Samples = 500
    alpha: Alpha = 1.0


def draw_clients(pool: Pool, options: DrawnOptions, seed: int) -> Cohort:
    """Return a cohort of clients whose samples are drawn from the pool."""
    from feddar.data.cohort import Cohort

    drawn = Cohort.mixture(
        pool.samples, clients=options.clients, samples=options.samples, alpha=options.alpha, seed=seed
    )
    return pool.with_images(drawn)
