"""A part of the clients in each round: who is drawn, that only they train, and that nothing else changes."""

from collections import Counter

import numpy as np
import pytest
import torch

from feddar.algorithm.names import named_own, named_state
from feddar.algorithm.participation import highest_number, number_of
from feddar.data.cohort import Cohort
from feddar.errors import UserError
from feddar.methods import METHODS
from feddar.settings import Settings
from helpers.cohorts import make_cohort
from helpers.marks import DISTINCT, first
from helpers.training import train

CLIENTS = [f"site-{i}" for i in range(12)]


def drawn(round_number, clients=CLIENTS, **settings):
    chosen = Settings(**settings)
    highest = highest_number(chosen, round_number, clients)
    return [name for name in clients if number_of(chosen.seed, round_number, name) <= highest]


@pytest.mark.parametrize(
    ("settings", "number"),
    [
        ({"participation": 0.25}, 3),
        ({"participation": 0.26}, 4),
        ({"participation": 0.001}, 1),
        ({"participation": 1.0}, 12),
        ({"clients_per_round": 5}, 5),
        ({"clients_per_round": 50}, 12),
    ],
)
def test_as_many_are_drawn_as_was_said(settings, number):
    assert {len(drawn(round_number, **settings)) for round_number in range(1, 30)} == {number}


def test_everybody_is_drawn_about_as_often_and_by_the_seed():
    rounds = range(1, 601)
    often = Counter(name for number in rounds for name in drawn(number, clients_per_round=4))
    assert set(often) == set(CLIENTS) and all(150 < times < 250 for times in often.values())
    assert [drawn(number, clients_per_round=4, seed=1) for number in rounds] != [
        drawn(number, clients_per_round=4) for number in rounds
    ]
    assert drawn(3, clients=CLIENTS[::-1], clients_per_round=4) == drawn(3, clients_per_round=4)[::-1]


def test_both_options_at_once_are_one_too_many():
    with pytest.raises(UserError, match="say the same: leave out one"):
        train(make_cohort(), participation=0.5, clients_per_round=3)


def standardised(cohort):
    """Return a cohort whose columns have mean 0 and variance 1 at every client: units are the same without some."""
    x = cohort.x[0].double()
    for number in range(len(cohort.clients)):
        rows = cohort.client == number
        x[rows] = (x[rows] - x[rows].mean(0)) / x[rows].std(0, correction=0)
    names, domains = np.array(cohort.clients)[cohort.client], np.array(cohort.domains)[cohort.domain]
    return Cohort.from_arrays(x, cohort.y, domain=domains, client=names)


def without(cohort, clients):
    """Return a cohort's samples of the other clients."""
    names, domains = np.array(cohort.clients)[cohort.client], np.array(cohort.domains)[cohort.domain]
    rows = ~np.isin(names, clients)
    return Cohort.from_arrays(cohort.x[0][rows], cohort.y[rows], domain=domains[rows], client=names[rows])


def same_tensors(here, there, rtol=0.0, atol=0.0):
    assert here.keys() == there.keys()
    for name, value in here.items():
        torch.testing.assert_close(value, there[name], rtol=rtol, atol=atol)


@pytest.mark.parametrize("method", ["fedavg", "fedavg-mh", "fedper", "ditto"])
def test_a_round_is_that_of_the_drawn_clients_alone(method):
    cohort, options = (
        standardised(make_cohort(clients=6)),
        {"rounds": 1, "dtype": "float64", "optimizer": "sgd", "batched": False},
    )
    part = train(cohort, method, "mlp", clients_per_round=2, **options)
    here = drawn(1, cohort.clients, clients_per_round=2)
    left = [name for name in cohort.clients if name not in here]
    alone = train(without(cohort, left), method, "mlp", **options)
    same_tensors(named_state(part.state), named_state(alone.state), rtol=1e-5, atol=1e-6)
    for name, own in alone.own.items():
        same_tensors(named_own(part.own[name]), named_own(own), rtol=1e-5, atol=1e-6)
    assert part.history.query("metric == 'samples'").equals(alone.history.query("metric == 'samples'"))


@pytest.mark.parametrize("method", first(DISTINCT, METHODS))
def test_same_bits_for_any_number_of_workers_and_after_stopping(method, tmp_path):
    train_part, test = make_cohort(clients=6).split(0.25, 0)
    options = {"test": test, "rounds": 4, "warmup": 1, "participation": 0.4}
    whole = train(train_part, method, "mlp", jobs=2, **options)

    def interrupt(now):
        if now.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(train_part, method, "mlp", out=tmp_path / "run", progress=interrupt, **options)
    again = train(train_part, method, "mlp", out=tmp_path / "run", resume=True, **options)
    same_tensors(named_state(whole.state), named_state(again.state))
    for name in whole.own:
        same_tensors(named_own(whole.own[name]), named_own(again.own[name]))


@pytest.mark.parametrize("method", ["fedavg", "feddar-sa", "feddar", "fedrep", "ditto"])
def test_stacked_clients_take_part_as_single_ones_do(method):
    cohort = make_cohort(clients=8)
    options = {"rounds": 3, "dtype": "float64", "optimizer": "sgd", "clients_per_round": 3}
    one, other = (train(cohort, method, "mlp", batched=batched, **options) for batched in (True, False))
    same_tensors(named_state(one.state), named_state(other.state), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("method", ["feddar-wa", "feddar-sa", "feddar"])
def test_the_head_of_a_domain_whose_clients_are_not_drawn_stays(method):
    """Each client holds one domain, so a round of one client trains one head."""
    cohort = make_cohort(clients=3)
    domains = np.array(cohort.domains)[cohort.domain]
    cohort = Cohort.from_arrays(cohort.x[0], cohort.y, domain=domains, client=[f"of {name}" for name in domains])
    options = {"clients_per_round": 1, "site_offset": False} if method == "feddar" else {"clients_per_round": 1}
    before, after = (train(cohort, method, "mlp", rounds=rounds, credibility=False, **options) for rounds in (2, 3))
    (trained,) = drawn(3, cohort.clients, clients_per_round=1)
    moved = [
        name
        for number, name in enumerate(cohort.domains)
        if not torch.equal(before.state.in_training.heads[str(number)], after.state.in_training.heads[str(number)])
    ]
    assert [f"of {name}" for name in moved] == [trained]
