"""Clients that count by their loss, round after round: agnostic federated learning (Mohri et al. 2019) over clients.

The goal is the worst mixture of clients, min over w of max over l of sum_k l_k F_k(w). The weights l ascend by
exponentiated gradient from the clients' shares of samples: after a round l_k is multiplied by exp(step F_k), with F_k
the client's loss under the parameters sent, and all are divided by their sum. Nobody but the client knows its weight:
its reply counts n_k exp(a_k), which the average divides by its sum, and its next a_k is

    a_k + step (F_k - F),    F = sum_k n_k exp(a_k) F_k / sum_k n_k exp(a_k).

F is the same for all, and only keeps the weights in range. Its two sums are in the replies, and the next request brings
them back.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from feddar.algorithm.protocol import TALLY, OwnState, Reply, Request

ASCENT = "ascent"
"""The name of what a client keeps: a_k and F_k of the last round that it trained in, [2]."""
LARGEST = 40.0
"""a_k is kept between this and minus this, so that no sum of what is multiplied by exp(a_k) is out of range."""


def counted_by_ascent(
    request: Request, reply: Reply, own: OwnState, loss: Tensor, mass: float
) -> tuple[Reply, OwnState]:
    """Return the reply of a client with loss F_k and n_k samples, with n_k exp(a_k) as its weight, and its next state.

    ``mass`` is n_k, or the sum of the samples' weights.
    """
    log_weight, now = _ascended(request, own), float(loss)
    factor = math.exp(log_weight)
    told = torch.tensor([mass * factor * now, mass * factor], dtype=torch.float64)
    kept = torch.tensor([log_weight, now], dtype=torch.float64)
    counted = replace(weighed(reply, factor), sums=reply.sums | {TALLY: told})
    return counted, own.changed(extra={ASCENT: kept})


def _ascended(request: Request, own: OwnState) -> float:
    """Return a_k after a step along the loss that the client was at last, if it was there and others' loss is known."""
    log_weight, loss = own.extra[ASCENT].tolist() if ASCENT in own.extra else (0.0, 0.0)
    if ASCENT in own.extra and request.tally is not None:
        total, weight = request.tally.tolist()
        log_weight += request.phase.agnostic * (loss - total / weight if weight > 0 else 0.0)
    return min(max(log_weight, -LARGEST), LARGEST)


def weighed(reply: Reply, factor: float) -> Reply:
    """Return the reply with weights times a factor."""
    encoders = {key: replace(part, weight=part.weight * factor) for key, part in reply.encoders.items()}
    heads = {key: replace(part, weight=part.weight * factor) for key, part in reply.heads.items()}
    return replace(reply, encoders=encoders, heads=heads)
