"""Checks of replies: what no site with such samples would send is a ``MessageError`` that says what it is."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from feddar.algorithm.label_shift import LABELS
from feddar.algorithm.names import CURVATURE, ENCODER, HEADS, key_of, named_reply, named_weights
from feddar.algorithm.offsets import MOMENTS
from feddar.algorithm.pooling import CURVATURE as POOLED_CURVATURE
from feddar.algorithm.pooling import ERRORS
from feddar.algorithm.protocol import BLENDS, TALLY, VALIDATION, Reply, Request
from feddar.algorithm.spreads import directions_sent
from feddar.algorithm.weighting import CLASSES, WEIGHTS
from feddar.algorithm.wire import MessageError
from feddar.federation.privacy.norm_bound import length
from feddar.federation.rehearsal import ReplyFormat
from feddar.federation.study import Study
from feddar.models.heads import full_matrix
from feddar.models.model import Model
from feddar.models.parameters import Tensors

LARGEST_GROWTH = 1000.0
"""A reply is refused if a tensor's norm is larger than this factor times 1 + the norm of the tensor that was sent."""
ROUNDING = 1e-6
"""Sums of weights are compared up to this share."""
LARGEST_BY_LOSS = 1e30
"""Where sites count by a factor, as of their loss, which has any units, it may be so large."""
LARGEST = 1e100
"""Sums whose norm is larger are refused: no measurements give them, and adding them to others could overflow."""


def require_tensors(form: ReplyFormat, tensors: Tensors) -> None:
    """Refuse tensors with other names, shapes or types than expected."""
    found = {name: (tuple(value.shape), value.dtype) for name, value in tensors.items()}
    if found.keys() != form.tensors.keys():
        odd = sorted(found.keys() ^ form.tensors.keys())[0]
        raise MessageError(f"it sent {'no' if odd in form.tensors else 'an unexpected'} '{odd}'")
    for name, expected in form.tensors.items():
        if found[name] != expected:
            raise MessageError(f"it sent '{name}' as {found[name]} instead of {expected}")


def require_counts(
    form: ReplyFormat, reply: Reply, counts: Tensor, masses: Tensor | None = None, *, by_factor: bool = False
) -> None:
    """Refuse weights other than the numbers of samples, or their masses [M], that the site reported in the census.

    With ``by_factor`` they are these times a factor that only the site knows (``Phase.counts_by_factor``).
    """
    total, weights = int(counts.sum()), named_weights(reply)
    told = counts if masses is None else masses
    for key in {**dict.fromkeys(form.weights), **weights}:
        which = key_of(key)
        reported = (told.sum() if which == "all" else told[int(which)]).item() if key in form.weights else 0
        weight = weights.get(key)
        if not (_may_be_by_factor(weight, reported) if by_factor else _is_told(weight, reported, exact=masses is None)):
            raise MessageError(f"it sent the weight {weight} for '{key}', and has told of {reported}")
    _require_samples(form, reply, total)


def require_parts(form: ReplyFormat, reply: Reply, counts: Tensor, masses: Tensor | None = None) -> None:
    """Refuse weights of learned components that do not add up to the samples, or their masses, of the census."""
    weights, told = named_weights(reply), float((counts if masses is None else masses).sum())
    if {*weights} != {*form.weights}:
        raise MessageError("it did not send each component")
    for group in {name.partition("/")[0] for name in weights}:
        parts = [weight for name, weight in weights.items() if name.startswith(f"{group}/")]
        if min(parts) < 0 or not math.isclose(sum(parts), told, rel_tol=ROUNDING):
            raise MessageError(f"it sent components of {sum(parts):g} samples, and has told of {told:g}")
    _require_samples(form, reply, int(counts.sum()))


def _require_samples(form: ReplyFormat, reply: Reply, told: int) -> None:
    if reply.samples != told * form.samples:
        raise MessageError(f"it sent a loss over {reply.samples}, and has told of {told} samples")


def _is_told(weight: float | None, told: float, *, exact: bool) -> bool:
    """Return whether a weight is what was told: to the number, or for sums of weights up to rounding."""
    return weight == told if exact else weight is not None and math.isclose(weight, told, rel_tol=ROUNDING)


