"""A common head for balanced classes, and one of each client for its own: Fed-RoD (Chen and Chao 2022).

The common encoder and head are trained with a loss in which each class counts the same at a client, however frequent it
is there: so clients whose classes differ agree on the model. At each client a head of its own is added to the common
one. It is trained on features of the frozen common model with the plain loss, which makes up for the balance and for
what is particular to the client, and it is never sent. A client never seen has the common head alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from feddar.algorithm.protocol import OwnState, Request
from feddar.algorithm.weighting import class_sums, class_weights
from feddar.data.cohort import Cohort
from feddar.models.devices import beside, like
from feddar.models.parameters import Parameters
from feddar.objectives import Objective

ADDED = "added/"
"""What the names of a client's own heads begin with among its own tensors."""


def balanced(request: Request, objective: Objective, data: Cohort) -> Request:
    """Return the request with weights of classes by which each counts the same in these samples; none for a number."""
    if objective.class_marks(data.y) is None:
        return request
    weights = class_weights(class_sums(objective, data, least=0))
    return replace(request, class_weights=beside(weights, next(iter(request.parameters.heads.values()))))


def with_added_heads(parameters: Parameters, own: OwnState) -> Parameters:
    """Return the parameters with a client's own heads added to the common ones of the same keys."""
    heads = {key: head for key, head in parameters.heads.items() if ADDED + key in own.extra}
    return parameters.changed({}, {key: head + like(own.extra[ADDED + key], head) for key, head in heads.items()})


def with_own_heads(own: OwnState, common: Mapping[str, Tensor], trained: Mapping[str, Tensor]) -> OwnState:
    """Return a client's own state with heads that make ``trained`` of the common ones."""
    return own.changed(extra={ADDED + key: head - common[key] for key, head in trained.items()})
