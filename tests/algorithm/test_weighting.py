"""Weights of samples and classes: the federated objective is the pooled weighted one, and a weight repeats a row."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.utils.class_weight import compute_class_weight
from torch import nn

from feddar.algorithm.names import named_state
from feddar.algorithm.offsets import Cells, CorrectedSamples
from feddar.algorithm.pooling import head_sums
from feddar.algorithm.protocol import Phase, Request
from feddar.algorithm.spreads import FIRST_OF_CLIENTS, constants_only
from feddar.algorithm.weighting import class_sums, class_weights, loss_weights
from feddar.data.cohort import Cohort
from feddar.data.validation import divided
from feddar.errors import UserError
from feddar.models import heads as linear_heads
from feddar.models.model import build_model
from feddar.objectives import Objective
from feddar.objectives.multilabel import MultiLabel
from feddar.settings import Settings
from helpers.cohorts import make_cohort
from helpers.training import train

ONE_STEP = {"rounds": 1, "optimizer": "sgd", "lr": 0.3, "batch_size": 10**6, "dtype": "float64", "batched": False}
"""One step of gradient descent on all samples of each client."""
KINDS = {"two classes": 2, "four classes": 4, "a number": 0}


def encoder() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh())


def weighed(cohort: Cohort, seed: int = 1, most: int = 4) -> Cohort:
    """The same samples in float64 with whole weights, some of them 0."""
    weight = torch.from_numpy(np.random.default_rng(seed).integers(0, most, len(cohort)).astype(np.float64))
    y = cohort.y.double() if cohort.y.is_floating_point() else cohort.y
    return replace(cohort, x=tuple(part.double() for part in cohort.x), y=y, weight=weight)


def repeated(cohort: Cohort) -> Cohort:
    """Every sample as often as its weight says."""
    rows = torch.arange(len(cohort)).repeat_interleave(cohort.weight.long())
    return replace(cohort.rows(rows), weight=None)


def outcomes(n: int = 300) -> Cohort:
    """Three yes / no outcomes of different frequency."""
    base = make_cohort(n, classes=2)
    rng = np.random.default_rng(3)
    y = rng.random((n, 3)) < np.array([0.5, 0.2, 0.07])
    names = {"domain": base.domain_names, "client": base.client_names}
    return Cohort.from_arrays(base.x[0].numpy(), y.astype(int), **names)


def cohort_of(kind: str, n: int = 300) -> Cohort:
    return outcomes(n) if kind == "outcomes" else make_cohort(n, classes=KINDS[kind])


def same(one, other, **close):
    one, other = named_state(one.state), named_state(other.state)
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, msg=lambda text, name=name: name + text, **close)


@pytest.mark.parametrize("kind", [*KINDS, "outcomes"])
@pytest.mark.parametrize("more", [{}, {"class_weight": "balanced"}, {"reweight": True, "class_weight": "balanced"}])
def test_a_step_of_all_clients_is_a_step_of_the_pooled_weighted_objective(kind, more):
    if kind == "a number" and more:
        more = {"reweight": True}
    data = weighed(cohort_of(kind))
    settings = ONE_STEP | {"method": "fedavg", "standardise_target": False} | more
    run = train(data, encoder=encoder(), **settings)
    model, start = build_model(data, encoder(), Settings(**settings))
    model.load(start, "all")
    head = start.heads["all"].clone().requires_grad_()
    features = model.features(data.x, data.domain)
    w = data.weight
    factor = torch.ones(len(data), 1, dtype=torch.float64)
    if more.get("class_weight"):
        labels = data.y[:, None] if data.y.dim() == 1 else data.y
        factor = torch.stack([sum_of_class(w, column) for column in labels.T], 1)
    each = losses(model.objective, features @ head.T, data.y)
    u = torch.ones(len(data), dtype=torch.float64)
    if more.get("reweight"):
        u = torch.stack([w.sum() / (3 * w[data.domain == m].sum()) for m in range(3)])[data.domain]
    pooled = (u * w * (factor * each).sum(1)).sum() / w.sum()
    leaves = [head, *model.body.parameters()]
    slopes = torch.autograd.grad(pooled, leaves)
    moved = [leaf.detach() - 0.3 * slope for leaf, slope in zip(leaves, slopes, strict=True)]
    names = [name for name, _ in model.body.named_parameters()]
    found = [run.state.in_training.heads["all"], *(run.state.in_training.encoder("all")[name] for name in names)]
    torch.testing.assert_close(found, moved, rtol=1e-11, atol=1e-12)
    assert run.history["value"].iloc[0] == pytest.approx(float(pooled.detach()), rel=1e-11)  # the training loss


def losses(objective: Objective, scores, y):
    """The loss of each sample, of several outcomes by outcome."""
    if not isinstance(objective, MultiLabel):
        return objective.loss(scores, y)[:, None]
    return torch.nn.functional.binary_cross_entropy_with_logits(scores, y.double(), reduction="none")


def sum_of_class(w, y):
    """n / (C n_c) of each sample's class, in weights."""
    n_c = torch.stack([w[y == c].sum() for c in range(int(y.max()) + 1)])
    return (w.sum() / (len(n_c) * n_c))[y]


