"""How far replies move the model: what moves it much further than others do is left out.

A site with few rows must not move the model by more than its share. Where single replies are seen, each is compared
with the median of what sites have sent in earlier rounds, by rows; where only sums are seen, a sum is compared with
those of earlier rounds. In the first round the model's own length is the measure.

A reply moves heads to where the server would end with this reply alone. Where it has sums of second order, that is not
where its heads are, but what is solved from the sums. Sums of pooling are judged together: of few rows alone, heads
that are too sure of themselves have a step of any length, which means nothing beside the rows of others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

import torch

from feddar.algorithm.closed_form import length_of_scores
from feddar.algorithm.names import named_parameters
from feddar.algorithm.pooling import ERRORS, total_of
from feddar.algorithm.protocol import Reply, Request
from feddar.algorithm.server import Reduction
from feddar.algorithm.wire import MessageError
from feddar.federation.privacy.norm_bound import length
from feddar.models.model import Model
from feddar.models.parameters import Parameters, Tensors

POOL = "pool"
TRAINED = ("heads", "encoder", "together")
"""The phases whose replies move the common model, each by itself."""
FAR = 10.0
"""A reply or sum may move the model by so many times the median."""
FIRST_HEADS, FIRST_ENCODER = 10.0, 2.0
"""In the first round a reply or sum may move heads, or an encoder, by so many times 1 + their length: heads begin
small, and an encoder has its length from the beginning."""
FAR_SCORES = 10.0
"""In any round the sums of pooling may move scores by so many times 1 + their length: each step of pooling begins anew,
at the heads as trained."""


def moved(request: Request, reply: Reply, damping: float) -> tuple[float, float]:
    """Return by how much a reply moves the parameters that it has, and the length of those that it moves.

    What the census has set is among them, may be of any length, and is not moved.
    """
    encoders = {key: part.tensors for key, part in reply.encoders.items()}
    trained = Parameters(encoders, _solved(request, reply, damping))
    sent, squares, whole = named_parameters(request.parameters), 0.0, 0.0
    for name, value in named_parameters(trained).items():
        change = length(value.double() - sent[name].double())
        squares += change**2
        whole += length(sent[name]) ** 2 if change else 0.0
    return math.sqrt(squares), math.sqrt(whole)


def _solved(request: Request, reply: Reply, damping: float) -> Tensors:
    """Return the heads that the server would find from this reply alone, by its curvature if it has one."""
    if all(part.curvature is None for part in reply.heads.values()):
        return {key: part.head for key, part in reply.heads.items()}
    reduction = Reduction(request.phase, request.parameters, damping)
    reduction.add(replace(reply, encoders={}))
    return reduction.result().heads


def stepped(request: Request, replies: Iterable[Reply], model: Model) -> tuple[float, float]:
    """Return by how much the step that is solved from sums of pooling moves scores, and the length of scores.

    Both are along the directions of pooling: along others a step may be of any length, and hardly moves a score. Of a
    number in units of its own, the errors are part of the length.
    """
    heads, total = request.parameters.heads, total_of(replies, model.objective, model.bias)
    if request.phase.curvature is not None:  # the step is one from zero
        return length_of_scores(total)
    found = total.pooled(heads, None)
    if found is None:
        return 0.0, 0.0
    before, after = (
        found.directions.coordinates(torch.stack([each[key].double().flatten() for key in found.stepped]))
        for each in (heads, found.stepped)
    )
    squares, count = total.sums[ERRORS].tolist()
    error = math.sqrt(squares / count) if model.objective.in_units else 0.0
    return float(torch.linalg.vector_norm(after - before)), length(before) + error


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

    model: Model
    damping: float
    earlier: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """How far, and at which learning rate."""

    def require_near(self, request: Request, reply: Reply) -> float:
        """Return by how much a reply or sum moves the model; refuse one that moves it much further than is usual."""
        by, most = self._pooled(request, [reply]) if request.phase.name == POOL else self._trained(request, reply)
        if not by <= most:
            raise MessageError(_too_far(by, most))
        return by

    def outlying(self, request: Request, replies: Sequence[Reply]) -> dict[str, str]:
        """Return which clients' sums of pooling must be left out so that those of the others are near, and why.

        One after the other: in turn the one without which the step is shortest.
        """
        rest, found = list(replies), dict[str, str]()
        by, most = self._pooled(request, rest)
        while rest and not by <= most:
            without = [[each for each in rest if each is not one] for one in rest]
            steps = [self._pooled(request, others) for others in without]
            best = min(range(len(rest)), key=lambda place: steps[place][0])
            found[rest[best].client] = _too_far(by, most)
            rest, (by, most) = without[best], steps[best]
        return found

    def _pooled(self, request: Request, replies: Sequence[Reply]) -> tuple[float, float]:
        """Return by how much sums of pooling move scores, and may at most."""
        by, whole = stepped(request, replies, self.model)
        return by, FAR_SCORES * (1 + whole)

    def _trained(self, request: Request, reply: Reply) -> tuple[float, float]:
        """Return by how much trained parameters are moved, and may be at most."""
        by, whole = moved(request, reply, self.damping)
        first = FIRST_ENCODER if reply.encoders else FIRST_HEADS
        before = self.earlier.get(request.phase.name)
        return by, FAR * _usual(before, request.phase.lr) if before else first * (1 + whole)

    def remember(self, request: Request, by: float) -> None:
        """Remember by how far the model was moved in a phase of a round."""
        if by > 0:
            self.earlier.setdefault(request.phase.name, []).append((by, request.phase.lr))


def _too_far(by: float, most: float) -> str:
    return f"it would move the model by {by:.3g}, where at most {most:.3g} is to be expected"


def _usual(before: Sequence[tuple[float, float]], rate: float) -> float:
    """Return the median of earlier moves, as they were or as they would be at this learning rate if that is more.

    >>> _usual([(1.0, 0.1), (3.0, 0.1), (2.0, 0.1)], 0.2)
    4.0
    """
    at_this_rate = [by * rate / then for by, then in before if then > 0]
    return max(median(by for by, _ in before), median(at_this_rate or [0.0]))
