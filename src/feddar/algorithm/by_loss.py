"""Clients that count by their loss: q-FFL (Li et al. 2020, their q-FedAvg).

The goal is sum_k n_k F_k^(q+1) / (q + 1): the larger q, the more a client counts whose loss F_k is large. Its step of
local training, w - w_k, is the gradient in units of 1 / L, and with

    Delta_k = F_k^q L (w - w_k)        h_k = q F_k^(q-1) |L (w - w_k)|^2 + L F_k^q

the next model is w - sum_k n_k Delta_k / sum_k n_k h_k. That is the average, weighted by n_k h_k, of w - Delta_k / h_k;
so a client sends these two, and replies add as they always do. L is 1 over the learning rate, the same for all clients,
and cancels from the weights: with s_k = 1 + q G_k / F_k and G_k = L |w - w_k|^2 they are

    w - Delta_k / h_k = w - (w - w_k) / s_k        n_k h_k / L = n_k F_k^q s_k.

G_k is by how much a small step of gradient descent lowers the loss. Steps of Adam have a length of their own that says
nothing of the gradient, and would make s_k so large that nothing is learned: there G_k is by how much the client's
training has lowered its loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from feddar.algorithm.local_training import domain_risks
from feddar.algorithm.protocol import Reply, Request
from feddar.data.cohort import Cohort
from feddar.models.devices import beside, exact, like
from feddar.models.model import Model
from feddar.models.parameters import Parameters, Tensors

SMALLEST = 1e-10
"""What is added to a loss, which may be 0, before it is a divisor; so does the code of the paper."""


def loss_of(model: Model, request: Request, parameters: Parameters, data: Cohort) -> Tensor:
    """Return a client's loss F_k under these parameters, as it is trained on: with weights of domains, if any."""
    sums, count = domain_risks(model, request, parameters, data).unbind(1)
    if request.domain_weights is not None:
        sums = sums * beside(request.domain_weights, sums)
    return sums.sum() / count.sum().clamp_min(SMALLEST) + SMALLEST


def counted_by_loss(model: Model, request: Request, reply: Reply, data: Cohort, loss: Tensor) -> Reply:
    """Return the reply of a client with loss F_k as w - Delta_k / h_k, with the weight n_k h_k / L."""
    step = 1 + request.phase.q * _gain(model, request, reply, data, loss) / loss
    factor = float(loss**request.phase.q * step)
    sent, names = request.parameters, _trainable(model)

    def shorter(before: Tensor, after: Tensor) -> Tensor:
        return before + (after - before) / like(step, after)

    def shortened(before: Tensors, after: Tensors) -> Tensors:
        return after | {name: shorter(before[name], after[name]) for name in names if name in after}

    encoders = {
        key: replace(part, tensors=shortened(sent.encoder(key), part.tensors), weight=part.weight * factor)
        for key, part in reply.encoders.items()
    }
    heads = {
        key: replace(part, head=shorter(sent.heads[key], part.head), weight=part.weight * factor)
        for key, part in reply.heads.items()
    }
    return replace(reply, encoders=encoders, heads=heads)


def _gain(model: Model, request: Request, reply: Reply, data: Cohort, loss: Tensor) -> Tensor:
    """Return G_k: L |w - w_k|^2 of gradient descent, else by how much the loss is lower than before; 0 or more."""
    if request.phase.optimizer != "sgd":
        encoders = {key: request.parameters.encoder(key) | part.tensors for key, part in reply.encoders.items()}
        heads = {key: part.head for key, part in reply.heads.items()}
        trained = request.parameters.changed(encoders, heads)
        return (loss - loss_of(model, request, trained, data)).clamp_min(0)
    squares = [exact(after - before).square().sum() for before, after in _trained(model, request.parameters, reply)]
    return torch.stack(squares).sum() / (request.phase.lr or 1.0)  # without a rate nothing moves


def _trained(model: Model, sent: Parameters, reply: Reply) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield what was trained, before and after: heads, and encoders without their averages of batch norm."""
    yield from ((sent.heads[key], part.head) for key, part in reply.heads.items())
    for key, part in reply.encoders.items():
        yield from ((sent.encoder(key)[name], part.tensors[name]) for name in _trainable(model))


def _trainable(model: Model) -> list[str]:
    return [name for name, _ in model.body.named_parameters()]
