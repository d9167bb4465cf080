"""Figures with intervals: equal to scikit-learn's and to a plain bootstrap, and near to them from sums of sites."""

import numpy as np
import pytest
import sklearn.metrics as sk
import torch
from scipy.special import expit
from scipy.stats import binomtest
from sklearn.linear_model import LogisticRegression

from feddar.data.cohort import Cohort
from feddar.evaluation.figures import GAP, RATES, figures_from_scores, figures_from_sums
from feddar.objectives.score_bins import CoarseBins
from feddar.objectives.scored import Scored


def draw(n=3000, seed=0, patients=None):
    """Return a cohort of three domains, and scores that are too extreme."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(-1, 1.5, n)
    domain = rng.choice(3, n, p=[0.5, 0.3, 0.2])
    y = (rng.random(n) < expit(0.3 + 0.8 * scores - 0.4 * domain)).astype(int)
    given = {} if patients is None else {"group": rng.integers(0, patients, n)}
    names = np.array(["White", "Black", "Asian"])[domain]
    site = rng.choice(["x", "y", "z"], n)
    cohort = Cohort.from_arrays(scores[:, None], y, domain=names, client=site, **given)
    return cohort, torch.from_numpy(scores)[:, None]


def summed(cohort, scores, least=1):
    """Return the sums of each site."""
    sums, predicted = [], cohort.objective.predictions(scores)
    for i in range(len(cohort.clients)):
        rows = cohort.client == i
        coarse = CoarseBins(torch.arange(int(rows.sum())), least)
        part = (cohort.y[rows], predicted[rows], cohort.domain[rows], len(cohort.domains))
        sums.append(cohort.objective.sums(Scored(*part, None, coarse)))
    return sums


def rates(y, flagged):
    (cleared, false), (missed, true) = sk.confusion_matrix(y, flagged, labels=[0, 1])
    return {
        "sensitivity": true / (true + missed),
        "specificity": cleared / (cleared + false),
        "ppv": true / (true + false),
        "npv": cleared / (cleared + missed),
        "selection_rate": flagged.mean(),
    }


@pytest.fixture(scope="module")
def drawn():
    cohort, scores = draw()
    return cohort, scores, figures_from_scores(cohort, scores, np.full((3, 1), 0.3))


def test_values_are_scikit_learns(drawn):
    cohort, scores, found = drawn
    risk, y = expit(scores[:, 0].numpy()), cohort.y.numpy()
    parts = {name: (cohort.domain == m).numpy() for m, name in enumerate(cohort.domains)}
    for figures, rows in [*((found.by_domain[n], r) for n, r in parts.items()), (found.overall, np.ones(len(y), bool))]:
        expected = rates(y[rows], risk[rows] > 0.3) | {
            "auc": sk.roc_auc_score(y[rows], risk[rows]),
            "auprc": sk.average_precision_score(y[rows], risk[rows]),
            "brier": sk.brier_score_loss(y[rows], risk[rows]),
            "log_loss": sk.log_loss(y[rows], risk[rows]),
            "threshold": 0.3,
        }
        assert {name: figures[name].value for name in expected} == pytest.approx(expected)
        assert figures["auc"].count == rows.sum() and figures["ppv"].positives == y[rows].sum()
        assert figures["auc"].interval == "bootstrap by sample"
    sensitivity = [figures["sensitivity"].value for figures in found.by_domain.values()]
    assert found.gaps["tpr"].value == pytest.approx(max(sensitivity) - min(sensitivity))


def test_intervals_are_those_of_a_plain_bootstrap(drawn):
    cohort, scores, found = drawn
    risk, y = expit(scores[:, 0].numpy()), cohort.y.numpy()
    rows = np.flatnonzero((cohort.domain == 2).numpy())
    rng, values = np.random.default_rng(1), []
    for _ in range(400):
        again = rng.choice(rows, len(rows))
        values.append([sk.roc_auc_score(y[again], risk[again]), sk.average_precision_score(y[again], risk[again]),
                       *rates(y[again], risk[again] > 0.3).values()])  # fmt: skip
    low, high = np.percentile(values, (2.5, 97.5), axis=0)
    figures = found.by_domain[cohort.domains[2]]
    for place, name in enumerate(("auc", "auprc", *RATES)):
        assert figures[name].low == pytest.approx(low[place], abs=0.02)
        assert figures[name].high == pytest.approx(high[place], abs=0.02)
        assert figures[name].low < figures[name].value < figures[name].high


def normal(middle, error):
    return [middle + sign * 1.96 * error for sign in (-1, 1)]


def test_intervals_are_those_of_large_samples(drawn):
    """Of rates as statsmodels' proportion_confint has them, and of slope and intercept as its logistic regression."""
    cohort, scores, found = drawn
    score, y = scores[:, 0].numpy(), cohort.y.numpy() == 1
    flagged = expit(score) > 0.3
    among = {"sensitivity": y, "specificity": ~y, "ppv": flagged, "npv": ~flagged, "selection_rate": y | ~y}
    shares = {name: (found.overall[name].value, held.sum()) for name, held in among.items()}
    expected = {name: normal(share, np.sqrt(share * (1 - share) / n)) for name, (share, n) in shares.items()}
    for name, inputs in (("slope", np.stack([score, np.ones_like(score)], 1)), ("intercept", np.ones((len(y), 1)))):
        figure = found.overall[f"calibration_{name}"]
        offset = score if name == "intercept" else 0
        fitted = LogisticRegression(C=np.inf, tol=1e-10).fit(score[:, None], y)
        coefficients = [figure.value] if name == "intercept" else [figure.value, fitted.intercept_[0]]
        p = expit(offset + inputs @ coefficients)
        covariance = np.linalg.inv((inputs.T * (p * (1 - p))) @ inputs)
        expected[f"calibration_{name}"] = normal(figure.value, np.sqrt(covariance[0, 0]))
    for name, (low, high) in expected.items():
        figure, near = found.overall[name], 0.1 * (high - low)
        assert (figure.low, figure.high) == (pytest.approx(low, abs=near), pytest.approx(high, abs=near)), name


