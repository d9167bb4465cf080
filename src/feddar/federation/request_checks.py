"""Checks of requests: what no run of the study asks of a site is a ``RefusedError`` that says what it is.

A request may be for the scores of single samples, or bring parameters that no model of the study has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from feddar.algorithm.by_gap import size_of_tally
from feddar.algorithm.participation import TRAINING
from feddar.algorithm.protocol import EVERYBODY, SILENT, Request
from feddar.algorithm.rounds import STEPS_TRIED
from feddar.algorithm.schedule import is_planned, is_pooled
from feddar.algorithm.spreads import FIRST_OF_CLIENTS
from feddar.algorithm.weighting import WEIGHED
from feddar.errors import printable
from feddar.federation.influence import TRAINED
from feddar.federation.refused import RefusedError
from feddar.federation.study import Study
from feddar.methods import Method
from feddar.models.model import Model
from feddar.models.parameters import ALL, Tensors, keys

_OTHER = "the model is not that of the study."
_HEAD = "head"
MOST_STEPS = 1000
"""The most steps of a round: a number that is part of the names of files."""
_ROUNDING = 1e-6
LARGEST_CLASS_WEIGHT = 1000.0
"""With a larger one the samples of a class would be alone in a sum, however few they are."""


@dataclass(frozen=True)
class PlannedRequests:
    """The requests that runs of a study have."""

    study: Study
    model: Model
    rows: Tensor
    """The rows of each domain that the site trains on, [M]."""
    classes: Tensor | None = None
    """Whether it trains on rows of each class, [questions, classes]; None if there are no classes."""

    def require(self, request: Request) -> None:
        """Refuse a request that no run of the study has."""
        training = self.study.training
        if request.round > training.rounds or not is_planned(
            request.phase, training, self.model.objective, request.round
        ):
            name = printable(str(request.phase.name))[:50]
            raise RefusedError(f"the study has no such {name} phase in round {str(request.round)[:9]}.")
        if request.step > MOST_STEPS:
            raise RefusedError("no round has so many steps.")
        if request.up_to != EVERYBODY and not (training.trains_a_part and request.phase.name in TRAINING):
            raise RefusedError(f"the study asks all sites in the {request.phase.name} phase of every round.")
        self._require_model(request)
        self._require_weights(request)
        self._require_weights_of_samples(request)
        self._require_planned_extras(request)

    def _require_model(self, request: Request) -> None:
        """Refuse parameters of other names and shapes than the model's, or with values that are not finite."""
        number = self._keys(request)
        heads, encoders = {*request.parameters.heads}, {*request.parameters.encoders}
        if not heads | encoders <= {ALL, *map(str, range(number))} or not self._needed_heads(request) <= heads:
            raise RefusedError(_OTHER)
        if heads | encoders and request.phase.name in ("census", "label-shift"):
            raise RefusedError(f"the {request.phase.name} phase has no model.")
        for values, own in self._parts(request):
            # Constants of an encoder may be infinite, such as an attention mask.
            if values.keys() != own.keys() or any(value.shape != own[name].shape for name, value in values.items()):
                raise RefusedError(_OTHER)
            if not all(bool((value.isfinite() | ~own[name].isfinite()).all()) for name, value in values.items()):
                raise RefusedError("the model has values that are not finite.")
        if any(domain >= len(self.study.facts.domains) for domain in request.withheld):
            raise RefusedError("the study has no such domains to withhold.")

    def _needed_heads(self, request: Request) -> set[str]:
        """Return the keys of the heads without which a request cannot be answered."""
        if request.phase.name in ("census", *SILENT) or request.phase.heads == "client":
            return set()
        return {*keys(request.phase.heads, self._keys(request))}

    def _keys(self, request: Request) -> int:
        """Return how many domains, or components in their place, a model may have in the round of a request."""
        training = self.study.training
        return training.components if training.row_in(request.round).assigns else len(self.study.facts.domains)

    def _parts(self, request: Request) -> Iterator[tuple[Tensors, Tensors]]:
        """Yield each part of the model that a request brings, beside tensors of the shapes that it must have."""
        layers = self.model.body.state_dict()
        yield from ((encoder, layers) for encoder in request.parameters.encoders.values())
        head = torch.zeros(self.model.outputs, self.model.width)
        yield from (({_HEAD: each}, {_HEAD: head}) for each in request.parameters.heads.values())
        others = {
            _HEAD: (request.mean_head, head),
            "weights": (request.domain_weights, torch.zeros(self._keys(request))),
            "range": (request.score_range, torch.zeros(self.model.outputs, 2)),
        }
        yield from (({name: value}, {name: own}) for name, (value, own) in others.items() if value is not None)

    def _require_weights(self, request: Request) -> None:
        """Refuse weights of domains where the study's method has none, or other ones.

        Weights u_m = s_m L / L_m have shares s_m between 1/M and L_m/L (``data.cohort.domain_weights``): none is below
        1/M, but 0 for domains that nobody holds. Those that a method learns may come down to 0.
        """
        weights, row = request.domain_weights, self.study.training.row_in(request.round)
        if weights is None:
            return
        if not row.weighs or request.phase.name not in TRAINED:
            raise RefusedError(f"the study has no weights of domains in the {request.phase.name} phase.")
        few = (weights > 0) & (weights < (1 - _ROUNDING) / len(weights))
        if not _are_sizes(weights) or bool(few.any() and not row.minmax):
            raise RefusedError("the weights of domains are not such as the study's method has.")

    def _require_weights_of_samples(self, request: Request) -> None:
        """Refuse a scale of weights, or weights of classes, where the study has none, and other ones.

        Class weights n / (C n_c) say that class c has the share 1 / (C c_c) of all samples: these add up to 1.
        """
        weighed = request.phase.name in WEIGHED
        scale, classes = request.weight_scale, request.class_weights
        if (scale is not None) != (weighed and self.study.facts.sample_weight is not None) or (
            scale is not None and not (scale.dim() == 0 and _are_sizes(scale) and bool(scale > 0))
        ):
            raise RefusedError(f"the study has no such scale of weights in the {request.phase.name} phase.")
        if (classes is not None) != (weighed and self.study.training.class_weight is not None) or (
            classes is not None and not (classes.shape == self._class_shape() and _are_balanced(classes))
        ):
            raise RefusedError(f"the study has no such weights of classes in the {request.phase.name} phase.")

    def _class_shape(self) -> torch.Size | None:
        """Return the shape of class weights; None if there are no classes."""
        marks = self.model.objective.class_marks(self.model.objective.blank(1))
        return None if marks is None else marks.shape[1:]

    def _tally_shape(self, request: Request) -> tuple[int]:
        """Return the shape of the sums from which sites find weights of their own."""
        return (size_of_tally(len(self.study.facts.domains)) if request.phase.fair else 2,)

    def _are_rates(self, rates: Tensor, row: Method) -> bool:
        """Return whether rates of classes are shares of samples, by domain or over all; 0 of domains without any."""
        shape, rows = self._class_shape(), len(self.study.facts.domains) if row.needs_domain else 1
        if shape is None or rates.shape != (rows, *shape) or not _are_sizes(rates):
            return False
        total = rates.sum(-1)
        return bool(((total == 0) | ((total - 1).abs() <= _ROUNDING)).all())

    def objection(self, request: Request) -> str | None:
        """Return why no run with this site has such a request, for its own people; None if one may have it."""
        weights, row = request.domain_weights, self.study.training.row_in(request.round)
        known = not row.minmax and not row.assigns
        if weights is not None and known and bool((weights[self.rows > 0] == 0).any()):
            return "a domain that this site has rows of is weighted with 0."
        given = request.class_weights
        if given is not None and self.classes is not None and bool((given[self.classes] == 0).any()):
            return "a class that this site has rows of is weighted with 0."
        return None

    def _require_planned_extras(self, request: Request) -> None:
        """Refuse heads to compare, spreads and directions where no run of the study sends them."""
        row, phase = self.study.training.row_in(request.round), request.phase.name
        pooled, size = is_pooled(row, self.model), self.model.outputs * self.model.width
        if phase == "pool" and not (pooled or row.closed_form):
            raise RefusedError("the study's heads are not pooled.")
        if request.mean_head is not None and (phase != "heads" or not row.credible or pooled):
            raise RefusedError("the study's method does not ask for evidence of how far domains differ.")
        heads = len(STEPS_TRIED), len(self.study.facts.domains), self.model.outputs, self.model.width
        if request.candidates is not None and not (
            phase == "validate"
            and pooled
            and request.candidates.shape == heads
            and bool(request.candidates.isfinite().all())
        ):
            raise RefusedError(f"the study has no such heads to compare in the {phase} phase.")
        rates = request.label_rates
        if (rates is not None) != (phase == "label-shift") or not (rates is None or self._are_rates(rates, row)):
            raise RefusedError(f"the study has no such rates of labels in the {phase} phase.")
        spreads, directions = request.spreads, request.directions
        fit = spreads is not None and spreads.shape == FIRST_OF_CLIENTS.shape and _are_sizes(spreads)
        corrected = row.site_offset and (phase == "offsets" or (phase == "pool" and pooled))
        if not (fit if corrected else spreads is None):
            raise RefusedError(f"the study has no such spreads in the {phase} phase.")
        tally = request.tally
        if tally is not None and not (
            request.phase.has_own_weights and tally.shape == self._tally_shape(request) and _are_sizes(tally)
        ):
            raise RefusedError(f"the study has no such sums for the weights of sites in the {phase} phase.")
        slopes = phase == "offsets" and pooled and self.study.training.validation
        if directions is not None and not (
            slopes
            and directions.dim() == 2
            and len(directions) == size >= directions.shape[1]
            and bool(directions.isfinite().all())
        ):
            raise RefusedError(f"the study has no such directions in the {phase} phase.")


def _are_balanced(classes: Tensor) -> bool:
    """Return whether class weights [questions, classes] follow from shares of classes, and single none out."""
    if not _are_sizes(classes) or bool((classes > LARGEST_CLASS_WEIGHT).any()):
        return False
    held = classes > 0
    shares = torch.where(held, 1 / (held.sum(1, keepdim=True) * classes), 0)
    return torch.allclose(shares.sum(1), torch.ones(len(shares), dtype=shares.dtype), rtol=0, atol=_ROUNDING)


def _are_sizes(values: Tensor) -> bool:
    """Return whether values are finite and not negative."""
    return bool((values.isfinite() & (values >= 0)).all())
