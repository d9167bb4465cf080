"""The minimum cell size: nothing is sent about a domain with fewer patients at a site."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from feddar.algorithm.local_training import samples_by_domain
from feddar.algorithm.processors import Processor
from feddar.data.cohort import Cohort


@dataclass(frozen=True)
class MinimumCell(Processor):
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
            "no level of a category and no bin of scores are of fewer."
        )

    @property
    def min_patients(self) -> int:
        """The minimum number of patients behind sums of columns, counts of levels and bins of scores: the same."""
        return self.patients

    def admit(self, data: Cohort) -> Cohort:
        """Return the samples of domains with at least ``patients`` patients."""
        kept = (patients_by_domain(data) >= self.patients)[data.domain]
        return data if bool(kept.all()) else data.rows(kept)

    def hide(self, data: Cohort) -> Cohort:
        """Return the samples with levels of categories that fewer than ``patients`` patients have as missing values.

        The embedding of a level that one patient has would move by that patient alone. If too few values of a column
        are missing then, they are taken for its most frequent level.
        """
        if data.codes is None:
            return data
        columns = [self._common_levels(column, data) for column in data.codes.T]
        return replace(data, x=(*data.x[:-1], torch.stack(columns, dim=1)))

    def _common_levels(self, codes: Tensor, data: Cohort) -> Tensor:
        """Return level numbers [n] of which each is of enough patients."""
        levels = codes.unique().tolist()
        few = [level for level in levels if data.patients(codes == level) < self.patients]
        hidden = codes.new_tensor(few)
        kept = torch.where(torch.isin(codes, hidden), 0, codes)
        if not 0 < data.patients(kept == 0) < self.patients or len(few) == len(levels):
            return kept
        return torch.where(kept == 0, kept[kept > 0].mode().values, kept)


def patients_by_domain(data: Cohort) -> Tensor:
    """Return the number of patients of each domain [M]: different groups if there are groups, else samples."""
    if data.group is None:
        return samples_by_domain(data)
    pairs = torch.stack([data.domain, data.group], dim=1).unique(dim=0)
    return torch.bincount(pairs[:, 0], minlength=len(data.domains))
