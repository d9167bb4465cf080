"""What is noted about a table: codes, marks of missing values, leaks and paths, and nothing about an ordinary one."""

import numpy as np
import pandas as pd
import pytest

from feddar.data.suspicions import explained, marks_in
from feddar.data.table_options import TableOptions
from feddar.data.tables import read_cohort

ROLES = {"client": "hospital", "domain": "race", "target": "outcome"}


def frame(rows=400, **more):
    rng = np.random.default_rng(0)
    given = {name: make(rng, rows) for name, make in more.items()}
    return pd.DataFrame({
        "age": rng.normal(60, 12, rows).round(1), "ward": rng.choice(["icu", "er"], rows), **given,
        "hospital": rng.choice(["n", "s"], rows), "race": rng.choice(["A", "B"], rows),
        "outcome": rng.integers(0, 2, rows),
    })  # fmt: skip


def notes_of(table, folder, **options):
    table.to_csv(folder / "t.csv", index=False)
    return read_cohort(TableOptions(data=str(folder / "t.csv"), **ROLES, **options)).notes


def test_of_an_ordinary_table_nothing_is_noted(tmp_path):
    assert (
        notes_of(frame(bp=lambda rng, n: rng.integers(80, 180, n), sex=lambda rng, n: rng.integers(1, 3, n)), tmp_path)
        == ()
    )


def test_codes(tmp_path):
    table = frame(sector=lambda rng, n: rng.integers(1, 13, n), unit_code=lambda rng, n: rng.integers(1, 90, n))
    (note,) = notes_of(table, tmp_path)
    assert note == (
        "columns 'sector', 'unit_code' hold few different whole numbers: if they are codes and not amounts, add "
        "--categories sector,unit_code."
    )
    assert notes_of(table, tmp_path, categories="sector,unit_code") == ()


@pytest.mark.parametrize(("values", "marks"), [
    ([1, 2, 97, 98, 99], ["97", "98", "99"]),
    ([1, 2, 9], ["9"]),
    ([0, 3, 5, -1], ["-1"]),
    ([0.5, 1.5, -9, 999], ["-9", "999"]),
    ([*range(100)], []),
    ([-3, -1, 2], []),
    ([1, 99], []),
    (["a", "b", "?"], ["?"]),
    (["yes", "no", "Unknown", "N/A."], ["N/A.", "Unknown"]),
    (["2020-01-01", "9999-99-99"], ["9999-99-99"]),
    (["A-", "B+"], []),
])  # fmt: skip
def test_marks_of_missing_values(values, marks):
    assert sorted(marks_in(pd.Series(values))) == sorted(marks)


def test_marks_are_noted_with_the_option(tmp_path):
    table = frame(
        smoker=lambda rng, n: rng.choice([1, 2, 98], n), plan=lambda rng, n: rng.choice(["public", "private", "?"], n)
    )
    notes = notes_of(table, tmp_path)
    assert any("columns 'smoker', 'plan' have values that look like marks" in note for note in notes)
    assert any("add --missing '98,?'." in note for note in notes)
    assert notes_of(table, tmp_path, missing="98,?") == ()


def test_columns_that_tell_the_outcome(tmp_path):
    table = frame()
    table["died_on"] = np.where(table["outcome"] == 1, 1.0, np.nan) * np.arange(len(table))
    table["status"] = np.where(table["outcome"] == 1, "closed", "open")
    (note,) = notes_of(table, tmp_path)
    assert note == (
        "columns 'died_on', 'status' alone tell 'outcome' almost without error: if that is not known beforehand, add "
        "--ignore died_on,status."
    )


def test_what_a_column_explains():
    rng = np.random.default_rng(0)
    x, noise = pd.Series(rng.normal(size=5000)), pd.Series(rng.normal(size=5000))
    assert explained(x, 3 * x) > 0.95
    assert explained(x, noise) < 0.05
    assert explained(x, (x > 0).astype(int)) > 0.95
    assert explained(x, pd.Series(np.ones(5000, int))) == 0
    # A level for every row tells nothing that could be used.
    assert explained(pd.Series(np.arange(5000)).astype(str), (noise > 0).astype(int)) < 0.05


def test_paths_of_images(tmp_path):
    (note,) = notes_of(frame(scan=lambda rng, n: rng.choice([f"x{i}.png" for i in range(9)], n)), tmp_path)
    assert note == "column 'scan' holds paths of images: --image scan reads them, --ignore scan leaves them out."