def _may_be_by_factor(weight: float | None, told: float) -> bool:
    """Return whether the weight of a site, or of several, may be what was told times factors of losses."""
    return weight is not None and 0 <= weight <= LARGEST_BY_LOSS * told


def require_census(tensors: Tensors, most: int) -> None:
    """Refuse a census whose sums are impossible for any samples, or of more than ``most``."""
    counts = tensors["counts"].double()
    if not 0 < float(counts.sum()) <= most:
        raise MessageError(f"it told of {float(counts.sum()):.0f} samples, and may have from 1 to {most:,}")
    levels = tensors.get("levels", torch.zeros(0))
    if bool(((levels < 0) | (levels > counts.sum()) | (levels != levels.round())).any()):
        raise MessageError("it told counts of levels that no samples have")
    weights, classes = tensors.get(WEIGHTS, counts), tensors.get(CLASSES)
    if bool(((weights < 0) | ((counts == 0) & (weights > 0))).any()) or not bool(weights.sum() > 0):
        raise MessageError("it told sums of weights that no samples have")
    if classes is not None and not (
        bool((classes >= 0).all()) and torch.allclose(classes.sum(1), weights.sum(), rtol=ROUNDING)
    ):
        raise MessageError("it told sums of classes that no samples have")
    labels = tensors.get(LABELS)
    if labels is not None and not (
        bool((labels >= 0).all()) and torch.allclose(labels.sum(2), weights.double()[:, None], rtol=ROUNDING)
    ):
        raise MessageError("it told sums of classes by domain that no samples have")
    sums = [tensors["target"].unbind()] if "target" in tensors else []
    sums += [(tensors["present"], tensors["sum"], tensors["squares"])] if "sum" in tensors else []
    for number, total, squares in sums:
        # For any samples, (sum of x)^2 <= n * (sum of x^2).
        if bool(((number < 0) | (number > counts.sum()) | (total.square() > number * squares * (1 + 1e-6))).any()):
            raise MessageError("it told sums that no samples have")


def require_validation(sums: Tensor, blends: Tensor | None, most: Tensor) -> None:
    """Refuse losses below 0, without samples, or of more than ``most`` of a domain [M]; ``blends`` are losses, too."""
    loss, count = sums.unbind(1)
    whole = bool(((count == count.round()) & (count >= 0) & (count <= most)).all())
    others = torch.zeros(0) if blends is None else blends
    odd = bool((others < 0).any()) or (not bool(count.any()) and bool(others.any()))
    if odd or not whole or bool(((loss < 0) | ((count == 0) & (loss > 0))).any()):
        raise MessageError("it told validation losses that no samples have")


def require_tally(reply: Reply) -> None:
    """Refuse sums for the weights of sites that no site has: all of them are of numbers that are not below 0."""
    if TALLY in reply.sums and bool((reply.sums[TALLY] < 0).any()):
        raise MessageError(f"it sent '{TALLY}' with numbers below 0")


def require_errors(errors: Tensor, number: int, *, exact: bool = True) -> None:
    """Refuse a sum of squared errors below 0, or not over ``number``; without ``exact``, not over at most so many."""
    squares, count = errors.tolist()
    if squares < 0 or not (count == number if exact else 0 < count <= number):
        raise MessageError(f"it sent '{ERRORS}' over {count:g}, and has told of {number}, or squares below 0")


def require_moments(moments: Tensor, request: Request, held: int, model: Model) -> None:
    """Refuse sums over corrections that no most probable ones have: with them, spreads could end anywhere."""
    along = directions_sent(request.directions, model.outputs, model.width)
    constants, slopes = along.constants, along.matrix.shape[1] - along.constants
    numbers = torch.tensor([constants, slopes, held * constants, held * slopes], dtype=torch.float64)
    counts = moments[:, 2]
    if not torch.equal(counts, numbers):
        raise MessageError(f"it sent '{MOMENTS}' over {counts.tolist()} corrections, and has {numbers.tolist()}")
    _require_possible(moments, request)


