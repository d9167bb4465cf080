"""Training by hand: gradient descent on all samples, by autograd in float64, from what a run starts from."""

import torch
from torch import nn

from feddar.algorithm.names import named_state
from feddar.models.model import build_model, seeded
from feddar.settings import Settings

ONE_STEP = {"rounds": 2, "optimizer": "sgd", "lr": 0.3, "batch_size": 10**6, "dtype": "float64"}
"""One step of gradient descent on all samples of each client, in each round."""


def encoder() -> nn.Module:
    with seeded(0, "test encoder"):
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh())


def features_by_hand(cohort, **settings):
    """The parameters at the start, the model, and a function that returns the features under such parameters."""
    model, start = build_model(cohort, encoder(), Settings(**settings))
    names = [name for name, _ in model.body.named_parameters()]
    x = cohort.x[0].double()

    def features(leaves, rows=slice(None)):
        *body, _ = leaves
        found = torch.func.functional_call(model.body, dict(zip(names, body, strict=True)), x[rows])
        return torch.cat([found, torch.ones(len(found), 1, dtype=torch.float64)], 1)

    leaves = [*(start.encoder("all")[name] for name in names), start.heads["all"]]
    return [each.double() for each in leaves], model, features


def by_hand(cohort, **settings):
    """The parameters at the start, and a function that returns the loss of each sample under such parameters."""
    leaves, model, features = features_by_hand(cohort, **settings)

    def losses(leaves, rows=slice(None)):
        y = cohort.y[rows].double() if model.objective.in_units else cohort.y[rows]
        return model.objective.loss(features(leaves, rows) @ leaves[-1].T, y)

    losses.scores = lambda leaves: (features(leaves) @ leaves[-1].T)[:, 0]
    return leaves, losses


def slopes(leaves, losses, weight):
    leaves = [each.clone().requires_grad_() for each in leaves]
    return torch.autograd.grad(weight(losses(leaves)), leaves)


def same(run, leaves, rtol=1e-10, atol=1e-12):
    found = named_state(run.state)
    tensors = [*(value for name, value in found.items() if name.startswith("encoder/")), found["heads/all"]]
    torch.testing.assert_close(tensors, leaves, rtol=rtol, atol=atol)
