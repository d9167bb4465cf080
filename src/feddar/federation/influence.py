"""How far replies move the model: what moves it much further than others do is left out.

A site with few rows must not move the model by more than its share. Where single replies are seen, each is compared
with the median of what sites have sent in earlier rounds, by rows; where only sums are seen, a sum is compared with
those of earlier rounds. In the first round the model's own length is the measure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

from feddar.algorithm.names import named_parameters
from feddar.algorithm.protocol import Reply, Request
from feddar.algorithm.wire import MessageError
from feddar.federation.privacy.norm_bound import length
from feddar.models.parameters import Parameters

TRAINED = ("heads", "encoder", "together")
"""The phases whose replies move the common model."""
FAR = 10.0
"""A reply or sum may move the model by so many times the median."""
FIRST_HEADS, FIRST_ENCODER = 10.0, 2.0
"""In the first round a reply or sum may move heads, or an encoder, by so many times 1 + their length: heads begin
small, and an encoder has its length from the beginning."""


def moved(request: Request, reply: Reply) -> tuple[float, float]:
    """Return by how much a reply moves the parameters that it has, and the length of those that it moves.

    What the census has set is among them, may be of any length, and is not moved.
    """
    heads = {key: part.head for key, part in reply.heads.items()}
    trained = Parameters({key: part.tensors for key, part in reply.encoders.items()}, heads)
    sent, squares, whole = named_parameters(request.parameters), 0.0, 0.0
    for name, value in named_parameters(trained).items():
        change = length(value.double() - sent[name].double())
        squares += change**2
        whole += length(sent[name]) ** 2 if change else 0.0
    return math.sqrt(squares), math.sqrt(whole)


def middle(moves: Iterable[tuple[float, int]]) -> float:
    """Return the median of moves by their rows, the lower one of two.

    >>> middle([(1.0, 40), (2.0, 50), (300.0, 10)])
    2.0
    """
    ordered = sorted(moves)
    half, below = sum(rows for _, rows in ordered) / 2, 0
    for value, rows in ordered:
        below += rows
        if below >= half:
            return value
    return 0.0


@dataclass
class Influence:
    """By how far the model was moved in earlier rounds of a run, by phase."""

    earlier: dict[str, list[float]] = field(default_factory=dict)

    def require_near(self, request: Request, reply: Reply) -> float:
        """Return by how much a reply or sum moves the model; refuse one that moves it much further than is usual."""
        by, whole = moved(request, reply)
        before, first = self.earlier.get(request.phase.name), FIRST_ENCODER if reply.encoders else FIRST_HEADS
        most = FAR * median(before) if before else first * (1 + whole)
        if by > most:
            raise MessageError(f"it would move the model by {by:.3g}, where at most {most:.3g} is to be expected")
        return by

    def remember(self, request: Request, by: float) -> None:
        """Remember by how far the model was moved in a phase of a round."""
        if by > 0:
            self.earlier.setdefault(request.phase.name, []).append(by)