def _require_possible(moments: Tensor, request: Request) -> None:
    """Refuse squares and variances of corrections below 0, and variances above those of the spreads that were sent."""
    squares, variances, counts = moments.unbind(1)
    # No samples make corrections less certain than they were before.
    assert request.spreads is not None  # an offsets request always has them
    most = counts * request.spreads.double().square() * (1 + 1e-6)
    if bool(((counts < 0) | (squares < 0) | (variances < 0) | (variances > most)).any()):
        raise MessageError(f"it sent '{MOMENTS}', which no corrections have")


def require_sum(
    request: Request, reply: Reply, counts: Tensor, study: Study, *, exact: bool, masses: Tensor | None = None
) -> None:
    """Refuse a sum over sites that no sites of the study with ``counts`` samples of each domain [M] together have.

    With ``exact`` all of them have answered; else their samples are at most so many. ``masses`` [M] are the sums of
    their weights, if samples have some.
    """
    total = int(counts.sum())
    for name, weight in {**named_weights(reply), "samples": float(reply.samples)}.items():
        key = key_of(name) if "/" in name else "all"
        told = counts if masses is None or "/" not in name else masses
        learned = request.phase.assigns is not None and key != "all"
        most = (told.sum() if key == "all" or learned else told[int(key)]).item()
        fits = (
            _may_be_by_factor(weight, most)
            if request.phase.counts_by_factor and "/" in name
            else _is_told(weight, most, exact=masses is None)
            if exact and "/" in name and not learned
            else 0 <= weight <= most * (1 + ROUNDING if learned or masses is not None else 1)
        )
        if not fits:
            raise MessageError(f"it is over {weight:g} samples for '{name}', and sites have told of {most}")
    if not math.isfinite(reply.loss):
        raise MessageError(f"its loss is {reply.loss}")
    sums = {name: value for name, value in named_reply(reply).items() if not name.startswith((ENCODER, HEADS))}
    for name, value in sums.items():
        require_size(name, value, None)
    require_tally(reply)
    match request.phase.name:
        case "census":
            require_census(reply.sums, study.facts.max_rows * len(reply.clients))
        case "pool":
            require_errors(reply.sums[ERRORS], total * _outputs(request), exact=exact)
        case "offsets":
            _require_possible(reply.sums[MOMENTS], request)
        case "validate":
            held = study.most_validated(counts, len(reply.clients))
            require_validation(reply.sums[VALIDATION], reply.sums.get(BLENDS), held)


def _outputs(request: Request) -> int:
    """Return the number of outputs of the heads in a request."""
    return len(next(iter(request.parameters.heads.values())))


def _require_curvature(name: str, value: Tensor) -> None:
    """Refuse a matrix that is not positive semidefinite: with it, aggregated heads could end anywhere."""
    matrix = full_matrix(value)
    size = matrix.diagonal(dim1=-2, dim2=-1).mean(-1).abs()[..., None, None]
    lifted = matrix + (1e-6 * size + 1e-12) * torch.eye(matrix.shape[-1], dtype=matrix.dtype)
    if bool(torch.linalg.cholesky_ex(lifted).info.any()):
        raise MessageError(f"it sent '{name}', which is not the curvature of any loss")


def require_size(name: str, value: Tensor, sent: Tensor | None) -> None:
    """Refuse a tensor that is too large to be the result of training from what was sent."""
    if not value.is_floating_point():
        if bool((value < 0).any()):
            raise MessageError(f"it sent '{name}' with counts below 0")
        return
    after = length(value)
    if sent is None:
        if not after <= LARGEST:
            raise MessageError(f"it sent '{name}' of length {after:.3g}: too large to be measured")
        if name.startswith((f"{CURVATURE}/", f"{POOLED_CURVATURE}/")):
            _require_curvature(name, value)
    elif not after <= LARGEST_GROWTH * (1 + length(sent)):
        raise MessageError(
            f"it sent '{name}' of length {after:.3g}, which was {length(sent):.3g}: too large to be trained"
        )