METHODS = ["fedavg", "feddar-wa", "feddar-sa", "fedminmax", "separate", "fedprox", "q-ffl"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("balanced", [None, "balanced"])
def test_a_weight_repeats_a_row(method, balanced):
    data = weighed(make_cohort(240, classes=3))
    settings = ONE_STEP | {"method": method, "head_epochs": 1, "class_weight": balanced}
    same(*(train(each, encoder=encoder(), **settings) for each in (data, repeated(data))), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("method", [*METHODS, "feddar", "ditto", "apfl", "fedrep"])
@pytest.mark.parametrize("batched", [False, True])
def test_weights_of_1_change_no_bit(method, batched):
    data = make_cohort(200, classes=2, clients=3)
    settings = {"method": method, "rounds": 2, "validation": 0.2, "batched": batched}
    ones = replace(data, weight=torch.ones(len(data), dtype=torch.float64))
    same(*(train(each, **settings) for each in (data, ones)), rtol=0, atol=0)


def test_weights_have_no_scale():
    data = weighed(make_cohort(200, classes=2))
    many = replace(data, weight=1000 * data.weight)
    same(*(train(each, rounds=2, dtype="float64") for each in (data, many)), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("method", [*METHODS, "feddar", "ditto", "fedrep"])
@pytest.mark.parametrize("kind", ["two classes", "outcomes"])
def test_stacked_clients_and_workers_weigh_as_clients_do_alone(method, kind):
    data = weighed(cohort_of(kind, 160))
    settings = {
        "method": method,
        "encoder": "mlp",
        "rounds": 2,
        "dtype": "float64",
        "validation": 0.2,
        "class_weight": "balanced",
    }
    alone = train(data, batched=False, **settings)
    same(alone, train(data, batched=True, **settings), rtol=1e-6, atol=1e-8)
    if method == "feddar":
        same(alone, train(data, batched=False, jobs=2, **settings), rtol=0, atol=0)
    plain = train(replace(data, weight=None), batched=False, **settings | {"class_weight": None})
    weights = named_state(alone.state)
    assert any(not torch.allclose(value, weights[name]) for name, value in named_state(plain.state).items())


@pytest.mark.parametrize("batched", [False, True])
def test_a_client_and_a_domain_without_weight_move_nothing(batched):
    data = weighed(make_cohort(300, classes=2, clients=4), most=3)
    silent = (data.client == 0) | (data.domain == 2)
    data = replace(data, weight=torch.where(silent, 0, data.weight + 1))
    settings = ONE_STEP | {"method": "feddar-wa", "rounds": 2, "batched": batched}
    found = train(data, encoder=encoder(), **settings)
    without = data.rows(~silent)
    keep = replace(without, client=without.client - 1, clients=without.clients[1:])
    expected = train(keep, encoder=encoder(), **settings)
    same(found, expected, rtol=1e-9, atol=1e-11)


@given(st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=6), min_size=1, max_size=5))
def test_class_weights_are_those_of_scikit_learn(weights):
    y = np.repeat(np.arange(len(weights)), [len(each) for each in weights])
    w = np.concatenate([np.array(each, float) for each in weights])
    expected = compute_class_weight("balanced", classes=np.arange(len(weights)), y=np.repeat(y, w.astype(int)))
    sums = torch.tensor([[sum(each) for each in weights]], dtype=torch.float64)
    found = class_weights(sums)[0]
    torch.testing.assert_close(found, torch.from_numpy(expected))
    assert float((found[y] * torch.from_numpy(w)).sum()) == pytest.approx(w.sum())
    torch.testing.assert_close(class_weights(torch.cat([sums, torch.zeros(1, 1)], 1))[0, :-1], found)


def test_class_sums_say_nothing_of_few_patients():
    data = make_cohort(60, classes=3, clients=1)
    y = torch.tensor([0] * 40 + [1] * 17 + [2] * 3)
    data = replace(data, y=y, weight=torch.full((60,), 2.0, dtype=torch.float64))
    exact = class_sums(data.objective, data, 0)
    assert exact.tolist() == [[80.0, 34.0, 6.0]]
    assert class_sums(data.objective, data, 5).tolist() == [[120 - 34 - 4.0, 34.0, 4.0]]
    for few in (0, 1, 4):  # nobody can tell these apart
        other = replace(data, y=torch.tensor([0] * (43 - few) + [1] * 17 + [2] * few))
        torch.testing.assert_close(class_sums(data.objective, other, 5), class_sums(data.objective, data, 5))
    assert class_sums(data.objective, data, 50).tolist() == [[40.0, 40.0, 40.0]]
    patients = replace(data, group=torch.arange(60) // 4)  # 15 patients
    assert class_sums(data.objective, patients, 5).tolist() == [[120 - 34 - 4.0, 34.0, 4.0]]


def test_class_sums_of_several_outcomes():
    data = outcomes()
    found = class_weights(class_sums(data.objective, data, 0))
    for k, column in enumerate(data.y.T.numpy()):
        torch.testing.assert_close(
            found[k], torch.from_numpy(compute_class_weight("balanced", classes=np.array([0, 1]), y=column))
        )
    asked = Request(Phase("heads"), 1, 0, class_weights=found)
    per_sample = loss_weights(asked, data.objective, data)
    torch.testing.assert_close(per_sample.mean(0), torch.ones(3, dtype=torch.float64))


def test_class_weights_of_a_number_are_refused():
    with pytest.raises(UserError, match="class_weight is for classes, and what is predicted here is a number"):
        train(make_cohort(100, classes=0), class_weight="balanced")


@pytest.mark.parametrize("kind", [*KINDS, "outcomes"])
def test_sums_over_weighted_samples_are_those_over_repeated_ones(kind):
    data = weighed(cohort_of(kind, 120))
    many = repeated(data)
    objective, draw = data.objective, torch.Generator().manual_seed(0)
    outputs, width = objective.outputs, 4
    projection = torch.randn(6, width, generator=draw, dtype=torch.float64)
    head, mean = torch.randn(2, outputs, width, generator=draw, dtype=torch.float64)

    def sums(cohort):
        features, weight = cohort.x[0] @ projection, cohort.weight
        scores = features @ head.T
        found = head_sums(objective, features, scores, cohort.y, cohort.domain, weight)
        del found["pooled_errors"]  # counts samples
        found |= linear_heads.evidence(objective, mean, head, features, cohort.y, weight)
        for curvature in ("hessian", "block", "gram"):
            found[curvature] = linear_heads.curvature(objective, curvature, head, features, weight)
            found[f"{curvature} times"] = linear_heads.curvature_times_heads(
                objective, curvature, scores, features @ mean.T, features, weight
            )
        cells = Cells(cohort.client, cohort.domain, len(cohort.clients), len(cohort.domains))
        along = constants_only(outputs, width)
        samples = CorrectedSamples(objective, features, scores, cohort.y, cells, along, weight)
        fitted = samples.fitted(FIRST_OF_CLIENTS)
        return found | {"a": fitted.client, "b": fitted.cell, "moments": fitted.moments}

    torch.testing.assert_close(sums(data), sums(many), rtol=1e-9, atol=1e-9)


def test_curvature_of_weights_by_outcome_is_that_of_autograd():
    data = outcomes(40)
    weight = torch.rand(40, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x, objective = data.x[0].double(), data.objective
    head = torch.randn(3, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    exact = torch.autograd.functional.hessian(lambda w: objective.weighted_loss(x @ w.T, data.y, weight).sum(), head)
    found = linear_heads.curvature(objective, "hessian", head, x, weight)[0]
    torch.testing.assert_close(found, exact.reshape(18, 18), rtol=1e-10, atol=1e-12)
    slope = torch.autograd.functional.jacobian(lambda w: objective.weighted_loss(x @ w.T, data.y, weight).sum(), head)
    torch.testing.assert_close(linear_heads.gradient(objective, head, x, data.y, weight), slope)
    blocks = linear_heads.curvature(objective, "block", head, x, weight)
    torch.testing.assert_close(torch.block_diag(*blocks), found)


def test_validation_loss_is_weighted_as_training_is():
    """All samples weigh what they do in training: the loss is the mean of w c l, with w of mean 1 over training."""
    base = make_cohort(300, classes=2, clients=2)
    weight = torch.where(torch.arange(300) % 3 == 0, 0.0, 1.5).double()  # of mean 1, up to how samples fall
    data = replace(base, weight=weight)
    settings = {"method": "fedavg", "encoder": "mlp", "rounds": 1, "validation": 0.3, "lr": 1e-9}
    run = train(data, **settings, class_weight="balanced")
    part, held = divided(data, 0.3, 0)
    n = torch.stack([part.weight[part.y == c].sum() for c in (0, 1)])
    factor = part.weight.sum() / (2 * n) * len(part) / part.weight.sum()
    scores = run.scores(held.x, held.domain, held.client_names)
    losses = held.weight * factor[held.y] * data.objective.loss(scores, held.y)
    found = run.history[(run.history["split"] == "validation") & (run.history["scope"] == "all")]
    assert found["value"].item() == pytest.approx(float(losses.mean()), rel=1e-5)
    assert found["count"].item() == len(held)
