import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk

from feddar.data.cohort import Cohort
from feddar.evaluation.metrics import evaluate, last_rounds, worst
from feddar.objectives import Binary, Multiclass, Regression, with_classes
from helpers.cohorts import make_cohort


def value(frame, scope, name, metric):
    row = frame.query("scope == @scope and name == @name and metric == @metric")
    return row["value"].item(), row["count"].item()


def test_by_hand():
    cohort = Cohort.from_arrays(
        np.zeros((4, 1)), [0, 1, 0, 1], domain=["a", "a", "b", "b"], client=["s", "t", "s", "t"]
    )
    frame = evaluate(cohort, torch.tensor([[-1.0], [1.0], [1.0], [-1.0]]))
    assert value(frame, "domain", "a", "auc") == (1.0, 2)
    assert value(frame, "domain", "b", "auc") == (0.0, 2)
    assert value(frame, "domain", "a", "accuracy") == (1.0, 2)
    assert value(frame, "summary", "domain_avg", "auc") == (0.5, 2)
    assert value(frame, "summary", "domain_min", "auc") == (0.0, 2)
    assert value(frame, "summary", "domain_max", "auc") == (1.0, 2)
    p = 1 / (1 + np.exp(-1.0))
    assert value(frame, "domain", "a", "brier")[0] == pytest.approx((1 - p) ** 2)
    assert value(frame, "domain", "a", "log_loss")[0] == pytest.approx(-np.log(p))


@settings(max_examples=60, deadline=None)
@given(parts=st.integers(1, 5), n=st.integers(1, 40), classes=st.sampled_from([0, 2, 3, 12]), seed=st.integers(0, 999))
def test_parts_measured_together_are_those_measured_alone_to_the_bit(parts, n, classes, seed):
    rng = np.random.default_rng(seed)
    objective = with_classes(tuple(range(classes)) if classes else None)
    y = rng.integers(0, classes, (parts, n)) if classes else rng.normal(size=(parts, n)).astype(np.float32)
    predicted = rng.dirichlet(np.ones(classes), (parts, n)).round(rng.integers(1, 9)) if classes else y + 0.1
    together = objective.measure_parts(y, predicted)
    for part in range(parts):
        alone = objective.measure(y[part], predicted[part])
        assert together.keys() == alone.keys()
        np.testing.assert_array_equal([values[part] for values in together.values()], [*alone.values()])


def test_samples_in_any_order_of_clients_and_domains(monkeypatch):
    cohort = make_cohort(n=300, clients=40, classes=3)
    scores = torch.randn(len(cohort), 3, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr("feddar.evaluation.metrics.MEASURED_AT_ONCE", 16)
    frame = evaluate(cohort, scores)
    p, y = scores.double().softmax(1).numpy(), cohort.y.numpy()
    for scope, names, holder in (("domain", cohort.domains, cohort.domain), ("client", cohort.clients, cohort.client)):
        assert [*dict.fromkeys(frame.query("scope == @scope")["name"])] == [*names]
        for index, name in enumerate(names):
            held = holder.numpy() == index
            for metric, expected in cohort.objective.measure(y[held], p[held]).items():
                np.testing.assert_equal(value(frame, scope, name, metric), (expected, held.sum()))


def test_undefined_is_nan_with_its_count_and_averages_say_what_they_cover():
    cohort = Cohort.from_arrays(
        np.zeros((4, 1)), [0, 1, 1, 1], domain=["a", "a", "b", "b"], client=["s", "s", "t", "t"]
    )
    frame = evaluate(cohort, torch.tensor([[-1.0], [1.0], [1.0], [-1.0]]))
    auc, count = value(frame, "domain", "b", "auc")
    assert np.isnan(auc)
    assert count == 2
    assert value(frame, "summary", "domain_avg", "auc") == (1.0, 1)
    assert value(frame, "summary", "client_avg", "accuracy") == (0.75, 2)


@settings(max_examples=60, deadline=None)
@given(n=st.integers(2, 40), classes=st.integers(2, 4), seed=st.integers(0, 999), ties=st.booleans())
def test_every_metric_is_scikit_learns(n, classes, seed, ties):
    rng = np.random.default_rng(seed)
    y = np.concatenate([np.arange(classes), rng.integers(0, classes, n)])
    scores = rng.normal(size=(len(y), classes)) * 4
    scores = scores.round() if ties else scores
    p = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    found = with_classes(tuple(range(classes))).measure(y, p)
    several = {"multi_class": "ovr", "labels": range(classes)} if classes > 2 else {}
    expected = {
        "auc": sk.roc_auc_score(y, p if classes > 2 else p[:, 1], **several),
        "auprc": sk.average_precision_score(y, p if classes > 2 else p[:, 1]),
        "accuracy": sk.accuracy_score(y, p.argmax(1)),
        "log_loss": sk.log_loss(y, p),
        "brier": sk.brier_score_loss(y, p),
    }
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)
    numbers = scores[:, 0]
    assert Regression().measure(numbers, y) == pytest.approx(
        {
            "mse": sk.mean_squared_error(numbers, y),
            "rmse": sk.root_mean_squared_error(numbers, y),
            "mae": sk.mean_absolute_error(numbers, y),
            "r2": sk.r2_score(numbers, y) if np.ptp(numbers) else np.nan,
        },
        nan_ok=True,
    )


