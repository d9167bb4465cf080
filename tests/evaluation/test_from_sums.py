"""Merged sums of clients against metrics of pooled predictions."""

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from feddar.data.cohort import Cohort
from feddar.evaluation.from_sums import ENOUGH, about_coarse_bins, metrics_from_sums, refined_score_range
from feddar.evaluation.metrics import evaluate
from feddar.objectives import Binary, Regression, with_classes
from feddar.objectives.areas import areas, auc_from_counts
from feddar.objectives.score_bins import BINS, CoarseBins, bins_of
from feddar.objectives.scored import Scored

KEY = ["scope", "name", "metric"]
CLIENTS = ("a", "b", "c")
BINARY = Binary()


def make_cohort(y, domain, client, domains=3, classes=None):
    """Return labels in double precision: in single precision it is the pooled figures that are inexact."""
    return Cohort(
        (torch.zeros(len(y), 1),),
        torch.as_tensor(y),
        torch.as_tensor(domain),
        torch.as_tensor(client),
        tuple(f"d{m}" for m in range(domains)),
        CLIENTS,
        with_classes(classes),
    )


def both(cohort, scores):
    """Return the pooled figures, and those merged from what each client says, side by side."""
    scores = torch.as_tensor(scores, dtype=torch.float64)
    told = {}
    for name in cohort.clients:
        mine = cohort.client == cohort.clients.index(name)
        predicted = cohort.objective.predictions(scores[mine])
        scored = Scored(cohort.y[mine], predicted, cohort.domain[mine], len(cohort.domains))
        told[name] = cohort.objective.sums(scored)
    pooled, summed = evaluate(cohort, scores), metrics_from_sums(cohort.objective, told, cohort.domains)
    joined = pooled.merge(summed, on=KEY, suffixes=("", "_merged"), validate="one_to_one", how="outer", indicator=True)
    assert (joined["_merge"] == "both").all(), joined[joined["_merge"] != "both"]
    return joined


def area(histogram):
    """Return the area under the curve from the bins of one domain, [1, 2, BINS]."""
    (counts,) = np.asarray(histogram)
    return auc_from_counts(counts)


def assert_near(joined, auc=0.002, auprc=0.005, other=1e-9):
    assert (joined["value"].isna() == joined["value_merged"].isna()).all()
    assert (joined["count"] == joined["count_merged"]).all()
    difference = (joined["value"] - joined["value_merged"]).abs().fillna(0)
    allowed = joined["metric"].map({"auc": auc, "auprc": auprc}).fillna(other)
    assert (difference <= allowed).all(), joined.assign(difference=difference)


def draw(seed, n, classes, shift=0.0, spread=1.5):
    rng = np.random.default_rng(seed)
    domain, client = rng.integers(0, 3, n), rng.integers(0, 3, n)
    if classes == 2:
        scores = rng.normal(shift, spread, (n, 1))
        y = (rng.random(n) < 1 / (1 + np.exp(-(scores[:, 0] - shift) / spread))).astype(np.int64)
    else:
        scores = rng.normal(0, spread, (n, classes))
        y = np.where(rng.random(n) < 0.5, scores.argmax(1), rng.integers(0, classes, n))
    return make_cohort(y, domain, client, classes=tuple(range(classes))), scores


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("shift", "spread"), [(0, 1.5), (-4, 1), (-8, 4), (8, 2), (-15, 5), (0, 0.2), (0, 20)])
def test_binary_figures_are_those_of_pooled_predictions(seed, shift, spread):
    """Scores in the middle, rare outcomes, near 0 or 1, hardly spread or far spread."""
    assert_near(both(*draw(seed, 3000, 2, shift, spread)))


def test_few_positives():
    """One in a hundred: 60 of 6,000."""
    rng = np.random.default_rng(0)
    n = 6000
    scores, y = rng.normal(-4.6, 1, n), np.zeros(n, np.int64)
    y[np.argsort(scores + rng.normal(0, 1, n))[-60:]] = 1
    cohort = make_cohort(y, np.zeros(n, int), rng.integers(0, 3, n), domains=1, classes=(0, 1))
    joined = both(cohort, scores[:, None])
    assert_near(joined[joined["scope"] == "all"])


@pytest.mark.parametrize("classes", [3, 7])
def test_figures_of_several_classes(classes):
    assert_near(both(*draw(0, 4000, classes)))


def test_ties_count_half():
    """Scores that are equal share a bin, and all others do not, so that nothing is lost."""
    rng = np.random.default_rng(0)
    scores = rng.choice([-3.0, -1.0, 0.5, 2.0], (500, 1))
    y = (rng.random(500) < 0.5).astype(np.int64)
    cohort = make_cohort(y, rng.integers(0, 3, 500), rng.integers(0, 3, 500), classes=(0, 1))
    assert_near(both(cohort, scores), auc=1e-9, auprc=0.02)  # bins have an order at random, and ties have none


