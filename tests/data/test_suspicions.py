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
        "columns 'sector', 'unit_code' hold whole numbers that may be codes: if they are no amounts, add --categories "
        "sector,unit_code."
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
    assert any("add --missing '?,98'." in note for note in notes)
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


@pytest.mark.parametrize(("make", "said"), [
    (lambda rng, n: [f"{code:02}" for code in rng.integers(1, 33, n)], "--categories extra"),
    (lambda rng, n: rng.choice([k * k // 5 for k in range(4, 30)], n), "--categories extra"),
    (lambda rng, n: rng.permutation(n) + 10_000, "400 different whole numbers in 400 rows: if it is an identifier"),
    (lambda rng, n: rng.choice([*["99"] * 9, *"ABCDEF"], n), "add --missing '99'"),
], ids=["leading zeros", "gaps", "identifier", "number among texts"])  # fmt: skip
def test_codes_and_identifiers_by_how_they_are_written(make, said, tmp_path):
    (note,) = notes_of(frame(extra=make), tmp_path)
    assert said in note


def test_an_identifier_of_several_rows_each_is_known_by_its_name(tmp_path):
    stays = frame(stayid=lambda rng, n: 90_000 + np.arange(n) // 5 * 4 + rng.integers(0, 4, n))
    (note,) = notes_of(stays, tmp_path)
    assert note.endswith("if it is an identifier, add --ignore stayid.")
    assert notes_of(stays.rename(columns={"stayid": "paid"}), tmp_path) == ()


@pytest.mark.parametrize("name", ["patient", "PatientID", "study subject", "pat_nr", "patientunitstayid", "id"])
@pytest.mark.parametrize("written", [int, "P{}".format], ids=["number", "text"])
def test_a_column_that_names_patients_of_several_rows(name, written, tmp_path):
    visits = frame(extra=lambda rng, n: [written(who) for who in rng.integers(0, 90, n)]).rename(
        columns={"extra": name}
    )
    several = int((visits[name].value_counts() > 1).sum())
    option = f"'{name}'" if " " in name else name
    assert notes_of(visits, tmp_path) == (
        f"column '{name}' may name patients, {several} of whom have several rows: if so, add --group {option}, which "
        "keeps the rows of each in one part and does not learn from them.",
    )
    assert notes_of(visits, tmp_path, group=name) == ()
    assert notes_of(visits.rename(columns={name: "impatient"}), tmp_path) == ()


def test_a_mark_that_is_an_ordinary_value_elsewhere_is_said(tmp_path):
    table = frame(smoker=lambda rng, n: rng.choice([1, 2, 99], n), years=lambda rng, n: rng.integers(18, 105, n))
    (note,) = notes_of(table, tmp_path)
    assert note.endswith("add --missing '99' (which takes them as missing in column 'years' too).")


def test_a_column_that_saves_half_of_the_errors(tmp_path):
    table = frame()
    table["pneumonia"] = np.where(np.arange(len(table)) % 5 == 0, 1, table["outcome"])
    notes = notes_of(table, tmp_path)
    assert notes[-1] == (
        "column 'pneumonia' alone saves more than half of the errors in 'outcome': if that is not known beforehand, "
        "add --ignore pneumonia."
    )


@pytest.mark.parametrize("absent", [None, "9999-99-99"])
def test_a_date_that_mostly_one_outcome_has(tmp_path, absent):
    table = frame()
    event = (table["outcome"] == 1) & (np.arange(len(table)) % 3 == 0)
    table["event"] = np.where(event, "2020-05-01", absent)
    table.loc[:29, "event"] = [absent, "2020-05-02"] * 15
    dated = table["event"].isin(["2020-05-01", "2020-05-02"])
    here, elsewhere = table["outcome"][dated].mean(), table["outcome"][~dated].mean()
    assert notes_of(table, tmp_path)[-1] == (
        f"column 'event' is filled in for {dated.sum()} rows, and 'outcome' is 1 in {here:.0%} of them and "
        f"{elsewhere:.0%} of the others: if it is written down afterwards, add --ignore event."
    )
