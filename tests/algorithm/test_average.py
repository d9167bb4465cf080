"""The average of the last rounds, which is used for prediction and never trained on."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import feddar
from feddar.algorithm.names import named_parameters, named_state
from feddar.algorithm.pooling import Pooling
from feddar.algorithm.rounds import AVERAGING
from feddar.data.cohort import Cohort
from feddar.models.parameters import Parameters
from feddar.simulation.in_process import Direct

ROUNDS = 7
ALONE = {"rounds": ROUNDS, "threads": 1, "lr": 0.01, "validation": 0, "credibility": False, "site_offset": False}


def cohort(n=300):
    rng = np.random.default_rng(0)
    x, domain, client = rng.normal(size=(n, 3)), rng.integers(0, 2, n), rng.integers(0, 3, n)
    y = rng.random(n) < 1 / (1 + np.exp(-x[:, 0] * (1 + domain)))
    return Cohort.from_arrays(x, y, domain=[f"d{m}" for m in domain], client=[f"h{i}" for i in client])


@pytest.fixture(scope="module")
def train():
    return partial(feddar.train, cohort(), "feddar", **ALONE)


def states_of(train, **options):
    """Return the server's state after each round."""
    states = []
    train(callbacks=[lambda end: states.append(end.position.state)], **options)
    return states


@pytest.mark.parametrize("warmup", [0, 3])
def test_the_model_in_use_is_the_mean_of_rounds_each_weighed_by_a_power_of_its_number(train, warmup):
    """The power is a rising one, t (t + 1) ... (t + 7): the share of each round makes it so (Shamir and Zhang)."""
    states = states_of(train, warmup=warmup)
    for number, state in enumerate(states, 1):
        trained = [named_parameters(each.in_training) for each in states[warmup:number]]
        if not trained:
            assert state.in_use == state.in_training
            continue
        weights = [math.prod(range(t, t + AVERAGING)) for t in range(1, len(trained) + 1)]
        for name, value in named_parameters(state.in_use).items():
            expected = sum(w * each[name].double() for w, each in zip(weights, trained, strict=True)) / sum(weights)
            torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-6)


def test_rounds_go_on_from_the_last_one_and_not_from_the_average(train):
    averaged, plain = (states_of(train, average=given)[-1] for given in (True, False))
    expected = named_parameters(plain.in_training)
    for name, value in named_parameters(averaged.in_training).items():
        assert torch.equal(value, expected[name]), name
    assert any(not torch.equal(value, expected[name]) for name, value in named_parameters(averaged.in_use).items())


def test_heads_are_pooled_around_the_average(train, monkeypatch):
    """Gradient and curvature are taken at the averaged model, and the step starts from its heads."""
    asked, around, exchange, pooled = [], [], Direct.exchange, Pooling.pooled

    def spied(engine, request):
        asked.extend([request.parameters] if request.phase.name == "pool" else [])
        return exchange(engine, request)

    def heard(pooling, heads, before):
        around.append(heads)
        return pooled(pooling, heads, before)

    monkeypatch.setattr(Direct, "exchange", spied)
    monkeypatch.setattr(Pooling, "pooled", heard)
    state = states_of(train, credibility=True)[-1]
    expected = named_parameters(state.averaged)
    for name, value in named_parameters(asked[-1]).items():
        assert torch.equal(value, expected[name]), name
    for key, head in around[-1].items():
        assert torch.equal(head, state.averaged.heads[key])
        assert torch.equal(state.used_heads[key], head)  # without validation heads stay as they are


def test_large_heads_are_weighed_against_the_mean_of_averaged_ones(train):
    state = states_of(train, credibility=True, k=200)[-1]
    kept = [state.averaged.heads[str(m)].double() for m in range(2)]
    mean = sum(count * head for count, head in zip(cohort().counts.sum(0), kept, strict=True)) / len(cohort())
    for m, head in enumerate(kept):
        moved, away = state.used_heads[str(m)].double() - mean, head - mean
        share = float((moved * away).sum() / away.square().sum())
        torch.testing.assert_close(moved, share * away, rtol=1e-4, atol=1e-6)
        assert -1e-6 < share < 1 + 1e-6


def test_a_resumed_run_ends_with_the_same_bits(train, tmp_path):
    whole = named_state(train().state)
    train(out=tmp_path, callbacks=[lambda end: end.round == ROUNDS - 1])
    found = named_state(train(out=tmp_path, resume=True).state)
    assert any(name.startswith("averaged/") for name in whole)
    for name, value in whole.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("method", ["local", "fedrep", "ditto", "fedbn"])
def test_models_of_clients_are_not_averaged(method):
    with pytest.raises(feddar.UserError, match="average is for models that are common"):
        feddar.train(cohort(), method, average=True)
    assert not feddar.Settings(method=method, average=True).row().averaged


numbers = st.floats(-1e3, 1e3, width=32)


@given(numbers, numbers, st.floats(0, 1))
def test_parameters_are_moved_a_share_of_the_way(start, end, share):
    def of(value, count):
        tensors = {"w": torch.tensor([value, -torch.inf]), "n": torch.tensor(count)}
        return Parameters({"all": tensors}, {"0": torch.tensor([[value]])})

    found = of(start, 1).moved_to(replace(of(end, 2), target=torch.ones(2)), share)
    expected = pytest.approx(start + share * (end - start), rel=1e-5, abs=1e-3)
    assert float(found.encoders["all"]["w"][0]) == expected
    assert float(found.heads["0"]) == expected
    assert float(found.encoders["all"]["w"][1]) == -torch.inf
    assert (int(found.encoders["all"]["n"]), found.target.tolist()) == (2, [1.0, 1.0])
