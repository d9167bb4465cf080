"""The minimum cell size: nothing is sent about a domain with fewer patients at a site."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from feddar.algorithm.local_training import samples_by_domain
from feddar.algorithm.protocol import Reply, Request
from feddar.data.cohort import Cohort


@dataclass(frozen=True)
class MinimumCell:
    """The processor that leaves out all samples of a domain with fewer than ``patients`` patients.

    A sum over one patient reveals that patient, and the domain weights that a server sends could be chosen to single
    out a small domain from a larger sum.
    """

    patients: int

    @property
    def promise(self) -> str:
        """A sentence that says what holds for everything that leaves the site."""
        return (
            f"Nothing is said of a domain with fewer than {self.patients} patients at this site; no column's sums, "
            "no count of a category's level and no bin of scores are of fewer."
        )

    @property
    def min_patients(self) -> int:
        """The minimum number of patients behind sums of columns, counts of levels and bins of scores: the same."""
        return self.patients

    def admit(self, data: Cohort) -> Cohort:
        """Return the samples of domains with at least ``patients`` patients."""
        kept = (patients_by_domain(data) >= self.patients)[data.domain]
        return data if bool(kept.all()) else data.rows(kept)

    def process(self, request: Request, reply: Reply, rows: Tensor) -> Reply:
        """Return the reply unchanged: small domains were already left out by ``admit``."""
        return reply


def patients_by_domain(data: Cohort) -> Tensor:
    """Return the number of patients of each domain [M]: different groups if there are groups, else samples."""
    if data.group is None:
        return samples_by_domain(data)
    pairs = torch.stack([data.domain, data.group], dim=1).unique(dim=0)
    return torch.bincount(pairs[:, 0], minlength=len(data.domains))
