"""A site works with a model only if it can have come from training.

Crafted weights can make single patients stand out in a sum over many: an encoder that is 0 for all but one, or a head
so long that all others are beyond doubt. Training starts from the model that the study describes, which a site can make
itself, and from round to round moves it about as far as the site's own training does. Columns are scaled by what the
census says, which the site's own column must bear out. A site that joins late can only compare with the beginning.

Heads for use are not trained but solved for, may be of any length, and are not compared: with them sites send losses
and figures, no gradient or curvature.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from feddar.algorithm.protocol import Reply, Request
from feddar.data.cohort import Cohort
from feddar.federation.privacy.norm_bound import length
from feddar.models.encoders.tabular import CountedEmbedding, Standardise
from feddar.models.model import Model
from feddar.models.parameters import ALL, Parameters, Tensors
from feddar.results.run_folder import replacing

REACH = 3.0
"""In a round all sites together may move a tensor by so many times the site's own change of it (of the head that it
changes most, since it may not have all domains),"""
SLACK, HEADS = 0.5, 10.0
"""and in any case by this times 1 + its length, a head by this: one that leaves a single patient in doubt is a hundred
times as long,"""
LAYER, KEPT = 1.5, 0.95
"""but a tensor longer than this, a layer, by less than all of it beside the site's own part: a gate needs layers that
are 0 but for one number. If the site has missed a training, which only the coordinator says, by less than all of it."""
MOST_ROUNDS = 3
"""However many trainings the site is said to have missed, a tensor may have moved as far as in so many rounds."""
IN_USE = ("offsets", "validate", "measure")
"""The phases that come with heads for use."""
IMPLAUSIBLE = {"kind": "refused", "why": "training cannot have come to this request; its own log says more."}
"""The answer to a phase with a model that is not plausible: it does not say what it was compared with."""
SCALES = 100.0
"""The scale of a column may be smaller than its own at the site by this factor."""
ROUNDING = 1e-4
"""A mean of heads, rounded, may be further away than the heads by this part of it."""
_BEFORE = ("heads", "encoder", "together"), ("heads", "together")
"""The phases that come with encoders, and with heads, as they were at the end of the round before."""
_HEAD, _MOVED, _ROUND = "head", "moved", "round"


class PlausibleModels:
    """The encoder and heads that a site was sent last in a run, and how far its own training moved them."""

    def __init__(self, folder: Path, model: Model, initial: Parameters | None, data: Cohort) -> None:
        """``initial`` are the parameters that training starts from; None if the site does not have them."""
        self.path = folder / "model-seen.safetensors"
        self.initial = {} if initial is None else _flat(initial.encoders) | _heads(initial)
        self.counted = set_by_the_census(model)
        self.own_scale = None if data.numbers is None else _scale(data.numbers)

    def objection(self, request: Request) -> str | None:
        """Return why a model cannot have come from training, for the site's own people; None if it can."""
        seen = self._seen()
        for name, value in _compared(request):
            if not self._fits(name, value, seen, request):
                return f"'{_parameter(name)}' of the model is far from what training can have made of the last one."
        if request.mean_head is not None and not _is_among(request.mean_head, [*request.parameters.heads.values()]):
            return "the mean of the heads is not among them."
        return None

    def _fits(self, name: str, value: Tensor, seen: Tensors, request: Request) -> bool:
        parameter, before = _parameter(name), _same(name, seen, self.initial)
        if parameter in self.counted:
            own = self.own_scale if parameter.endswith(".scale") else None
            return own is None or bool((value.double() * SCALES >= own).all())
        if not value.is_floating_point() or before is None:
            return True
        own, last = (_same(f"{kind}/{name}", seen) for kind in (_MOVED, _ROUND))
        passed = request.round - int(1 if last is None else last)
        trained = passed if request.phase.name in _BEFORE[parameter == _HEAD] else passed + 1
        whole = None if parameter == _HEAD else length(before)
        return length(value - before) <= _allowance(float(0 if own is None else own), max(1, trained), whole)

    def keep(self, request: Request, reply: Reply) -> None:
        """Store the encoders or heads of a request that the reply moves, and by how much it does."""
        encoders = _flat(request.parameters.encoders) if reply.encoders else {}
        heads = _heads(request.parameters) if reply.heads else {}
        sent, moved = encoders | heads, _moved(request.parameters, reply)
        if not sent:
            return
        kept = self._seen() | sent | {f"{_ROUND}/{name}": torch.tensor(request.round) for name in sent}
        kept |= {f"{_MOVED}/{name}": torch.tensor(by, dtype=torch.float64) for name, by in moved.items()}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self.path) as temporary:
            save_file({name: value.contiguous() for name, value in kept.items()}, temporary)

    def _seen(self) -> Tensors:
        """Return what was stored in this run."""
        return load_file(self.path) if self.path.exists() else {}


