"""Kinds of columns, and the inputs that are made of them."""

import numpy as np
import pandas as pd
import pytest
import torch

from feddar.data.cohort import Cohort
from feddar.data.columns import Column, UnusableColumnError, infer, infer_all, inputs
from feddar.errors import UserError
from feddar.models.encoders.tabular import TableInput
from feddar.results.training import train


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1, 2, 3], "number"),
        ([1.5, np.nan, 2], "number"),
        (["1", " 2.5", "3e4"], "number"),
        ([True, False], "boolean"),
        (["Yes", "no", None], "boolean"),
        (["T", "F"], "boolean"),
        (["2020-01-01", "2020-01-02 10:30"], "date"),
        (pd.to_datetime(["2020-01-01", None]), "date"),
        (["A", "B", "A"], "category"),
        (["F", "N", "Y"], "category"),
        (["yes", "N", "Y"], "boolean"),
        (["true", "no"], "category"),
        (["A/B", "1/2", "A/B"], "category"),
        (["E11.9", "250", "I10", "I10"], "category"),
        (pd.Categorical(["x", "y"]), "category"),
    ],
)
def test_kinds(values, kind):
    column = infer("c", pd.Series(values))
    assert column.kind == kind
    assert column.gaps == bool(pd.Series(values).isna().any())
    _, numbers, codes = inputs(pd.DataFrame({"c": values}), [column])
    assert (numbers.shape[1], codes.shape[1]) == ((0, 1) if kind == "category" else (1, 0))


@pytest.mark.parametrize(
    ("values", "reason", "row"),
    [
        ([None, None], "no values", None),
        (["1", "2", "high"], "'high' among numbers", 2),
        (["2020-01-01", "2020-01-02", "soon"], "'soon' among dates", 2),
        ([f"name {i}" for i in range(30)], "30 distinct texts", None),
        ([1.0, float("-inf")], "infinite", 1),
        (["4", "5,3", "-1.234,5"], "holds '5,3'$", 1),
        ([None, "31/12/2020", "1/2/2021"], "holds '31/12/2020'$", 1),
        (["31.12.2020 10:30", "01.02.2021"], "holds '31.12.2020 10:30'$", 0),
        (["7", *["."] * 60, *map(str, range(30))], r"holds '\.' among numbers", 1),
        (["<5", ">99"] * 30 + list(map(str, range(30))), "holds '<5' among numbers", 0),
        ([[1, 2], [3]], "lists or records", None),
        ([None, {"a": 1}], "lists or records", None),
    ],
)
def test_unusable_columns_say_why_and_where(values, reason, row):
    with pytest.raises(UnusableColumnError, match=reason) as error:
        infer("c", pd.Series(values))
    assert error.value.row == row


def test_dates_are_days_and_levels_are_numbered():
    table = pd.DataFrame({"day": ["1970-01-02", "1970-01-01T12:00", None], "ward": ["b", None, "a"]})
    _, numbers, codes = inputs(table, [infer(name, table[name]) for name in table])
    np.testing.assert_allclose(numbers[:, 0], [1.0, 0.5, np.nan])
    assert codes[:, 0].tolist() == [2, 0, 1]


def test_statistics_are_sums_over_clients_of_what_is_present():
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"a": rng.normal(3, 2, 300), "b": rng.normal(-1, 0.1, 300)})
    table.loc[rng.random(300) < 0.3, "a"] = np.nan
    cohort = Cohort.from_arrays(table, rng.integers(0, 2, 300), client=rng.integers(0, 3, 300))
    run = train(cohort, rounds=1, validation=0)
    found = run.state.encoders["all"]
    mean, scale = (found[f"encoder.inputs.numbers.{each}"] for each in ("mean", "scale"))
    np.testing.assert_allclose(mean, table.mean(), rtol=1e-5)
    np.testing.assert_allclose(scale, table.std(ddof=0), rtol=1e-4)


def test_a_gap_becomes_the_mean_and_is_marked():
    layer = TableInput(2, gaps=[1], levels=[3])
    layer.numbers.mean[:] = torch.tensor([1.0, 2.0])
    layer.numbers.scale[:] = torch.tensor([2.0, 4.0])
    found = layer(torch.tensor([[3.0, float("nan")], [1.0, 6.0]]), torch.tensor([[0.0], [3.0]]))
    torch.testing.assert_close(found[:, :3], torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]]))
    torch.testing.assert_close(found[1, 3:], layer.levels[0].weight[3])
    assert found.shape[1] == layer.features


def test_a_category_that_is_never_missing_in_training_has_a_neutral_level_for_it():
    table = pd.DataFrame({"ward": ["A", "B"] * 20})
    run = train(Cohort.from_arrays(table, [0, 1] * 20), rounds=1)
    weights = next(value for name, value in run.state.encoders["all"].items() if "inputs.levels.0" in name)
    assert not weights[0].any()
    assert weights[1:].all()


def test_a_table_with_gaps_cannot_be_taken_by_a_linear_map():
    cohort = Cohort.from_arrays(pd.DataFrame({"a": [1.0, None, 2.0, 3.0]}), [0, 1, 0, 1])
    with pytest.raises(UserError, match="numbers without gaps"):
        train(cohort, encoder="linear", k=1, validation=0)


def test_a_frame_with_an_unusable_column_is_refused_by_name():
    with pytest.raises(UserError, match="column 'a' holds 'x' among numbers in row 1"):
        Cohort.from_arrays(pd.DataFrame({"a": ["1", "x", "2"]}), [0, 1, 0])


@pytest.mark.parametrize(
    ("values", "remedy"),
    [
        (["5,3", "1"], "write decimals with a point"),
        (["31/12/2020"], "write dates as 2020-12-31"),
        ([*["."] * 60, *map(str, range(30))], "leave it empty where a value is missing"),
    ],
)
def test_local_notation_comes_with_a_remedy(values, remedy):
    with pytest.raises(UserError, match=f"column 'a' holds .* in row 0: {remedy}"):
        infer_all(pd.DataFrame({"a": values}))


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        ("boolean", [1, 7], "row 1: column 'c' holds '7', which is not yes or no"),
        ("boolean", [0.5, None], "row 0: column 'c' holds '0.5', which is not yes or no"),
        ("number", [1.0, 1e40], r"row 1: column 'c' holds 1e\+40, too large for float32"),
        ("number", [[1], [2]], "row 0: column 'c' holds a list or record"),
        ("category", ["x", {"a": 1}], "row 1: column 'c' holds a list or record"),
    ],
)
def test_values_that_no_column_of_the_kind_can_hold_are_refused_with_their_row(kind, values, message):
    with pytest.raises(UserError, match=message):
        inputs(pd.DataFrame({"c": values}), [Column("c", kind, ("x",))], np.float32, to_learn=False)


def test_truth_values_may_come_as_0_and_1_or_in_other_words_than_in_training():
    column = Column("c", "boolean")
    for values in ([1, 0, None], ["t", "F", None], ["Yes", "no", None], [True, False, None]):
        np.testing.assert_array_equal(inputs(pd.DataFrame({"c": values}), [column])[1][:, 0], [1, 0, np.nan])


def test_a_time_with_its_zone_is_the_same_as_text_and_as_a_timestamp():
    text = pd.Series(["2020-06-01T00:30:00+02:00", "2020-06-02T00:00:00+02:00"])
    zoned = pd.to_datetime(text).dt.tz_convert("Europe/Paris")
    days = [inputs(pd.DataFrame({"c": values}), [Column("c", "date")])[1] for values in (text, zoned)]
    np.testing.assert_array_equal(*days)