@pytest.mark.parametrize("summed_up", [False, True])
def test_shares_of_none_or_all_have_exact_intervals(summed_up):
    """All resamples of them are alike, which would say that they are certain."""
    cohort, scores = draw(n=400)
    above = np.full((3, 1), 0.9999)
    figures = (
        figures_from_sums(cohort.objective, summed(cohort, scores), cohort.domains, None, above)
        if summed_up
        else figures_from_scores(cohort, scores, above)
    )
    for part in (*figures.by_domain.values(), figures.overall):
        positives = int(part["sensitivity"].positives)
        negatives = part["sensitivity"].count - positives
        for name, hits, of in (("sensitivity", 0, positives), ("specificity", negatives, negatives)):
            low, high = binomtest(hits, of).proportion_ci(0.95, "exact")
            assert (part[name].low, part[name].high) == pytest.approx((low, high)) and part[name].interval == "exact"
        assert part["npv"].interval.startswith("bootstrap") and part["ppv"].interval == ""
    assert np.isnan(figures.gaps["tpr"].low) and figures.gaps["tpr"].interval == ""
    curve = figures.calibration[figures.calibration["observed"] == 0]
    ends = [binomtest(0, int(count)).proportion_ci(0.95, "exact").high for count in curve["count"]]
    assert len(curve) and (curve["low"] == 0).all() and curve["high"].to_numpy() == pytest.approx(ends)


def test_an_accuracy_of_100_percent_has_an_exact_interval_and_areas_of_1_have_none():
    cohort, _ = draw(n=400)
    figures = figures_from_scores(cohort, 20.0 * cohort.y[:, None] - 10)
    for part in (*figures.by_domain.values(), figures.overall):
        low = binomtest(part["accuracy"].count, part["accuracy"].count).proportion_ci(0.95, "exact").low
        assert (part["accuracy"].low, part["accuracy"].high) == (pytest.approx(low), 1)
        assert part["accuracy"].interval == "exact"
        assert {part[name].interval for name in ("auc", "auprc")} == {""}


def test_where_patients_have_several_samples_shares_of_none_have_no_interval():
    cohort, scores = draw(n=400, patients=100)
    figures = figures_from_scores(cohort, scores, np.full((3, 1), 0.9999))
    assert np.isnan(figures.overall["sensitivity"].low) and figures.overall["sensitivity"].interval == ""
    assert figures.calibration.loc[figures.calibration["observed"] == 0, "high"].isna().all()


