"""A site works with a model only if it can have come from training.

Crafted weights can make single patients stand out in a sum over many. Training starts from the model that the study
describes, which a site can make itself, and from round to round moves it about as far as the site's own training does.
Columns are scaled by what the census says, which the site's own column must bear out. A site that joins late can only
compare with the beginning.
"""

from __future__ import annotations

from collections.abc import Mapping
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
"""All sites together may have moved a tensor by so many times the site's own change of it,"""
SLACK = 0.5
"""and in any case, in each round, by this times 1 + its length,"""
LAYER, KEPT = 1.5, 0.95
"""but a tensor longer than this, a layer, by less than all of it: a gate needs layers that are 0 but for one number."""
SCALES = 100.0
"""The scale of a column may be smaller than its own at the site by this factor."""
_MOVED, _ROUND = "moved", "round"


class PlausibleModels:
    """The encoder that a site was sent last in a run, and how far its own training moved it."""

    def __init__(self, folder: Path, model: Model, initial: Parameters | None, data: Cohort) -> None:
        """``initial`` are the parameters that training starts from; None if the site does not have them."""
        self.path = folder / "model-seen.safetensors"
        self.initial = {} if initial is None else _flat(initial.encoders)
        self.counted = set_by_the_census(model)
        self.own_scale = None if data.numbers is None else _scale(data.numbers)

    def objection(self, request: Request) -> str | None:
        """Return why a model cannot have come from training; None if it can."""
        seen = load_file(self.path) if self.path.exists() else {}
        rounds = request.round - int(seen.get(_ROUND, torch.tensor(1))) + 1
        for name, value in _flat(request.parameters.encoders).items():
            if not self._fits(name, value, seen, max(1, rounds)):
                return f"'{_parameter(name)}' of the model is far from what training can have made of the last one."
        return None

    def _fits(self, name: str, value: Tensor, seen: Tensors, rounds: int) -> bool:
        parameter, before = _parameter(name), _same(name, seen, self.initial)
        if parameter in self.counted:
            own = self.own_scale if parameter.endswith(".scale") else None
            return own is None or bool((value.double() * SCALES >= own).all())
        if not value.is_floating_point() or before is None:
            return True
        own, whole = _same(f"{_MOVED}/{name}", seen), length(before)
        free = SLACK * rounds * (1 + whole)
        if whole > LAYER:
            free = min(free, KEPT * whole)
        return length(value - before) <= rounds * REACH * float(0 if own is None else own) + free

    def keep(self, request: Request, reply: Reply) -> None:
        """Store the encoder of a request, and by how much the reply moves it, if there is one in the reply."""
        if not reply.encoders:
            return
        sent, trained = _flat(request.parameters.encoders), _flat({k: e.tensors for k, e in reply.encoders.items()})
        moved = {
            f"{_MOVED}/{name}": torch.tensor(length(value - sent[name]), dtype=torch.float64)
            for name, value in trained.items()
            if value.is_floating_point()
        }
        kept = sent | moved | {_ROUND: torch.tensor(request.round)}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self.path) as temporary:
            save_file({name: value.contiguous() for name, value in kept.items()}, temporary)


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


def _flat(encoders: Mapping[str, Tensors]) -> Tensors:
    return {f"{key}/{name}": value for key, part in encoders.items() for name, value in part.items()}


def _parameter(name: str) -> str:
    return name.rpartition("/")[2]


def _same(name: str, *known: Mapping[str, Tensor]) -> Tensor | None:
    """Return the tensor of that name, or the common one of which a domain's encoder began as a copy."""
    *path, _, parameter = name.split("/")
    common = "/".join([*path, ALL, parameter])
    return next((tensors[each] for tensors in known for each in (name, common) if each in tensors), None)
