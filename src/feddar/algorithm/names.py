"""The flat names of tensors in messages, checkpoints and error messages.

Only this module knows these names; elsewhere tensors are fields of objects. A name is ``encoder/KEY/PARAMETER`` or
``heads/KEY``; sums that belong to a head are ``curvature/KEY``, ``slope/KEY`` and so on; what has no key is one word.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from feddar.algorithm.protocol import OwnState, Reply, Request, TrainedEncoder, TrainedHead
from feddar.algorithm.state import ServerState
from feddar.models.parameters import Parameters, Tensors

ENCODER, HEADS, TARGET = "encoder", "heads", "target"
CURVATURE, CURVED = "curvature", "curved"
EVIDENCE = ("slope", "bend", "residuals", "gram")
DOMAIN_WEIGHTS, MEAN_HEAD, SCORE_RANGE, SCORES = "domain_weights", "mean_head", "focus", "scores"
WEIGHT_SCALE, CLASS_WEIGHTS, LABEL_RATES = "weight_scale", "class_weights", "label_rates"
COMPONENTS = "components"
TRAINED, TRAINED_ENCODER, AVERAGED = "trained", "trained_encoder", "averaged"
SHARES, SPREADS, LAST_TALLY = "domain_shares", "spreads", "last_tally"
DIRECTIONS, CANDIDATES, DOMAIN_SPREADS, DIFFERENCE, BLEND = (
    "directions", "candidates", "domain_spreads", "difference", "blend",
)  # fmt: skip


def key_of(name: str) -> str:
    """Return the key in a flat name, for example ``3`` in ``heads/3``."""
    return name.split("/")[1]


def named_parameters(parameters: Parameters) -> Tensors:
    """Return parameters under their flat names."""
    encoders = _named_encoders(ENCODER, parameters)
    heads = {f"{HEADS}/{key}": head for key, head in parameters.heads.items()}
    return encoders | heads | _given({TARGET: parameters.target})


def parameters_from(named: Mapping[str, Tensor]) -> Parameters:
    """Undo ``named_parameters``; other names are ignored."""
    return Parameters(_encoders(named, ENCODER), _keyed(named, HEADS), named.get(TARGET))


def named_own(own: OwnState) -> Tensors:
    """Return a client's own state under flat names."""
    return named_parameters(own.parameters) | own.extra


def own_from(named: Mapping[str, Tensor]) -> OwnState:
    """Undo ``named_own``."""
    own = parameters_from(named)
    return OwnState(own, {name: value for name, value in named.items() if name not in named_parameters(own)})


def named_state(state: ServerState) -> Tensors:
    """Return the server's state under its flat names: ``heads`` are those in use, ``trained`` those in training."""
    trained: Tensors = {}
    if state.used_heads is not None or state.averaged is not None:
        trained = {f"{TRAINED}/{key}": head for key, head in state.heads.items()}
    if state.averaged is not None:  # its encoders are those in use; its heads may be, and are copied: files refuse
        trained |= _named_encoders(TRAINED_ENCODER, state.in_training)  # a tensor with two names
        trained |= {f"{AVERAGED}/{key}": head.clone() for key, head in state.averaged.heads.items()}
    others = {
        SHARES: state.domain_shares, SPREADS: state.spreads, SCORE_RANGE: state.score_range,
        DOMAIN_SPREADS: state.domain_spreads, DIFFERENCE: state.difference, BLEND: state.blend,
        LAST_TALLY: state.tally, COMPONENTS: state.components,
    }  # fmt: skip
    return named_parameters(state.in_use) | trained | _given(others)


def state_from(named: Mapping[str, Tensor]) -> ServerState:
    """Undo ``named_state``."""
    used, trained, averaged = parameters_from(named), _keyed(named, TRAINED), _keyed(named, AVERAGED)
    encoders = _encoders(named, TRAINED_ENCODER) if averaged else used.encoders
    return ServerState(
        replace(used, encoders=encoders, heads=trained or used.heads),
        replace(used, heads=averaged) if averaged else None,
        used.heads if trained else None,
        named.get(SHARES),
        named.get(SCORE_RANGE),
        named.get(SPREADS),
        named.get(DOMAIN_SPREADS),
        named.get(DIFFERENCE),
        named.get(BLEND),
        named.get(LAST_TALLY),
        named.get(COMPONENTS),
    )


def named_request(request: Request) -> Tensors:
    """Return the tensors of a request under their flat names."""
    others = {
        DOMAIN_WEIGHTS: request.domain_weights, MEAN_HEAD: request.mean_head, SCORE_RANGE: request.score_range,
        SPREADS: request.spreads, DIRECTIONS: request.directions, CANDIDATES: request.candidates,
        WEIGHT_SCALE: request.weight_scale, CLASS_WEIGHTS: request.class_weights, LAST_TALLY: request.tally,
        LABEL_RATES: request.label_rates,
    }  # fmt: skip
    return named_parameters(request.parameters) | _given(others)


