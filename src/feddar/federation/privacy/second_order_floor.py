"""The floor of second-order sums: a site sends those of a domain only if enough of its rows are behind them.

Gradient and curvature of a head, and the Gram matrix of its features, are sums of outer products of features. While a
domain has fewer rows than a head has columns, the features of these very rows span the matrix: whoever knows the
encoder can try all records that there could be, and those that lie in the span are the patients.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from feddar.algorithm.names import key_of
from feddar.algorithm.pooling import CURVATURE, SLOPE
from feddar.algorithm.processors import Processor
from feddar.algorithm.protocol import Reply, Request, TrainedHead


@dataclass(frozen=True)
class SecondOrderFloor(Processor):
    """The processor that takes second-order sums of domains with too few rows out of a reply."""

    per_column: float
    """The number of rows that are needed for each column of a head."""
    columns: int

    @property
    def least(self) -> float:
        """The least number of rows of a domain."""
        return self.per_column * self.columns

    @property
    def promise(self) -> str:
        """A sentence that says what holds for everything that leaves the site."""
        return (
            f"Gradient, curvature and Gram matrix of a domain's head are sent only from {self.least:,.0f} rows on, "
            f"{self.per_column:g} for each of a head's {self.columns} columns."
        )

    def few(self, rows: Tensor) -> frozenset[str]:
        """Return the keys of the domains with too few rows, given the number of each domain's [M]."""
        return frozenset(str(m) for m, number in enumerate(rows.tolist()) if number < self.least)

    def process(self, request: Request, reply: Reply, rows: Tensor) -> Reply:
        """Return the reply without second-order sums of domains with too few rows."""
        few = self.few(rows)
        sums = {name: value for name, value in reply.sums.items() if not (is_pooled(name) and key_of(name) in few)}
        heads = {key: _first_order(head) if key in few else head for key, head in reply.heads.items()}
        return replace(reply, sums=sums, heads=heads)


def is_pooled(name: str) -> bool:
    """Return whether a sum is a gradient or curvature for partial pooling of heads."""
    return name.startswith((f"{SLOPE}/", f"{CURVATURE}/"))


def _first_order(trained: TrainedHead) -> TrainedHead:
    return replace(trained, curvature=None, curvature_times_head=None, evidence={})