def test_certainty_that_is_wrong_costs_a_finite_loss():
    p = np.array([[1.0, 0.0], [0.0, 1.0]])
    assert Binary().measure(np.array([1, 0]), p)["log_loss"] == pytest.approx(sk.log_loss([1, 0], p))


def test_regression_with_one_value():
    found = Regression().measure(np.array([1.0, 1.0]), np.array([1.0, 2.0]))
    assert found["mse"] == 0.5
    assert np.isnan(found["r2"])


def test_absent_clients_and_domains_have_no_row():
    cohort = make_cohort(classes=3)
    part = cohort.rows((cohort.client == 1) & (cohort.domain == 2))
    frame = evaluate(part, torch.randn(len(part), 3, generator=torch.Generator().manual_seed(0)))
    assert frame.query("scope == 'client'")["name"].unique().tolist() == ["site-1"]
    assert frame.query("scope == 'domain'")["name"].unique().tolist() == ["domain-2"]


def test_several_classes_of_which_some_are_absent():
    y = np.array([0, 0, 2, 2])
    predicted = np.array([[0.8, 0.1, 0.1], [0.6, 0.2, 0.2], [0.1, 0.1, 0.8], [0.3, 0.3, 0.4]])
    found = Multiclass((0, 1, 2)).measure(y, predicted)
    assert found["auc"] == 1.0
    assert found["accuracy"] == 1.0
    expected = np.mean(((predicted - np.eye(3)[y]) ** 2).sum(1))
    assert found["brier"] == pytest.approx(expected)


def test_last_rounds_are_averaged_and_never_the_best():
    rows = [(r, "test", "domain", "a", "auc", v, 9) for r, v in enumerate([0.9, 0.1, 0.3], start=1)]
    rows.append((3, "train", "all", "all", "loss", 1.0, 9))
    history = pd.DataFrame(rows, columns=["round", "split", "scope", "name", "metric", "value", "count"])
    frame = last_rounds(history, 2)
    assert frame["value"].tolist() == [pytest.approx(0.2)]
    assert frame["count"].tolist() == [9]


def test_worst_knows_which_way_a_metric_points():
    values = pd.Series([0.1, 0.9])
    assert worst("auc", values) == 0.1
    assert worst("mse", values) == 0.9


@pytest.mark.parametrize("n", [2, 3])
def test_parts_of_as_few_samples_as_two_classes_have_the_area_of_every_class(n):
    """Of three classes, in parts of two samples: the mean over those of one class against the rest."""
    objective, rng = Multiclass((0, 1, 2)), np.random.default_rng(0)
    y = np.stack([rng.permutation(3)[:n] for _ in range(40)])
    predicted = rng.dirichlet(np.ones(3), (40, n))
    found = objective.measure_parts(y, predicted)["auc"]
    for labels, scores, area in zip(y, predicted, found, strict=True):
        each = [sk.roc_auc_score(labels == c, scores[:, c]) for c in sorted(set(labels.tolist()))]
        assert area == pytest.approx(np.mean(each))