def request_tensors(named: Mapping[str, Tensor]) -> dict[str, Any]:
    """Undo ``named_request``: return the fields of a request that hold tensors."""
    return {
        "parameters": parameters_from(named),
        "domain_weights": named.get(DOMAIN_WEIGHTS),
        "mean_head": named.get(MEAN_HEAD),
        "score_range": named.get(SCORE_RANGE),
        "spreads": named.get(SPREADS),
        "directions": named.get(DIRECTIONS),
        "candidates": named.get(CANDIDATES),
        "weight_scale": named.get(WEIGHT_SCALE),
        "class_weights": named.get(CLASS_WEIGHTS),
        "tally": named.get(LAST_TALLY),
        "label_rates": named.get(LABEL_RATES),
    }


def named_reply(reply: Reply) -> Tensors:
    """Return the tensors of a reply under their flat names."""
    encoders = {
        f"{ENCODER}/{key}/{name}": value for key, part in reply.encoders.items() for name, value in part.tensors.items()
    }
    heads: Tensors = {}
    for key, part in reply.heads.items():
        sums = _given({CURVATURE: part.curvature, CURVED: part.curvature_times_head}) | dict(part.evidence)
        heads |= {f"{HEADS}/{key}": part.head} | {f"{name}/{key}": value for name, value in sums.items()}
    return encoders | heads | reply.sums | _given({SCORES: reply.scores})


def named_weights(reply: Reply) -> dict[str, float]:
    """Return the weights of a reply's encoders and heads."""
    parts: dict[str, TrainedEncoder | TrainedHead] = {f"{ENCODER}/{key}": part for key, part in reply.encoders.items()}
    parts |= {f"{HEADS}/{key}": part for key, part in reply.heads.items()}
    return {name: part.weight for name, part in parts.items()}


def reply_from(
    clients: tuple[str, ...], named: Mapping[str, Tensor], weights: Mapping[str, float], loss: float, samples: int
) -> Reply:
    """Undo ``named_reply`` and ``named_weights``; a weight without tensors, or the reverse, is a KeyError."""
    parts = parameters_from(named)
    weighed = {f"{ENCODER}/{key}" for key in parts.encoders} | {f"{HEADS}/{key}" for key in parts.heads}
    for name in sorted(weights.keys() ^ weighed):
        raise KeyError(name)
    # safetensors keeps no order but the JSON weights do. The order decides the last bits of sums over keys.
    order = [name.split("/", 1) for name in weights]
    encoders = {key: _encoder(key, parts.encoders[key], weights) for group, key in order if group == ENCODER}
    heads = {key: _head(key, parts.heads[key], named, weights) for group, key in order if group == HEADS}
    reply = Reply(clients, encoders, heads, {}, named.get(SCORES), loss, samples)
    sums = {name: value for name, value in named.items() if name not in named_reply(reply)}
    return replace(reply, sums=sums)


def _encoder(key: str, tensors: Tensors, weights: Mapping[str, float]) -> TrainedEncoder:
    return TrainedEncoder(tensors, weights[f"{ENCODER}/{key}"])


def _head(key: str, head: Tensor, named: Mapping[str, Tensor], weights: Mapping[str, float]) -> TrainedHead:
    evidence = {name: named[f"{name}/{key}"] for name in EVIDENCE if f"{name}/{key}" in named}
    curvature, curved = named.get(f"{CURVATURE}/{key}"), named.get(f"{CURVED}/{key}")
    return TrainedHead(head, weights[f"{HEADS}/{key}"], curvature, curved, evidence)


def _named_encoders(group: str, parameters: Parameters) -> Tensors:
    return {
        f"{group}/{key}/{name}": value
        for key, tensors in parameters.encoders.items()
        for name, value in tensors.items()
    }


def _encoders(named: Mapping[str, Tensor], group: str) -> dict[str, Tensors]:
    encoders: dict[str, Tensors] = {}
    for name, value in named.items():
        if name.startswith(f"{group}/") and name.count("/") > 1:
            _, key, parameter = name.split("/", 2)
            encoders.setdefault(key, {})[parameter] = value
    return encoders


def _keyed(named: Mapping[str, Tensor], group: str) -> Tensors:
    return {name.removeprefix(f"{group}/"): value for name, value in named.items() if name.startswith(f"{group}/")}


def _given(tensors: Mapping[str, Tensor | None]) -> Tensors:
    return {name: value for name, value in tensors.items() if value is not None}
