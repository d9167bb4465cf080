"""A reply as what adds over sites, and the sum over sites as a reply of several clients.

Parameters are sent as changes, times the number of samples behind them; what is a sum already is sent as it is. So the
sum passes through the same reduction as the reply of a single site.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from feddar.algorithm.names import ENCODER, HEADS, named_reply, named_weights, reply_from
from feddar.algorithm.protocol import Phase, Reply, Request, TrainedEncoder, TrainedHead
from feddar.models.heads import as_blocks, full_matrix
from feddar.models.parameters import Tensors

WEIGHT, LOSS, SAMPLES = "weight", "loss", "samples"
"""Names of the samples behind a group of parameters, and of the training loss and its samples."""
HOLDERS, COLUMN_HOLDERS, LEVEL_HOLDERS = "holders", "column_holders", "level_holders"
"""Names of how many sites hold each domain, each column of numbers, and each level of a category."""
_HELD = {"counts": HOLDERS, "present": COLUMN_HOLDERS, "levels": LEVEL_HOLDERS}
"""The sums of a census of which it is counted how many sites have them."""


def is_change(name: str) -> bool:
    """Return whether a summand is a change of parameters."""
    return name.startswith((f"{ENCODER}/", f"{HEADS}/"))


def summands(request: Request, reply: Reply) -> Tensors:
    """Return what a reply adds to the sum over sites, by flat name."""
    sent = request.parameters
    encoders = {
        key: TrainedEncoder(_changes(part.tensors, sent.encoder(key), part.weight), part.weight)
        for key, part in reply.encoders.items()
    }
    heads = {key: _summand_of_head(request.phase, part, sent.heads[key]) for key, part in reply.heads.items()}
    found = named_reply(replace(reply, encoders=encoders, heads=heads))
    found |= {
        f"{WEIGHT}/{name}": torch.tensor(weight, dtype=torch.float64) for name, weight in named_weights(reply).items()
    }
    found |= {holders: (reply.sums[name] > 0).double() for name, holders in _HELD.items() if name in reply.sums}
    return found | {LOSS: torch.tensor(reply.loss).double(), SAMPLES: torch.tensor(reply.samples)}


def sum_as_reply(request: Request, clients: tuple[str, ...], sums: Tensors, dtypes: Mapping[str, torch.dtype]) -> Reply:
    """Undo ``summands`` for a sum over clients: means of parameters, with their samples, and sums of the rest."""
    weights = {
        name.removeprefix(f"{WEIGHT}/"): float(value) for name, value in sums.items() if name.startswith(f"{WEIGHT}/")
    }
    held = {name: weight for name, weight in weights.items() if weight > 0}
    others = {f"{WEIGHT}/{name}" for name in weights} | {LOSS, SAMPLES}
    silent = _without_samples(sums, weights)
    kept = {
        name: value if dtypes[name].is_floating_point else value.round().to(dtypes[name])
        for name, value in sums.items()
        if name not in others and _group_of(name) not in silent
    }
    reply = reply_from(clients, kept, held, float(sums[LOSS]), round(float(sums[SAMPLES])))
    sent = request.parameters
    encoders = {key: replace(part, tensors=_means(part, sent.encoder(key))) for key, part in reply.encoders.items()}
    heads = {
        key: replace(part, head=part.head / part.weight + sent.heads[key].double()) for key, part in reply.heads.items()
    }
    return replace(reply, encoders=encoders, heads=heads)


def _without_samples(sums: Tensors, weights: Mapping[str, float]) -> set[str]:
    """Return the groups of which nobody who answered has samples: their weight, or all that was summed, is 0."""
    summed: dict[str, bool] = {}
    for name, value in sums.items():
        group = _group_of(name)
        if "/" in name and group not in weights:
            summed[group] = summed.get(group, False) or bool(value.any())
    silent = {group for group, weight in weights.items() if not weight > 0}
    return silent | {group for group, found in summed.items() if not found}


def _group_of(name: str) -> str:
    """Return which encoder or head a tensor is of, or a sum over the samples of."""
    kind, _, rest = name.partition("/")
    return f"{ENCODER}/{rest.split('/')[0]}" if kind == ENCODER else f"{HEADS}/{rest}"


def domains_of(names: Iterable[str]) -> list[int]:
    """Return the domains that some summands are of alone: their encoders and heads, and sums of second order."""
    groups = (_group_of(name.removeprefix(f"{WEIGHT}/")) for name in names if "/" in name)
    keys = {group.partition("/")[2] for group in groups}
    return sorted(int(key) for key in keys if key.isdecimal())


def _changes(trained: Tensors, sent: Tensors, weight: float) -> Tensors:
    return {name: _change(value, sent[name], weight) for name, value in trained.items()}


def _change(trained: Tensor, sent: Tensor, weight: float) -> Tensor:
    """Return the change times the weight; 0 for constants that are not finite, which no training changes."""
    return torch.where(sent.isfinite(), (trained.double() - sent.double()) * weight, 0)


def _means(part: TrainedEncoder, sent: Tensors) -> Tensors:
    return {name: value / part.weight + sent[name].double() for name, value in part.tensors.items()}


def _summand_of_head(phase: Phase, part: TrainedHead, sent: Tensor) -> TrainedHead:
    curved = None
    if phase.curvature is not None and part.curvature is not None:
        curved = full_matrix(part.curvature).double() @ as_blocks(phase.curvature, part.head).double()
    return replace(part, head=_change(part.head, sent, part.weight), curvature_times_head=curved)
