"""What a site does to its answers before they leave it: a list of processors, the same for every engine.

Each says what it promises, which `feddar client --explain` prints. It may leave samples out of everything (``admit``),
say of how few patients no sum may be (``fewest``), and change a finished reply (``process``): bound it, add noise to
it, mask it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from feddar.algorithm.protocol import Reply, Request
from feddar.data.cohort import Cohort


class Processor(Protocol):
    """One of them."""

    @property
    def promise(self) -> str:
        """What holds for everything that leaves the site, as a sentence."""

    @property
    def fewest(self) -> int:
        """Of how many patients a sum must be at least; 0 where it does not matter."""

    def admit(self, data: Cohort) -> Cohort:
        """Return the samples that may be spoken of at all."""

    def process(self, request: Request, reply: Reply) -> Reply:
        """Return the reply as it may leave."""


@dataclass(frozen=True)
class Processors:
    """All of a site's, in their order."""

    each: tuple[Processor, ...] = ()

    @classmethod
    def of(cls, each: Iterable[Processor]) -> Processors:
        """Make the list."""
        return cls(tuple(each))

    @property
    def fewest(self) -> int:
        """Of how many patients every sum is at least."""
        return max((processor.fewest for processor in self.each), default=0)

    def admit(self, data: Cohort) -> Cohort:
        """Return the samples that all of them admit."""
        for processor in self.each:
            data = processor.admit(data)
        return data

    def process(self, request: Request, reply: Reply) -> Reply:
        """Return the reply after all of them."""
        for processor in self.each:
            reply = processor.process(request, reply)
        return reply
