"""Gaps between domains, held to a computation by hand, and what happens where a rate is undefined."""

import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from feddar.data.cohort import Cohort
from feddar.errors import UserError
from feddar.evaluation.fairness import observe
from feddar.evaluation.metrics import COLUMNS, evaluate
from helpers.cohorts import make_cohort


def cohort_of(y, domain, client=None, classes=("no", "yes")):
    labels = [classes[i] for i in y]
    clients = ["h"] * len(y) if client is None else client
    return Cohort.from_arrays(np.zeros((len(y), 1)), labels, domain=domain, client=clients, classes=classes)


def value(frame, scope, name, metric):
    found = frame[(frame["scope"] == scope) & (frame["name"] == name) & (frame["metric"] == metric)]
    assert len(found) == 1
    return found["value"].iloc[0]


def auc(y, score):
    positive, negative = score[y == 1], score[y == 0]
    if not len(positive) or not len(negative):
        return np.nan
    return np.mean([(p > n) + 0.5 * (p == n) for p in positive for n in negative])


def share(mask, of):
    return mask[of].mean() if of.any() else np.nan


samples = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 3), st.integers(0, 1), st.sampled_from([-2.0, -0.5, 0.0, 0.5, 2.0])),
    min_size=1,
    max_size=25,
)


@settings(max_examples=25, deadline=None)
@given(samples)
def test_rates_and_gaps_are_those_computed_by_hand(rows):
    y, z, c, score = map(np.array, zip(*rows, strict=True))
    cohort = cohort_of(y, [f"d{i}" for i in z], [f"h{i}" for i in c])
    found = observe(cohort, torch.tensor(score)[:, None])
    chosen = score > 0
    by_hand = {
        "auc": {m: auc(y[z == m], score[z == m]) for m in np.unique(z)},
        "tpr": {m: share(chosen, (z == m) & (y == 1)) for m in np.unique(z)},
        "fpr": {m: share(chosen, (z == m) & (y == 0)) for m in np.unique(z)},
        "selection_rate": {m: share(chosen, z == m) for m in np.unique(z)},
    }
    for metric, values in by_hand.items():
        for m, expected in values.items():
            if metric != "auc":
                np.testing.assert_allclose(value(found, "domain", f"d{m}", metric), expected)
        defined = [v for v in values.values() if not np.isnan(v)]
        gap = max(defined) - min(defined) if len(defined) > 1 else np.nan
        np.testing.assert_allclose(value(found, "summary", "domain_gap", metric), gap, atol=1e-12)
    for i, m in {(int(i), int(m)) for i, m in zip(c, z, strict=True)}:
        held = (c == i) & (z == m)
        np.testing.assert_allclose(value(found, "cell", f"h{i} | d{m}", "auc"), auc(y[held], score[held]))
        assert value(found, "cell", f"h{i} | d{m}", "positives") == y[held].sum()
    assert found[found["scope"] == "cell"]["name"].nunique() == len({*zip(c, z, strict=True)})


def test_a_domain_without_positives_makes_no_gap():
    y, domain = [0, 1, 1, 0, 1, 1, 0, 0], ["a"] * 3 + ["b"] * 3 + ["c"] * 2
    found = observe(cohort_of(y, domain), torch.tensor([[-1.0], [1], [1], [-1], [1], [1], [-1], [-1]]))
    assert np.isnan(value(found, "domain", "c", "tpr"))
    assert value(found, "summary", "domain_gap", "tpr") == 0
    gap = found[(found["name"] == "domain_gap") & (found["metric"] == "tpr")]
    assert gap["count"].tolist() == [2]


def test_one_domain_has_no_gap():
    found = observe(cohort_of([0, 1, 1], ["a"] * 3), torch.tensor([[-1.0], [1], [-1]]))
    assert found[found["name"] == "domain_gap"]["value"].isna().all()


def test_positives_are_counted_where_they_are():
    cohort = make_cohort(n=200)
    found = observe(cohort, torch.zeros(200, 1))
    positives = found[found["metric"] == "positives"]
    for scope in ("all", "domain", "client", "cell"):
        assert positives[positives["scope"] == scope]["value"].sum() == cohort.y.sum()
        assert positives[positives["scope"] == scope]["count"].sum() == 200
    first = cohort.client == 0
    assert value(found, "client", cohort.clients[0], "positives") == cohort.y[first].sum()


@pytest.mark.parametrize(("classes", "metrics"), [(0, ["mse"]), (3, ["accuracy", "auc"])])
def test_other_tasks_have_the_gaps_of_their_metrics(classes, metrics):
    cohort = make_cohort(n=200, classes=classes)
    scores = torch.randn(200, cohort.objective.outputs, generator=torch.Generator().manual_seed(0))
    found, by_domain = observe(cohort, scores), evaluate(cohort, scores)
    gaps = found[found["name"] == "domain_gap"]
    assert gaps["metric"].tolist() == metrics
    for metric in metrics:
        values = by_domain[(by_domain["scope"] == "domain") & (by_domain["metric"] == metric)]["value"]
        assert value(found, "summary", "domain_gap", metric) == pytest.approx(values.max() - values.min())
    assert set(found["scope"]) == {"cell", "summary"}
    assert found.columns.tolist() == COLUMNS


def test_names_are_left_as_they_are():
    odd = ["nan", "1", "[b]", "1.0"]
    found = observe(cohort_of([0, 1] * 4, odd * 2), torch.zeros(8, 1))
    assert set(found[(found["metric"] == "tpr") & (found["scope"] == "domain")]["name"]) == set(odd)


def test_fairlearn_is_asked_for_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "fairlearn.metrics", None)
    with pytest.raises(UserError, match=r"pip install 'feddar\[compare\]'"):
        observe(cohort_of([0, 1], ["a", "b"]), torch.zeros(2, 1))
