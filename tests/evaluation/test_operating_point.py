"""Operating points: thresholds that are given, or that reach an aim on validation samples."""

import numpy as np
import pytest
import torch
from scipy.special import expit

from feddar.data.cohort import Cohort
from feddar.errors import UserError
from feddar.evaluation.operating_point import OperatingPoint, nobody_or_everybody
from feddar.objectives import Binary, Regression
from feddar.settings import Settings, checked


def validation(n=500):
    rng = np.random.default_rng(0)
    scores, domain = rng.normal(-1, 1, n), rng.choice(["a", "b"], n)
    scores[domain == "b"] -= 1
    y = (rng.random(n) < expit(scores)).astype(int)
    cohort = Cohort.from_arrays(scores[:, None], y, domain=domain, client=["x"] * n)
    return cohort, torch.from_numpy(scores)[:, None]


@pytest.mark.parametrize("by", ["all", "domain"])
@pytest.mark.parametrize(("kind", "aim"), [("flag", "10%"), ("sensitivity", 0.9)])
def test_the_aim_is_reached_on_validation_samples_with_the_highest_threshold(kind, aim, by):
    cohort, scores = validation()
    point = OperatingPoint.of(checked(Settings, {kind: aim, "threshold_by": by}))
    at = point.thresholds(cohort, scores, 2, 1)[:, 0]
    risk, y, domain = expit(scores[:, 0].numpy()), cohort.y.numpy() == 1, cohort.domain.numpy()
    parts = [domain == 0, domain == 1] if by == "domain" else [np.ones(len(y), bool)]
    assert (len(set(at)) == 2) == (by == "domain")
    for part, threshold in zip(parts, at, strict=False):
        held = risk[part & y] if kind == "sensitivity" else risk[part]
        share = (held > threshold).mean()
        one = 1 / len(held)
        assert (0.9 <= share < 0.9 + one) if kind == "sensitivity" else (0.1 - one <= share <= 0.1)


def test_a_domain_without_positives_has_the_threshold_of_all():
    cohort, scores = validation()
    cohort.y[cohort.domain == 1] = 0
    at = OperatingPoint("sensitivity", 0.9, True).thresholds(cohort, scores, 2, 1)
    assert at[1] == OperatingPoint("sensitivity", 0.9, False).thresholds(cohort, scores, 2, 1)[1]


def test_one_operating_point_is_given_and_it_must_be_possible():
    assert OperatingPoint.of(Settings()) == OperatingPoint("threshold", 0.5, False)
    for given in (10, "10", 10.0):
        with pytest.raises(UserError, match=f"flag is a share: write {given} per cent as {given}% or 0.1"):
            checked(Settings, {"flag": given})
    with pytest.raises(UserError, match="flag and sensitivity are different operating points"):
        checked(Settings, {"flag": 0.1, "sensitivity": 0.9})
    with pytest.raises(UserError, match="flag"):
        checked(Settings, {"flag": "ten%"})
    with pytest.raises(UserError, match="is chosen on validation samples"):
        OperatingPoint("flag", 0.1, False).require_possible(Binary(), validated=False)
    with pytest.raises(UserError, match="is for yes/no outcomes"):
        OperatingPoint("flag", 0.1, False).require_possible(Regression(), validated=True)


def test_where_nobody_or_everybody_is_flagged_gaps_mean_nothing_or_little():
    assert nobody_or_everybody({"a": 0.4, "b": 0.1}) is None
    assert nobody_or_everybody({"a": 0.0, "b": 0.0}).startswith("Nobody is flagged at this operating point")
    assert nobody_or_everybody({"a": 1.0}).startswith("Everybody is flagged at this operating point")
    some = nobody_or_everybody({"a": 0.0, "b": 0.2, "c": 0.0, "d": 0.0, "e": 1.0})
    assert (
        some.startswith("Nobody is flagged in a, c and d; everybody is flagged in e at this") and "mean little" in some
    )
    assert nobody_or_everybody(dict.fromkeys("abcdefgh", 0.0) | {"i": 0.1}).startswith("Nobody is flagged in 8 of 9 do")
