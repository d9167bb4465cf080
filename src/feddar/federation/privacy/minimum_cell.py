"""The minimum cell size: nothing is sent about a domain with fewer patients at a site."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from feddar.algorithm.local_training import samples_by_domain
from feddar.algorithm.processors import Processor
from feddar.data.cohort import Cohort

MOST_OF_THE_WEIGHT = 0.9
"""Fewer patients than the minimum have at most this part of the weight of a domain: else a sum is as good as theirs."""


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
            f"Nothing is said of a domain with fewer than {self.patients} patients at this site; no measurement, "
            "gap, level of a category or bin of scores that is used is of fewer."
        )

    @property
    def min_patients(self) -> int:
        """The minimum number of patients behind sums of columns, counts of levels and bins of scores: the same."""
        return self.patients

    def admit(self, data: Cohort) -> Cohort:
        """Return the samples of domains with at least ``patients`` patients, of which fewer have not all the weight.

        Samples of weight 0 add to no sum.
        """
        if data.weight is not None and not bool(data.weight.all()):
            data = data.rows(data.weight > 0)
        enough = patients_by_domain(data) >= self.patients
        if data.weight is not None:
            enough &= part_of_heaviest(data, data.weight, self.patients - 1) <= MOST_OF_THE_WEIGHT
        kept = enough[data.domain]
        return data if bool(kept.all()) else data.rows(kept)

    def hide(self, data: Cohort) -> Cohort:
        """Return the samples without levels, measurements and gaps that fewer than ``patients`` patients have.

        What the encoder learns of a level, or of a column, that one patient has would be moved by that patient alone.
        """
        hidden = {"numbers": self._common_numbers, "categories": self._common_levels}
        x = (
            torch.stack([hidden[part.kind](column, data) for column in values.T], dim=1)
            if part.kind in hidden and values.shape[1]  # beside categories there may be no numbers
            else values
            for values, part in zip(data.x, data.layout, strict=True)
        )
        return replace(data, x=tuple(x))

    def _common_numbers(self, column: Tensor, data: Cohort) -> Tensor:
        """Return a column [n] without values if few have one, and with its median in the gaps if few have a gap."""
        missing = column.isnan()
        if 0 < data.patients(~missing) < self.patients:
            return torch.full_like(column, torch.nan)
        if 0 < data.patients(missing) < self.patients:
            return torch.where(missing, column.nanmedian(), column)
        return column

    def _common_levels(self, codes: Tensor, data: Cohort) -> Tensor:
        """Return level numbers [n] of which each is of enough patients: others are missing, or the most frequent one.

        They are the latter if too few values of the column are missing then.
        """
        levels = codes.unique().tolist()
        few = [level for level in levels if data.patients(codes == level) < self.patients]
        hidden = codes.new_tensor(few)
        kept = torch.where(torch.isin(codes, hidden), 0, codes)
        if not 0 < data.patients(kept == 0) < self.patients or len(few) == len(levels):
            return kept
        return torch.where(kept == 0, kept[kept > 0].mode().values, kept)


def part_of_heaviest(data: Cohort, weight: Tensor, number: int) -> Tensor:
    """Return which part of the weight of each domain [M] its ``number`` heaviest patients have."""
    patient = torch.arange(len(data)) if data.group is None else data.group
    pairs, place = torch.stack([data.domain, patient], dim=1).unique(dim=0, return_inverse=True)
    weights = torch.zeros(len(pairs), dtype=torch.float64).index_add(0, place, weight.double())
    by_domain = [weights[pairs[:, 0] == m].sort(descending=True).values for m in range(len(data.domains))]
    return torch.stack([each[: max(number, 0)].sum() / each.sum().clamp_min(1e-300) for each in by_domain])


def patients_by_domain(data: Cohort) -> Tensor:
    """Return the number of patients of each domain [M]: different groups if there are groups, else samples."""
    if data.group is None:
        return samples_by_domain(data)
    pairs = torch.stack([data.domain, data.group], dim=1).unique(dim=0)
    return torch.bincount(pairs[:, 0], minlength=len(data.domains))
