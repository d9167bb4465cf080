"""Methods that raise what is worst: two rounds of each by hand, in float64."""

from dataclasses import replace

import pytest
import torch

from feddar.algorithm.client import Client
from feddar.algorithm.names import named_state
from feddar.algorithm.protocol import Phase, Request
from feddar.errors import UserError
from feddar.models.model import build_model
from feddar.settings import Settings, checked
from helpers.by_hand import ONE_STEP, by_hand, encoder, same, slopes
from helpers.cohorts import make_cohort
from helpers.training import train


def test_group_dro_by_hand():
    """Steps along sum_m s_m R_m, of which the shares s are equal at first, and then times exp(step R_m)."""
    cohort = make_cohort(300)
    settings = ONE_STEP | {"method": "group-dro", "minmax_lr": 2.0}
    leaves, losses = by_hand(cohort, **settings)
    shares = torch.ones(3, dtype=torch.float64) / 3

    def risks(each):
        return torch.stack([each[cohort.domain == m].mean() for m in range(3)])

    for _ in range(2):
        before = leaves
        found = slopes(before, losses, lambda each, shares=shares: (shares * risks(each)).sum())
        leaves = [leaf - 0.3 * slope for leaf, slope in zip(before, found, strict=True)]
        raised = shares * torch.exp(2.0 * risks(losses(before)))
        shares = raised / raised.sum()
    run = train(cohort, encoder=encoder(), **settings)
    same(run, leaves)
    torch.testing.assert_close(run.state.domain_shares, shares)
    assert float(shares.max() - shares.min()) > 0.05


@pytest.mark.parametrize("q", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("options", [{}, {"reweight": True}, {"encoder_epochs": 3}])
def test_q_ffl_by_hand(q, options):
    """The next model is w - sum n_k Delta_k / sum n_k h_k, as q-FedAvg has it, of clients of different sizes."""
    cohort = make_cohort(300).rows(torch.arange(300)[torch.arange(300) % 7 > 2])
    settings = ONE_STEP | {"method": "q-ffl", "q": q} | options
    leaves, losses = by_hand(cohort, **settings)
    held, lipschitz = cohort.counts.sum(0), 1 / 0.3
    u = (len(cohort) / (3 * held.double()))[cohort.domain] if options.get("reweight") else torch.ones(len(cohort))
    clients = [torch.nonzero(cohort.client == k).flatten() for k in range(4)]
    for _ in range(2):
        steps, bounds = [], []
        for rows in clients:

            def objective(each, rows=rows):
                return (u[rows] * each[rows]).mean()

            after = leaves
            for _ in range(settings.get("encoder_epochs", 1)):
                found = slopes(after, losses, objective)
                after = [leaf - 0.3 * slope for leaf, slope in zip(after, found, strict=True)]
            loss = objective(losses(leaves))
            moved = [lipschitz * (leaf - end) for leaf, end in zip(leaves, after, strict=True)]
            squares = sum(each.square().sum() for each in moved)
            steps.append([len(rows) * loss**q * each for each in moved])
            bounds.append(len(rows) * (q * loss ** (q - 1) * squares + lipschitz * loss**q))
        leaves = [leaf - sum(step) / sum(bounds) for leaf, step in zip(leaves, zip(*steps, strict=True), strict=True)]
    same(train(cohort, encoder=encoder(), **settings), leaves)


def test_q_ffl_with_0_is_fedavg_to_the_bit():
    cohort = make_cohort(200)
    runs = (train(cohort, rounds=2, **each) for each in ({"method": "q-ffl", "q": 0.0}, {"method": "fedavg"}))
    one, other = (named_state(run.state) for run in runs)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("q", [1.0, 4.0])
def test_q_ffl_under_adam_by_hand(q):
    """Of one client, the step of FedAvg over s = 1 + q (F(w) - F(w_k)) / F(w); nothing else is divided."""
    cohort = make_cohort(200, clients=1)
    settings = ONE_STEP | {"rounds": 1, "optimizer": "adam", "lr": 0.02, "encoder_epochs": 4, "batch_size": 32, "q": q}
    leaves, losses = by_hand(cohort, **settings)
    found = named_state(train(cohort, "fedavg", encoder(), **settings).state)
    trained = [*(value for name, value in found.items() if name.startswith("encoder/")), found["heads/all"]]
    before, after = losses(leaves).mean(), losses(trained).mean()
    assert float(after) < 0.9 * float(before)
    s = 1 + q * (before - after) / before
    ends = [leaf + (end - leaf) / s for leaf, end in zip(leaves, trained, strict=True)]
    same(train(cohort, "q-ffl", encoder(), **settings), ends, rtol=1e-8, atol=1e-10)  # no loss is 0: it is 1e-10 more


def test_no_loss_and_no_rate_are_no_division_by_zero():
    constant = replace(make_cohort(120, classes=0), y=torch.zeros(120))
    for optimizer in ("sgd", "adam"):
        run = train(constant, "q-ffl", rounds=2, q=0.5, optimizer=optimizer)
        assert torch.isfinite(run.state.heads["all"]).all()
    model, start = build_model(constant, encoder(), Settings())
    still = Phase("together", lr=0.0, q=2.0)
    reply = Client("site-0", constant, None, model).answer(Request(still, 1, 0, start))
    torch.testing.assert_close(reply.heads["all"].head, start.heads["all"])
    assert reply.heads["all"].weight >= 0


def test_second_order_sums_do_not_count_by_loss():
    with pytest.raises(UserError, match="q-ffl counts clients by their loss"):
        checked(Settings, {"method": "q-ffl", "multi_head": True, "aggregation": "second-order"})
