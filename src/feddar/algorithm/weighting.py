"""Weights of samples and of classes (docs/method.md, section Weights of samples and of classes).

The loss of a sample is multiplied by its weight times the weight of its class. Sums over samples are weighted by these
with weights of mean 1 over all clients; training at a client by the same with weights of mean 1 there, and the client
counts in averages with its sum of weights, its *mass*. Where there are no weights, nothing is multiplied.
"""

from __future__ import annotations

import torch
from torch import Tensor

from feddar.algorithm.protocol import Request
from feddar.data.cohort import Cohort
from feddar.errors import UserError
from feddar.models.devices import beside, moved
from feddar.models.heads import by_output
from feddar.models.model import Model
from feddar.objectives import Objective
from feddar.settings import Settings

WEIGHTS, CLASSES = "weights", "class_sums"
"""The names of two sums of a census: weights by domain, [M], and by class, [questions, classes]."""
WEIGHED = ("heads", "encoder", "together", "personal", "pool", "offsets", "validate")
"""The phases whose losses are weighted."""


def loss_weights(request: Request, objective: Objective, data: Cohort) -> Tensor | None:
    """Return w_j c_y(j) of each sample in float64, with w of mean 1 over all clients; None if there are no weights.

    It is [n], or [n, outputs] for class weights of several outcomes.
    """
    own, classes = _scaled(request, data), request.class_weights
    if classes is None:
        return own
    marks = objective.class_marks(data.y)
    if marks is None:
        raise UserError(NO_CLASSES)
    found = (beside(marks, classes) * classes.double()).sum(2)
    found = found[:, 0] if found.shape[1] == 1 else found
    return found if own is None else _times(found, own)


def training_weights(
    request: Request, model: Model, data: Cohort, part: Tensor, parts: int, *, domains: bool
) -> Tensor | None:
    """Return by what the losses of samples are multiplied in training, [n] or [n, outputs]; None if by nothing.

    It is in the model's precision and on its device.

    ``part`` [n] is the set that each sample is trained in: weights have the mean 1 in each of the ``parts`` sets. With
    ``domains``, the weight u_m of the sample's domain is a factor, where the request has them.
    """
    found = loss_weights(request, model.objective, data)
    if found is not None and data.weight is not None:
        masses = masses_of(request, data, part, parts)
        part = beside(part, masses)
        size = torch.bincount(part, minlength=parts)
        found = _times(found, torch.where(masses > 0, size / masses, 0)[part])
    if domains and request.domain_weights is not None:
        shares = request.domain_weights[beside(data.domain, request.domain_weights)]
        found = shares if found is None else _times(found, shares)
    return None if found is None else moved(found.to(model.dtype), model.device)


def masses_of(request: Request, data: Cohort, part: Tensor, parts: int) -> Tensor:
    """Return the sum of weights in each part of the samples, [parts]: the number of samples if there are no weights."""
    weight = _scaled(request, data)
    if weight is None:
        return torch.bincount(part, minlength=parts)
    return weight.new_zeros(parts).index_add(0, beside(part, weight), weight)


def mass_of(request: Request, data: Cohort, rows: Tensor) -> float:
    """Return the sum of weights of these samples: their number if there are no weights."""
    weight = _scaled(request, data)
    return float(len(rows)) if weight is None else float(weight[beside(rows, weight)].sum())


def class_weights(sums: Tensor) -> Tensor:
    """Return n / (C n_c) from the sums of weights n_c by class [questions, C]; 0 for classes that do not occur.

    >>> class_weights(torch.tensor([[90.0, 10.0]]))
    tensor([[0.5556, 5.0000]])
    """
    held = sums > 0
    return torch.where(held, sums.sum(1, keepdim=True) / (held.sum(1, keepdim=True) * sums), 0)


def class_sums(objective: Objective, data: Cohort, least: int) -> Tensor:
    """Return the sums of weights by class, [questions, classes], as they may be sent.

    A class of fewer than ``least`` patients, or of none, is told as (least - 1) / 2 samples of mean weight, and the
    largest class takes the difference; if none has so many, all classes are told to be alike.
    """
    marks = objective.class_marks(data.y)
    if marks is None:
        raise UserError(NO_CLASSES)
    weight = torch.ones(len(data), dtype=torch.float64) if data.weight is None else data.weight
    sums = torch.einsum("n,nqc->qc", weight, marks.double())
    hidden = max(least - 1, 0) / 2 * weight.sum() / max(len(data), 1)
    return torch.stack([
        _told(row, torch.tensor([data.patients(mark) for mark in asked]), hidden, least)
        for row, asked in zip(sums, marks.permute(1, 2, 0), strict=True)
    ])  # fmt: skip


def _told(sums: Tensor, patients: Tensor, hidden: Tensor, least: int) -> Tensor:
    """Return the sums of one question's classes as they may be sent; their total is what it was."""
    few, largest = patients < least, int(patients.argmax())
    if not bool(few.any()):
        return sums
    if bool(few[largest]):
        return torch.full_like(sums, float(sums.sum()) / len(sums))
    told = torch.where(few, hidden.minimum(sums.sum() / len(sums)), sums)
    told[largest] = 0
    told[largest] = sums.sum() - told.sum()
    return told


def require_classes(objective: Objective, settings: Settings) -> None:
    """Refuse class weights, and rates of labels, for an outcome that has no classes."""
    if objective.class_marks(objective.blank(1)) is not None:
        return
    if settings.class_weight is not None:
        raise UserError(NO_CLASSES)
    if settings.label_shift:
        raise UserError("label_shift is for classes, and what is predicted here is a number: leave it out.")


NO_CLASSES = "class_weight is for classes, and what is predicted here is a number: leave it out."


def scale_and_masses(counts: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scale of weights with which their mean over all samples is 1, and the mass of each domain [M]."""
    total = float(weights.sum())
    if not total > 0:
        raise UserError("all samples that are left to train on have the weight 0: give some of them a weight.")
    scale = counts.sum().double() / total
    return scale, weights * scale


def _scaled(request: Request, data: Cohort) -> Tensor | None:
    """Return the weights of samples [n] with mean 1 over all clients; None if there are none."""
    if data.weight is None or request.weight_scale is None:
        return data.weight
    return data.weight * request.weight_scale


def _times(weight: Tensor, factor: Tensor) -> Tensor:
    """Return weights [n] or [n, outputs] times a factor [n] of each sample."""
    return weight * (factor if weight.dim() == 1 else by_output(factor))
