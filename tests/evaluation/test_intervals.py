"""Means, paired differences and their intervals, from results alone."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feddar.evaluation.intervals import across, bootstrap_interval, paired_differences

FEW = st.lists(st.floats(-1, 1), min_size=2, max_size=8)
ENOUGH = st.lists(st.floats(-1, 1), min_size=5, max_size=8)


def results(values):
    """One figure of methods (rows) in folds (columns)."""
    rows = [
        (method, fold, 0, "summary", "domain_avg", "auc", value, 5)
        for method, folds in values.items()
        for fold, value in enumerate(folds)
    ]
    return pd.DataFrame(rows, columns=["method", "fold", "seed", "scope", "name", "metric", "value", "count"])


@given(FEW, st.randoms())
def test_an_interval_does_not_depend_on_the_order(values, random):
    assert bootstrap_interval(values) == bootstrap_interval(random.sample(values, len(values)))


@given(ENOUGH)
def test_an_interval_holds_the_mean_and_lies_among_the_values(values):
    low, high = bootstrap_interval(values)
    assert min(values) - 1e-12 <= low <= np.mean(values) + 1e-12
    assert np.mean(values) - 1e-12 <= high <= max(values) + 1e-12


@given(FEW, st.floats(-5, 5), st.floats(0.01, 10))
def test_an_interval_moves_and_scales_with_the_values(values, shift, scale):
    moved = bootstrap_interval(shift + scale * np.array(values))
    assert moved == pytest.approx(shift + scale * np.array(bootstrap_interval(values)), abs=1e-9)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 10])
def test_intervals_of_few_values_are_wide_enough(n):
    """Of many samples from a normal distribution, about 95 % of intervals must hold its mean.

    The plain percentile bootstrap of 5 values holds it in some 83 %, that of 2 in 50 %.
    """
    rng = np.random.default_rng(0)
    found = [bootstrap_interval(rng.normal(size=n)) for _ in range(400)]
    covered = np.mean([low <= 0 <= high for low, high in found])
    assert 0.91 < covered < 0.99


def test_fewer_than_five_values_get_students_interval():
    assert bootstrap_interval([1.0, 2.0]) == pytest.approx((1.5 - 6.353, 1.5 + 6.353), abs=1e-3)


def test_one_value_has_no_interval():
    assert np.isnan(bootstrap_interval([0.1])).all()
    assert np.isnan(bootstrap_interval([])).all()


def test_differences_are_taken_within_folds():
    frame = results({"fedavg": [0.1, 0.5, 0.9], "other": [0.2, 0.6, 1.0]})
    (row,) = paired_differences(frame.sample(frac=1, random_state=0), "fedavg").to_dict("records")
    assert row["difference"] == pytest.approx(0.1)
    assert (row["low"], row["high"]) == pytest.approx((0.1, 0.1))
    assert row["pairs"] == 3


def test_an_undefined_value_leaves_its_pair_out():
    frame = results({"fedavg": [0.1, np.nan, 0.3], "other": [0.2, 0.9, np.nan]})
    (row,) = paired_differences(frame, "fedavg").to_dict("records")
    assert (row["difference"], row["pairs"]) == (pytest.approx(0.1), 1)
    assert np.isnan(row["low"])
    means = across(frame).set_index("method")
    assert means.loc["other", "mean"] == pytest.approx(0.55)
    assert means["pairs"].to_dict() == {"fedavg": 2, "other": 2}


def test_a_pair_that_only_one_method_has_is_left_out():
    frame = results({"fedavg": [0.1, 0.2], "other": [0.2, 0.3]})
    whole = paired_differences(frame[~((frame["method"] == "fedavg") & (frame["fold"] == 1))], "fedavg")
    assert whole["pairs"].tolist() == [1]
