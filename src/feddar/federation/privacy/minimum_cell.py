"""The minimum cell: nothing is said of fewer patients of a domain than this."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from feddar.algorithm.local_training import samples_by_domain
from feddar.algorithm.protocol import Reply, Request
from feddar.data.cohort import Cohort


@dataclass(frozen=True)
class MinimumCell:
    """Samples of a domain with fewer patients are left out of everything.

    A sum over one patient is that patient, and weights of domains, which a client is told, could single them out of a
    larger sum.
    """

    patients: int

    @property
    def promise(self) -> str:
        """What holds for everything that leaves the site."""
        return (
            f"Nothing is said of a domain with fewer than {self.patients} patients at this site; no column's sums and "
            "no bin of scores are of fewer."
        )

    @property
    def fewest(self) -> int:
        """The same number for columns and bins of scores."""
        return self.patients

    def admit(self, data: Cohort) -> Cohort:
        """Return the samples of domains that have as many patients."""
        kept = (patients_by_domain(data) >= self.patients)[data.domain]
        return data if bool(kept.all()) else data.rows(kept)

    def process(self, request: Request, reply: Reply) -> Reply:
        """Return the reply as it is: what it may not tell was left out before."""
        return reply


def patients_by_domain(data: Cohort) -> Tensor:
    """Return how many patients there are of each domain: groups of samples where there are such, else samples."""
    if data.group is None:
        return samples_by_domain(data)
    pairs = torch.stack([data.domain, data.group], dim=1).unique(dim=0)
    return torch.bincount(pairs[:, 0], minlength=len(data.domains))
