"""Fed-RoD: rounds by hand in float64, of the common model with balanced classes and the heads of clients."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from feddar.algorithm.decoupled import ADDED, balanced
from feddar.algorithm.protocol import Phase, Request
from feddar.data.cohort import Cohort
from feddar.errors import UserError
from feddar.models.model import build_model
from feddar.objectives import MultiLabel
from feddar.settings import Settings, checked
from helpers.by_hand import ONE_STEP, by_hand, encoder, features_by_hand, same, slopes
from helpers.cohorts import make_cohort
from helpers.training import train


def uneven(classes):
    """Samples of four clients in which classes are unevenly frequent; one client has only the first."""
    cohort = make_cohort(400, classes=classes)
    if not classes:
        return cohort
    frequent = (cohort.y == 0) | (torch.arange(400) % (2 + cohort.client) == 0)
    return cohort.rows(torch.nonzero(frequent & ~((cohort.client == 3) & (cohort.y > 0))).flatten())


@pytest.mark.parametrize("classes", [0, 2, 3])
def test_fedrod_by_hand(classes):
    """The common model along the loss in which each class counts the same; heads of clients along the plain one."""
    cohort, rounds, epochs = uneven(classes), 3, 4
    settings = ONE_STEP | {"rounds": rounds, "method": "fedrod", "standardise_target": False}
    settings |= {"head_epochs": epochs, "head_lr": 0.2}
    leaves, losses = by_hand(cohort, **settings)
    _, model, features = features_by_hand(cohort, **settings)
    clients = [torch.nonzero(cohort.client == k).flatten() for k in range(4)]
    added = [torch.zeros_like(leaves[-1]) for _ in clients]

    def balanced_mean(each, rows):
        if not classes:
            return each[rows].mean()
        held = [rows[cohort.y[rows] == c] for c in range(classes) if bool((cohort.y[rows] == c).any())]
        return torch.stack([each[some].mean() for some in held]).mean()

    for _ in range(rounds):
        steps = []
        for rows in clients:
            found = slopes(leaves, losses, lambda each, rows=rows: balanced_mean(each, rows))
            steps.append([len(rows) / len(cohort) * slope for slope in found])
        leaves = [leaf - 0.3 * sum(each) for leaf, each in zip(leaves, zip(*steps, strict=True), strict=True)]
        x = features(leaves).detach()
        for k, rows in enumerate(clients):
            y = cohort.y[rows].double() if not classes else cohort.y[rows]
            for _ in range(epochs):
                head = added[k].clone().requires_grad_()
                loss = model.objective.loss(x[rows] @ (leaves[-1] + head).T, y).mean()
                added[k] = added[k] - 0.2 * torch.autograd.grad(loss, head)[0]
    run = train(cohort, encoder=encoder(), **settings)
    same(run, leaves)
    for name, head in zip(cohort.clients, added, strict=True):
        torch.testing.assert_close(run.own[name].extra[f"{ADDED}all"], head, rtol=1e-9, atol=1e-11)
    names = cohort.client_names
    wanted = torch.cat([x[i : i + 1] @ (leaves[-1] + added[k]).T for i, k in enumerate(cohort.client.tolist())])
    torch.testing.assert_close(run.scores(cohort.x, cohort.domain, names), wanted)
    elsewhere = np.array(["elsewhere"] * len(cohort))
    torch.testing.assert_close(run.scores(cohort.x, cohort.domain, elsewhere), x @ leaves[-1].T)


def test_each_of_several_outcomes_is_balanced():
    y = torch.tensor([[1, 0], [0, 0], [0, 1], [0, 0], [0, 1], [0, 0]])
    cohort = Cohort(
        (torch.zeros(6, 2),), y, *[torch.zeros(6, dtype=torch.long)] * 2, ("d",), ("c",), MultiLabel(("a", "b"))
    )
    model, start = build_model(cohort, nn.Linear(2, 3), Settings(method="fedrod"))
    request = balanced(Request(Phase("together", balanced=True), 1, 0, start), model.objective, cohort)
    expected = torch.tensor([[6 / 10, 6 / 2], [6 / 8, 6 / 4]], dtype=torch.float64)
    torch.testing.assert_close(request.class_weights, expected)


def test_clients_whose_classes_differ_are_served_better_than_by_the_common_head():
    """Labels of two clients are the other way round for half of the samples."""
    cohort = make_cohort(800, domains=1)
    turned = (cohort.client > 1) & (cohort.x[0][:, 0] > 0)
    part, test = replace(cohort, y=torch.where(turned, 1 - cohort.y, cohort.y)).split(0.3, 0)
    losses = {
        name: train(part, name, encoder(), test=test, rounds=20, lr=0.01).results().query("metric == 'log_loss'")
        for name in ("fedavg", "fedrod")
    }
    found = {name: each.query("scope == 'client'")["value"].mean() for name, each in losses.items()}
    assert found["fedrod"] < 0.9 * found["fedavg"]


@pytest.mark.parametrize("option", ["credibility", "average", "site_offset"])
def test_what_is_of_common_heads_alone_is_refused(option):
    more = {"multi_head": True, "alternating": True, option: True}
    with pytest.raises(UserError, match=option):
        checked(Settings, {"method": "fedrod", **more}).require_fitting()