def _moved(sent: Parameters, reply: Reply) -> dict[str, float]:
    """Return by how much a reply moves each tensor of encoders, and for every head the most that it moves a head."""
    encoders = _flat(sent.encoders)
    trained = _flat({key: part.tensors for key, part in reply.encoders.items()})
    moved = {name: length(value - encoders[name]) for name, value in trained.items() if value.is_floating_point()}
    most = max((length(part.head - sent.heads[key]) for key, part in reply.heads.items()), default=0.0)
    return moved | (dict.fromkeys(_heads(sent), most) if reply.heads else {})


def _allowance(own: float, trained: int, whole: float | None) -> float:
    """Return by how much a tensor of this length, or a head (None), may have been moved by training so many times.

    ``own`` is by how much the site's own training moved it when the site saw it last.
    """
    rounds = min(trained, MOST_ROUNDS)
    if whole is None:
        return rounds * (REACH * own + HEADS)
    reached, free, most = rounds * REACH * own, rounds * SLACK * (1 + whole), KEPT * whole
    if whole <= LAYER:
        return reached + free
    return min(reached + free, most) if trained > 1 else reached + min(free, most)


def _compared(request: Request) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of a request that are compared with earlier ones, with their flat names."""
    yield from _flat(request.parameters.encoders).items()
    if request.phase.name not in IN_USE:
        yield from _heads(request.parameters).items()


def _is_among(mean: Tensor, heads: list[Tensor]) -> bool:
    """Return whether a mean of heads is as near to the first as one of them is."""
    away = [length(head - heads[0]) for head in heads]
    return bool(away) and length(mean - heads[0]) <= (1 + ROUNDING) * max(away) + ROUNDING


def _scale(numbers: Tensor) -> Tensor:
    """Return the standard deviation of each column [p]; 0 for one with a single value, or none."""
    columns = [column[column.isfinite()].double() for column in numbers.T]
    return torch.tensor([float(column.std(correction=0)) if len(column) else 0.0 for column in columns]).double()


def set_by_the_census(model: Model) -> frozenset[str]:
    """Return the names of an encoder's tensors that the census sets before the first round."""
    parts = (
        (name, part) for name, part in model.body.named_modules() if isinstance(part, Standardise | CountedEmbedding)
    )
    return frozenset(f"{name}.{buffer}" for name, part in parts for buffer, _ in part.named_buffers())


def _flat(parts: Mapping[str, Tensors]) -> Tensors:
    return {f"{key}/{name}": value for key, part in parts.items() for name, value in part.items()}


def _heads(parameters: Parameters) -> Tensors:
    return _flat({key: {_HEAD: head} for key, head in parameters.heads.items()})


def _parameter(name: str) -> str:
    return name.rpartition("/")[2]


def _same(name: str, *known: Mapping[str, Tensor]) -> Tensor | None:
    """Return the tensor of that name, or the common one of which a domain's encoder or head began as a copy."""
    *path, _, parameter = name.split("/")
    common = "/".join([*path, ALL, parameter])
    return next((tensors[each] for tensors in known for each in (name, common) if each in tensors), None)