@given(st.lists(st.tuples(st.floats(-45, 45), st.booleans()), min_size=2, max_size=40))
def test_the_area_is_off_by_at_most_half_the_share_of_pairs_in_one_bin(samples):
    """Of few samples, 0.002 cannot be kept: one pair of 5 times 5 in one bin is worth 0.02. This always is."""
    scores = torch.tensor([[score] for score, _ in samples], dtype=torch.float64)
    y = torch.tensor([int(positive) for _, positive in samples])
    predicted = BINARY.predictions(scores)
    told = BINARY.sums(Scored(y, predicted, torch.zeros_like(y), 1))
    without, of_it = told["histogram"][0, 0].double()
    pairs = float(without.sum() * of_it.sum())
    assert pairs == float((y == 0).sum() * (y == 1).sum())
    found, pooled = area(told["histogram"][0]), BINARY.measure(y.numpy(), predicted.numpy())["auc"]
    assert np.isnan(found) == np.isnan(pooled) == (pairs == 0)
    if pairs:
        assert abs(found - pooled) <= float(without @ of_it) / pairs / 2 + 1e-9


def test_scores_within_one_bin_cannot_be_told_apart():
    """What the bound says, at its worst: the area is 1, and what is merged says a half."""
    scores = np.array([[0.0001], [0.0002]])
    joined = both(make_cohort(np.array([0, 1]), np.zeros(2, int), np.zeros(2, int), classes=(0, 1)), scores)
    row = joined[(joined["scope"] == "all") & (joined["metric"] == "auc")].iloc[0]
    assert (row["value"], row["value_merged"]) == (1.0, 0.5)


