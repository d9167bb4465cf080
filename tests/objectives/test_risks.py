"""Calibration and net benefit of predicted risks, beside scikit-learn and definitions."""

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import expit, logit
from sklearn.calibration import calibration_curve
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score, roc_auc_score

from feddar.objectives.risks import Risks


def draw(n=600, seed=0, digits=None):
    rng = np.random.default_rng(seed)
    risk = expit(rng.normal(-0.5, 1.3, n))
    risk = risk if digits is None else risk.round(digits)
    return rng.random(n) < expit(0.4 + 0.7 * logit(np.clip(risk, 0.01, 0.99))), risk


@pytest.mark.parametrize("digits", [None, 1])
def test_the_curve_is_scikit_learns(digits):
    y, risk = draw(digits=digits)
    risks = Risks.of(y, risk)
    observed, predicted, held = risks.curve(risks.tenths())
    expected = calibration_curve(y, risk, n_bins=10, strategy="quantile")
    np.testing.assert_allclose(observed[held > 0], expected[0], rtol=1e-12)
    np.testing.assert_allclose(predicted[held > 0], expected[1], rtol=1e-12)
    assert held.sum() == len(y)
    if digits is None:
        error = np.mean(np.abs(expected[0] - expected[1]))  # tenths are equally large
        assert risks.calibration(risks.tenths())["ece"] == pytest.approx(error, rel=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_slope_and_intercept_are_those_of_logistic_regressions(seed):
    y, risk = draw(seed=seed)
    risks, score = Risks.of(y, risk), logit(risk)
    found = risks.calibration(risks.tenths())
    fitted = LogisticRegression(C=np.inf, tol=1e-10, max_iter=1000).fit(score[:, None], y)
    assert found["calibration_slope"] == pytest.approx(fitted.coef_[0, 0], rel=1e-4)
    offset = minimize(lambda a: -np.log(expit(np.where(y, a + score, -a - score))).sum(), 0.0)
    assert found["calibration_intercept"] == pytest.approx(offset.x[0], rel=1e-4)


def test_risks_that_separate_the_outcome_have_no_slope_and_one_outcome_has_neither():
    apart = Risks.of(np.array([False, False, True, True]), np.array([0.1, 0.2, 0.8, 0.9]))
    assert np.isnan(apart.calibration(apart.tenths())["calibration_slope"])
    alone = Risks.of(np.zeros(4, bool), np.array([0.1, 0.2, 0.8, 0.9]))
    found = alone.calibration(alone.tenths())
    assert np.isnan([found["calibration_slope"], found["calibration_intercept"]]).all()


def test_net_benefit_is_its_definition():
    y, risk = draw(n=200)
    thresholds = np.array([0.1, 0.35, 0.8])
    risks = Risks.of(y, risk)
    for t, found, everybody in zip(
        thresholds, risks.net_benefit(thresholds), risks.benefit_of_flagging_all(thresholds), strict=True
    ):
        flagged = risk > t
        assert found == pytest.approx((y & flagged).mean() - (~y & flagged).mean() * t / (1 - t))
        assert everybody == pytest.approx(y.mean() - (~y).mean() * t / (1 - t))


def test_areas_and_losses_of_counts_are_those_of_samples():
    y, risk = draw()
    found = Risks.of(y, risk).areas() | Risks.of(y, risk).losses()
    assert found["auc"] == pytest.approx(roc_auc_score(y, risk))
    assert found["auprc"] == pytest.approx(average_precision_score(y, risk))
    assert found["brier"] == pytest.approx(((risk - y) ** 2).mean())
    assert found["accuracy"] == pytest.approx(((risk > 0.5) == y).mean())
    assert found["log_loss"] == pytest.approx(-np.log(np.where(y, risk, 1 - risk)).mean())
