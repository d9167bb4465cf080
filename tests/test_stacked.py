"""Clients that are trained together end where they would one by one."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import feddar
from feddar.cohort import Cohort
from feddar.errors import TrainingError, UserError
from feddar.methods import METHODS
from feddar.model import build_model
from feddar.phases import Client, Phase, batches, draws
from feddar.settings import Settings
from feddar.stacked import Stack, Units, assemble, stackable, steps_in_epoch

SIZES = [40, 33, 7, 40, 12, 1, 34, 64, 65, 2, 9, 33]


def cohort_of(task, sizes=SIZES, seed=0, domains=3):
    rng = np.random.default_rng(seed)
    n = sum(sizes)
    client = np.repeat([f"h{i:02}" for i in range(len(sizes))], sizes)
    domain = rng.choice([f"d{m}" for m in range(domains)], n)
    x = rng.standard_normal((n, 5))
    score = x @ rng.standard_normal(5) + (domain == "d0") * x[:, 0]
    y = {
        "regression": score * 40 + 7,
        "binary": np.where(score > 0, "yes", "no"),
        "multiclass": np.digitize(score, [-1, 0, 1]),
    }[task]
    shuffled = rng.permutation(n)
    kind = "regression" if task == "regression" else "classification"
    return Cohort.from_arrays(x[shuffled], y[shuffled], domain=domain[shuffled], client=client[shuffled], task=kind)


def both(cohort, method, encoder="mlp", **options):
    options = {"rounds": 3, "batch_size": 8, "lr": 0.05, "dtype": "float64", "optimizer": "sgd"} | options
    return [feddar.train(cohort, method, encoder, batched=batched, **options) for batched in (True, False)]


def assert_same(one, other, rtol=1e-8, atol=1e-10):
    assert one.private.keys() == other.private.keys()
    for here, there in ((one.state, other.state), *((one.private[name], other.private[name]) for name in one.private)):
        assert here.keys() == there.keys()
        for name, value in here.items():
            torch.testing.assert_close(value, there[name], rtol=rtol, atol=atol)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_ends_where_it_would_one_by_one(method):
    cohort = cohort_of("binary")
    one, other = both(cohort, method, rounds=4, momentum=0.5, weight_decay=0.01, test=cohort)
    assert_same(one, other)
    np.testing.assert_allclose(one.history["value"], other.history["value"], rtol=1e-8)


@pytest.mark.parametrize("task", ["regression", "multiclass"])
@pytest.mark.parametrize("method", ["fedavg", "fedavg-mh", "fedrep", "feddar-sa"])
def test_other_tasks(task, method):
    assert_same(*both(cohort_of(task), method, lr=0.02))


@pytest.mark.parametrize("curvature", ["hessian", "block", "gram"])
@pytest.mark.parametrize("at", ["start", "final"])
@pytest.mark.parametrize("task", ["binary", "multiclass"])
def test_curvature(task, curvature, at):
    assert_same(*both(cohort_of(task), "feddar-sa", curvature=curvature, curvature_at=at, encoder_epochs=2))


@pytest.mark.parametrize("method", ["fedavg", "feddar-sa", "fedrep"])
def test_adam_and_single_precision(method):
    cohort = cohort_of("binary")
    assert_same(*both(cohort, method, optimizer="adam", lr=0.001), rtol=1e-5, atol=1e-7)
    assert_same(*both(cohort, method, dtype="float32"), rtol=1e-4, atol=1e-5)
