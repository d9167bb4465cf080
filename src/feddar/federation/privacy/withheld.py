"""The floor of sums over sites: what is said of a domain only if enough sites and rows are behind the sum.

A domain that one site alone holds is that site's own sum, whatever is done to hide single replies; held by two, each
can subtract its own part. And second-order sums over fewer rows than a head has columns name these rows, at however
many sites they are (``second_order_floor``). So heads of such domains stay at the sites, and the domain uses the mean
of the others' heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from feddar.algorithm.names import key_of
from feddar.algorithm.processors import Processor
from feddar.algorithm.protocol import Reply, Request
from feddar.federation.privacy.second_order_floor import is_pooled
from feddar.federation.study import FEWEST


@dataclass(frozen=True)
class Withheld(Processor):
    """The processor that takes what is of a withheld domain alone out of a reply; its samples train the encoder."""

    least: float
    """The least number of rows behind a sum of a domain."""

    @property
    def promise(self) -> str:
        """A sentence that says what holds for everything that leaves the site."""
        return (
            f"All of it is masked: the coordinator learns only sums over {FEWEST} sites or more. Heads of a domain, "
            f"gradient and curvature are part of them if {FEWEST} sites hold it, with {self.least:,.0f} rows together."
        )

    def few(self, rows: Tensor) -> frozenset[str]:
        """Return none: which domains are withheld depends on all sites, and requests say it."""
        return frozenset()

    def process(self, request: Request, reply: Reply, rows: Tensor) -> Reply:
        """Return the reply without encoders, heads and second-order sums of withheld domains."""
        keys = {str(number) for number in request.withheld}
        sums = {name: value for name, value in reply.sums.items() if not (is_pooled(name) and key_of(name) in keys)}
        return replace(
            reply,
            encoders={key: part for key, part in reply.encoders.items() if key not in keys},
            heads={key: part for key, part in reply.heads.items() if key not in keys},
            sums=sums,
        )

    def withheld(self, counts: Tensor, holders: Tensor) -> Tensor:
        """Return which domains are withheld [M], given the rows and the number of sites that hold each."""
        return (holders < FEWEST) | (counts < self.least)
