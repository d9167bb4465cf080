"""Which phases a round has, by the method's row and the settings.

A run is a series of stages (warm-up with FedAvg, then the method), a stage is a method row for some rounds, and a round
is one phase (``together``) or two (``heads``, then ``encoder``: Algorithm 1 of the paper).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from feddar.algorithm.protocol import Phase
from feddar.algorithm.spreads import LARGEST_POOLED
from feddar.methods import Method
from feddar.models.model import Model
from feddar.objectives import Objective
from feddar.settings import Settings


def census(settings: Settings, objective: Objective) -> Phase:
    """Return the phase before the first round, in which clients count their samples."""
    standardised = settings.bias if settings.standardise_target is None else settings.standardise_target
    return Phase(
        "census",
        target=standardised and objective.in_units,
        class_weight=settings.class_weight is not None,
        label_shift=settings.row().label_shift,
    )


def planned(settings: Settings, objective: Objective, round_number: int) -> tuple[Phase, ...]:
    """Return all phases that the coordinator may send in a round of a run between sites; round 0 is the census."""
    if round_number == 0:
        return (census(settings, objective),)
    method = settings.row_in(round_number)
    own, trained = Phase("adopt", *method.used), phases(method, settings, objective, round_number)
    fitted = (
        *((pool(method),) if method.credible or method.closed_form else ()),
        *((offsets(method),) if method.site_offset else ()),
        *((label_shift(method),) if method.label_shift else ()),
    )
    validated = (evaluation("validate", method),) if settings.validation else ()
    return own, *trained, *fitted, *validated, evaluation("measure", method)


def is_planned(phase: Phase, settings: Settings, objective: Objective, round_number: int) -> bool:
    """Return whether the coordinator may send a phase in a round: heads may be trained for fewer epochs by evidence."""
    if round_number and phase.name == "heads" and settings.row_in(round_number).by_evidence and phase.epochs >= 1:
        phase = replace(phase, epochs=max(phase.epochs, settings.head_epochs))
    return phase in planned(settings, objective, round_number)


def pool(method: Method) -> Phase:
    """Return the phase after training in which clients send what partial pooling of heads needs, or a closed form."""
    if method.closed_form:
        return Phase("pool", method.encoder, method.heads, curvature="gram")
    return Phase("pool", *method.used)


def is_pooled(method: Method, model: Model) -> bool:
    """Return whether heads are pooled number by number, which is for heads that are not too large."""
    return method.credible and model.outputs * model.width <= LARGEST_POOLED


def offsets(method: Method) -> Phase:
    """Return the phase after training in which clients fit corrections of their own."""
    return Phase("offsets", *method.used)


def label_shift(method: Method) -> Phase:
    """Return the phase after training in which clients correct their scores by their rates of labels."""
    return Phase("label-shift", *method.used)


def evaluation(name: Literal["validate", "evaluate", "measure"], method: Method) -> Phase:
    """Return the phase in which clients score samples held out, with their own corrections if the method has them.

    In ``validate`` these are the samples that choose the round in use, in the others the test samples.
    """
    offset, added = method.corrected, method.decoupled
    return Phase(name, *method.used, offsets=offset, added_heads=added, assigns=method.assigns)


def phases(method: Method, settings: Settings, objective: Objective, round_number: int) -> tuple[Phase, ...]:
    """Return the training phases of a round of that method."""
    factor = settings.lr_factor(round_number)
    curvature = (settings.curvature or objective.default_curvature) if method.second_order else None
    tuning_lr = settings.rate * settings.tune_factor
    both = Phase(
        "together",
        method.encoder,
        method.heads,
        epochs=settings.encoder_epochs,
        lr=(tuning_lr if method.start else settings.rate) * factor,
        optimizer=settings.optimizer,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
        batch_size=settings.samples_in_batch,
        curvature=curvature,
        curvature_at=settings.curvature_at,
        mu=settings.mu if method.proximal else 0.0,
        q=settings.q if method.by_loss else 0.0,
        agnostic=settings.minmax_lr if method.own_weight == "agnostic" else 0.0,
        fair=settings.beta if method.own_weight == "fair" else 0.0,
        assigns=method.assigns,
        private_norm=method.private_norm,
        risks=method.minmax,
        balanced=method.decoupled,
    )
    common: tuple[Phase, ...] = (both,)
    head_lr = (settings.head_lr or settings.rate) * factor
    heads = replace(both, name="heads", epochs=settings.head_epochs, lr=head_lr, risks=False)
    if method.alternating:
        common = (heads, replace(both, name="encoder", curvature=None))
    if method.decoupled:
        return *common, replace(heads, name="personal", curvature=None, balanced=False, added_heads=True)
    own = replace(both, name="personal", encoder="client", heads="client", curvature=None, risks=False, mu=0.0, q=0.0)
    own = replace(own, agnostic=0.0, fair=0.0)
    match method.companion:
        case "tuned":
            return *common, Phase("adopt", "client", "client"), replace(own, epochs=1, lr=tuning_lr * factor)
        case "pulled":
            return *common, replace(own, mu=settings.mu)
        case "mixed":
            return *common, replace(own, mix=settings.mix)
        case None:
            return common
