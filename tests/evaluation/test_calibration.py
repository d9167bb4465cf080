"""Calibration errors by domain, held to a computation by hand; several outcomes, and outcomes without risks."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.special import expit

from feddar.data.cohort import Cohort
from feddar.evaluation.calibration import calibration_errors
from feddar.evaluation.metrics import COLUMNS
from helpers.cohorts import make_cohort


def error(y, risk):
    """The mean distance of observed share and mean risk over tenths of the samples by risk."""
    tenth = np.searchsorted(np.quantile(risk, np.arange(1, 10) / 10), risk)
    return sum(abs(y[tenth == g].sum() - risk[tenth == g].sum()) for g in range(10)) / len(y)


def errors_of(cohort, scores):
    found = pd.DataFrame(calibration_errors(cohort, scores), columns=COLUMNS)
    assert set(found["metric"]) == {"ece"}
    return found.set_index("name")["value"], found.set_index("name")["count"]


def test_errors_are_those_computed_by_hand_and_see_a_level_that_auc_does_not():
    rng = np.random.default_rng(0)
    score, domain = rng.normal(size=900), np.repeat(["a", "b", "c"], [500, 300, 100])
    y = (rng.random(900) < expit(score)).astype(int)
    cohort = Cohort.from_arrays(score, y, domain=domain, client=rng.integers(0, 3, 900))
    found, count = errors_of(cohort, torch.from_numpy(score)[:, None])
    by_hand = {m: error(y[domain == m], expit(score[domain == m])) for m in "abc"}
    assert found[list("abc")].to_dict() == pytest.approx(by_hand)
    values = list(by_hand.values())
    summaries = {"domain_min": min(values), "domain_avg": np.mean(values), "domain_max": max(values)}
    assert found.drop(list("abc")).to_dict() == pytest.approx(summaries)
    assert count.to_dict() == {"a": 500, "b": 300, "c": 100, "domain_min": 3, "domain_avg": 3, "domain_max": 3}
    shifted, _ = errors_of(cohort, torch.from_numpy(score + 1)[:, None])  # the same AUC
    assert shifted["domain_avg"] > 2 * found["domain_avg"]


def test_of_several_outcomes_it_is_the_mean():
    rng = np.random.default_rng(1)
    score = rng.normal(size=(300, 2))
    y = (rng.random((300, 2)) < expit(score)).astype(int)
    domain = np.arange(300) % 2
    outcomes = pd.DataFrame({"died": y[:, 0], "stayed": y[:, 1]})
    cohort = Cohort.from_arrays(score, outcomes, domain=domain, client=np.zeros(300, int))
    found, _ = errors_of(cohort, torch.from_numpy(score))
    first = [error(y[domain == 0, o], expit(score[domain == 0, o])) for o in range(2)]
    assert found["0"] == pytest.approx(np.mean(first))


@pytest.mark.parametrize("classes", [0, 3])
def test_other_outcomes_have_none(classes):
    cohort = make_cohort(n=60, classes=classes)
    assert calibration_errors(cohort, torch.zeros(60, cohort.objective.outputs)) == []