def test_patients_with_many_samples_make_intervals_wider():
    """Here each patient has the same sample ten times, so there are a tenth as many independent ones."""
    cohort, scores = draw(n=300)
    tenfold = torch.arange(300).repeat_interleave(10)
    arrays = {"domain": np.array(cohort.domains)[cohort.domain[tenfold]], "client": ["x"] * 3000}
    widths = []
    for group in (None, tenfold.numpy()):
        more = {} if group is None else {"group": group}
        copied = Cohort.from_arrays(scores[tenfold].numpy(), cohort.y[tenfold].numpy(), **arrays, **more)
        figure = figures_from_scores(copied, scores[tenfold]).overall["auc"]
        widths.append(figure.high - figure.low)
        assert figure.interval == ("bootstrap by sample" if group is None else "bootstrap by patient")
    assert widths[1] / widths[0] == pytest.approx(10**0.5, rel=0.15)


@pytest.mark.parametrize(("least", "n"), [(1, 3000), (5, 12_000)])
def test_figures_from_sums_are_near_those_of_samples(least, n):
    """Where bins must have five patients, those at the threshold are on one side of it: that takes more samples."""
    cohort, scores = draw(n=n)
    exact = figures_from_scores(cohort, scores, np.full((3, 1), 0.3))
    found = figures_from_sums(
        cohort.objective, summed(cohort, scores, least), cohort.domains, None, np.full((3, 1), 0.3)
    )
    both = exact.table.merge(found.table, on=["scope", "name", "metric"], suffixes=("", "_sums"))
    assert len(both) == len(exact.table) == len(found.table)
    assert both["value_sums"].to_numpy() == pytest.approx(both["value"].to_numpy(), abs=0.005)
    assert (both["count"] == both["count_sums"]).all()
    np.testing.assert_array_equal(both["positives"], both["positives_sums"])
    width, width_sums = both["high"] - both["low"], both["high_sums"] - both["low_sums"]
    has = both["low"].notna()
    assert (has == both["low_sums"].notna()).all() and (found.table["interval"][has] == "bootstrap of counts").all()
    assert (width_sums[has] / width[has]).between(0.6, 1.6).all()
    np.testing.assert_allclose(found.calibration["predicted"], exact.calibration["predicted"], atol=0.005)
    np.testing.assert_allclose(found.decisions["net_benefit"][:60], exact.decisions["net_benefit"][:60], atol=0.005)


def test_other_outcomes_have_intervals_of_their_metrics_and_no_calibration():
    rng = np.random.default_rng(0)
    x, domain, client = rng.normal(size=(400, 3)), rng.choice(["a", "b"], 400), ["x"] * 400
    numbers = Cohort.from_arrays(x, x[:, 0] + 1000 + rng.normal(size=400), domain=domain, client=client)
    figures = figures_from_scores(numbers, torch.from_numpy(x[:, :1] + 1000))
    assert figures.calibration.empty and figures.decisions.empty
    assert set(figures.overall) == {"mse", "rmse", "mae", "r2"} and "mse" in figures.gaps
    assert figures.overall["r2"].low < figures.overall["r2"].value < figures.overall["r2"].high
    classes = Cohort.from_arrays(x, x.argmax(1), domain=domain, client=client)
    figures = figures_from_scores(classes, torch.from_numpy(x + rng.normal(size=x.shape)))
    assert all(each.low < each.value < each.high for each in figures.by_domain["a"].values())
    from_sums = figures_from_sums(classes.objective, summed(classes, torch.from_numpy(x)), classes.domains, None)
    assert np.isnan(from_sums.overall["accuracy"].low) and from_sums.overall["accuracy"].interval == ""
    assert from_sums.overall["auc"].low <= from_sums.overall["auc"].value


def test_a_domain_without_positives_has_what_is_defined():
    cohort, scores = draw(n=300)
    cohort.y[cohort.domain == 2] = 0
    found = figures_from_scores(cohort, scores)
    figures = found.by_domain[cohort.domains[2]]
    assert np.isnan(figures["auc"].value) and np.isnan(figures["sensitivity"].low) and figures["auc"].interval == ""
    assert figures["specificity"].low < figures["specificity"].value and figures["auc"].positives == 0
    assert found.gaps["tpr"].value >= 0 and (found.table["name"] == GAP).sum() == 4
    nothing = figures_from_sums(cohort.objective, [], cohort.domains, None)
    assert nothing is None
