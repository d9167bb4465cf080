"""Privacy processors: what a site does to its samples and replies before anything leaves it, on every engine.

Each has a sentence that says what it guarantees, which `feddar client --explain` prints. It may exclude samples
(``admit``), hide values of those that are trained on (``hide``), require that sums are over a minimum number of
patients (``min_patients``), and change a finished reply (``process``): clip it, or take something out of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from feddar.algorithm.protocol import Reply, Request
from feddar.data.cohort import Cohort


class Processor(ABC):
    """One processor; what it does not say otherwise stays as it is."""

    @property
    @abstractmethod
    def promise(self) -> str:
        """A sentence that says what holds for everything that leaves the site."""

    @property
    def min_patients(self) -> int:
        """The minimum number of patients behind a sum that is sent; 0 if there is no minimum."""
        return 0

    def admit(self, data: Cohort) -> Cohort:
        """Return the samples that may be used at all."""
        return data

    def hide(self, data: Cohort) -> Cohort:
        """Return the samples as they may be trained on."""
        return data

    def process(self, request: Request, reply: Reply, rows: Tensor) -> Reply:
        """Return the reply in the form in which it may leave the site, which trains on ``rows`` of each domain [M]."""
        return reply


@dataclass(frozen=True)
class Processors:
    """A site's processors, applied in this order."""

    each: tuple[Processor, ...] = ()

    @classmethod
    def of(cls, each: Iterable[Processor]) -> Processors:
        """Return the processors as a ``Processors``."""
        return cls(tuple(each))

    @property
    def min_patients(self) -> int:
        """The minimum number of patients behind a sum: the largest minimum of the processors."""
        return max((processor.min_patients for processor in self.each), default=0)

    def admit(self, data: Cohort) -> Cohort:
        """Return the samples that every processor admits."""
        for processor in self.each:
            data = processor.admit(data)
        return data

    def to_train_on(self, data: Cohort) -> Cohort:
        """Return the samples that every processor admits, as they may be trained on."""
        data = self.admit(data)
        for processor in self.each:
            data = processor.hide(data)
        return data

    def process(self, request: Request, reply: Reply, rows: Tensor) -> Reply:
        """Return the reply after every processor."""
        for processor in self.each:
            reply = processor.process(request, reply, rows)
        return reply