@pytest.mark.parametrize(("shift", "spread"), [(0, 0.01), (-4, 0.1), (-8, 1), (3, 0.05), (0, 1), (-2, 6)])
def test_a_second_look_tells_scores_apart_wherever_they_are(shift, spread):
    """200 samples of a model that hardly tells them apart, or whose outcome is rare: within 0.002 in every draw."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        scores = torch.from_numpy(rng.normal(shift, spread, (200, 1)))
        y = torch.from_numpy((rng.random(200) < 0.3 + 0.2 * np.sign(scores[:, 0].numpy() - shift)).astype(np.int64))
        predicted, nowhere = BINARY.predictions(scores), torch.zeros(200, dtype=torch.long)
        score_range = None
        for _ in range(2):
            told = BINARY.sums(Scored(y, predicted, nowhere, 1, score_range))
            score_range = refined_score_range({"site": told}, score_range)
        pooled = BINARY.measure(y.numpy(), predicted.numpy())["auc"]
        assert abs(area(told["histogram"][0]) - pooled) < 0.002


def test_every_score_has_a_bin():
    scores = torch.tensor([-800.0, -36.0, 0.0, 36.0, 800.0], dtype=torch.float64)[:, None]
    y = torch.zeros(5, dtype=torch.long)
    told = BINARY.sums(Scored(y, BINARY.predictions(scores), torch.zeros_like(y), 1))
    where = torch.nonzero(told["histogram"][0, 0, 0]).flatten().tolist()
    assert len(where) == 3
    assert 0 < where[0] < BINS // 2 == where[1] < where[2] < BINS


@pytest.mark.parametrize("centre", [0, 70, -3])
def test_figures_of_numbers(centre):
    rng = np.random.default_rng(0)
    y = rng.normal(centre, 10, 600)
    cohort = make_cohort(y, rng.integers(0, 3, 600), rng.integers(0, 3, 600))
    assert_near(both(cohort, (y + rng.normal(0, 4, 600))[:, None]))


def test_a_number_that_does_not_vary_has_no_r2():
    cohort = make_cohort(np.full(30, 7.3), np.zeros(30, int), np.arange(30) % 3, domains=1)
    joined = both(cohort, np.full((30, 1), 7.0))
    assert joined[joined["metric"] == "r2"]["value_merged"].isna().all()


@pytest.mark.parametrize("classes", [2, 3])
def test_one_class_only_has_no_area(classes):
    rng = np.random.default_rng(0)
    cohort = make_cohort(
        np.ones(30, np.int64), rng.integers(0, 3, 30), np.arange(30) % 3, classes=tuple(range(classes))
    )
    joined = both(cohort, rng.normal(size=(30, 1 if classes == 2 else classes)))
    assert joined[joined["metric"] == "auc"]["value_merged"].isna().all()
    assert_near(joined)


def test_a_domain_that_nobody_tests_and_a_client_without_samples_have_no_rows():
    cohort, scores = draw(0, 200, 2)
    held = (cohort.domain != 1) & (cohort.client != 2)
    joined = both(cohort.rows(held), scores[held.numpy()])
    assert set(joined["name"]).isdisjoint({"d1", "c"})
    assert_near(joined[joined["metric"] != "auc"])


def test_nothing_told_is_an_empty_table():
    assert metrics_from_sums(BINARY, {}, ("A",)).empty
    nothing = BINARY.sums(Scored(torch.zeros(0).long(), torch.zeros(0, 2).double(), torch.zeros(0).long(), 2))
    found = metrics_from_sums(BINARY, {"a": nothing}, ("A", "B"))
    assert found.empty
    assert list(found.columns) == list(metrics_from_sums(BINARY, {}, ("A",)).columns)


def test_metrics_of_sums_by_hand():
    found = Regression().measure_sums(np.array([2.0, 5.0, 3.0, 4.0, 10.0]))
    assert found == pytest.approx({"mse": 2.5, "rmse": 2.5**0.5, "mae": 1.5, "r2": -1.5})
    told = np.zeros((1, 2, BINS))
    told[0, 0, [3, 9]], told[0, 1, [9, 20]] = 1, 1
    assert area(told) == pytest.approx(3.5 / 4)


def test_summaries_are_over_domains_and_clients():
    joined = both(*draw(1, 900, 2)).set_index(KEY)["value_merged"]
    by_domain = joined.loc["domain", :, "accuracy"]
    assert joined["summary", "domain_min", "accuracy"] == by_domain.min()
    assert joined["summary", "domain_avg", "accuracy"] == pytest.approx(by_domain.mean())
    assert isinstance(joined, pd.Series)


@given(st.lists(st.tuples(st.integers(0, BINS - 1), st.integers(0, 30)), min_size=1, max_size=80), st.integers(2, 8))
def test_no_bin_has_fewer_patients_than_may_be_told_of(samples, least):
    place, patient = (torch.tensor(column) for column in zip(*samples, strict=True))
    told = CoarseBins(patient, least)(place)
    distinct = patient.unique().numel()
    for bin_ in told.unique().tolist():
        assert patient[told == bin_].unique().numel() >= min(least, distinct)
    # The order of scores stays, but for those that are put together.
    order = torch.argsort(place, stable=True)
    assert bool((told[order].diff() >= 0).all())


def test_a_site_says_little_of_few_patients_and_the_area_stays_near():
    """Three sites with 300 test samples each, of which no five are told apart."""
    rng = np.random.default_rng(0)
    scores = torch.from_numpy(rng.normal(-1, 1.2, (900, 1)))
    y = torch.from_numpy((rng.random(900) < 1 / (1 + np.exp(-1.2 * scores[:, 0].numpy()))).astype(np.int64))
    predicted, total = BINARY.predictions(scores), torch.zeros(1, 1, 2, BINS)
    for rows in torch.arange(900).split(300):
        nowhere = torch.zeros(300, dtype=torch.long)
        scored = Scored(y[rows], predicted[rows], nowhere, 1, coarse=CoarseBins(rows, 5))
        part = BINARY.sums(scored)["histogram"]
        filled = part.sum(2)
        assert int(filled[filled > 0].min()) >= 5
        total = total + part
    pooled = BINARY.measure(y.numpy(), predicted.numpy())["auc"]
    assert abs(area(total[0]) - pooled) < 0.002


def test_domains_with_few_test_samples_a_site_are_named():
    rows = [("domain", "A", "auc", 0.8, 3 * ENOUGH), ("domain", "B", "auc", 0.5, 3 * ENOUGH - 1)]
    rows += [("domain", "C", "auc", float("nan"), 3), ("all", "all", "auc", 0.7, 10), ("domain", "D", "mse", 0.7, 10)]
    results = pd.DataFrame(rows, columns=["scope", "name", "metric", "value", "count"])
    assert about_coarse_bins(results, 3).startswith(f"Test samples of B ({3 * ENOUGH - 1}) are few for 3 sites")
    assert about_coarse_bins(results[results["name"] != "B"], 3) is None


@pytest.mark.parametrize(("n", "off"), [(ENOUGH, 0.012), (8, 0.15)])
def test_with_few_samples_a_site_bins_of_patients_make_the_area_too_small(n, off):
    generator = torch.Generator().manual_seed(0)
    differences = []
    for _ in range(40):
        positive = torch.rand(3, n, generator=generator) < 0.4
        risk = torch.sigmoid(torch.randn(3, n, generator=generator) + 1.2 * positive).double()
        bins = [bins_of(torch.stack([1 - each, each], 1), None)[:, 1] for each in risk]
        coarse = torch.cat([CoarseBins(torch.arange(n), 5)(each) for each in bins])
        counts = [np.bincount(coarse[positive.flatten() == label], minlength=BINS) for label in (0, 1)]
        exact = areas(positive.view(1, -1).numpy(), risk.view(1, -1).numpy())[0]
        differences.append(auc_from_counts(np.stack(counts)) - exact[0])
    mean = np.mean(differences)
    assert -off < mean < 0 if n == ENOUGH else mean < -off
