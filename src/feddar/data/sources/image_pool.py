"""Pools of labelled images with domains, from which clients are drawn; only images that were drawn are read.

A pool is a cohort whose input is the number of each sample. Mixtures, splits and selections are made with these
numbers, and only the chosen images are decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from feddar.data.cohort import Cohort
from feddar.data.images import Scaling
from feddar.objectives.labels import Scalar

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Pool:
    """A pool of images: samples by number, and a function that reads the images of some of them."""

    samples: Cohort
    """Its input is each sample's number, [n, 1]."""
    images: Callable[[Ints], Tensor]
    """Reads the images of these numbers: pixels [n, 3, height, width]."""
    scaling: Scaling

    def numbers(self, chosen: Cohort) -> Ints:
        """Return the numbers in the pool of samples that were chosen from it."""
        found: Ints = chosen.x[0][:, 0].numpy()
        return found

    def with_images(self, chosen: Cohort) -> Cohort:
        """Return the chosen samples with their images as input [n, 3, height, width]."""
        return replace(chosen, x=(self.images(self.numbers(chosen)),), scaling=self.scaling)


def numbered(
    y: Sequence[Scalar] | NDArray[np.generic], domain: Sequence[str], domains: Sequence[str], classes: Sequence[Scalar]
) -> Cohort:
    """Return the samples of a pool, whose input is 0, 1, 2, ..., from labels and domains."""
    return Cohort.from_arrays(np.arange(len(y)), y, domain=domain, domains=domains, classes=classes, dtype=torch.long)


def at_most(samples: Cohort, per_domain: int | None) -> Cohort:
    """Return at most ``per_domain`` samples of each domain, evenly spaced; None is all."""
    if per_domain is None:
        return samples
    chosen = [_spaced(torch.nonzero(samples.domain == m).flatten(), per_domain) for m in range(len(samples.domains))]
    return samples.rows(torch.cat(chosen))


def _spaced(rows: Tensor, most: int) -> Tensor:
    return rows if len(rows) <= most else rows[torch.arange(most) * len(rows) // most]
