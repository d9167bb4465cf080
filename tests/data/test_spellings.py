"""Names that are written in several ways: certain ones are one, others are asked about, and small clients."""

import numpy as np
import pandas as pd
import pytest

from feddar.data.spellings import as_spelled, plain_name, spellings_in
from feddar.data.table_options import TableOptions
from feddar.data.tables import read_cohort
from feddar.errors import UserError
from helpers.command import feddar

ROLES = {"client": "hospital", "domain": "sex", "target": "outcome"}
FLAGS = ["--client", "hospital", "--domain", "sex", "--target", "outcome"]


@pytest.fixture
def table():
    rng = np.random.default_rng(0)
    sizes = {"n": 60, "s": 50, "e": 7, "w": 4}
    hospital = np.repeat([*sizes], [*sizes.values()])
    rows = len(hospital)
    return pd.DataFrame({
        "age": rng.normal(60, 12, rows).round(1), "hospital": hospital,
        "sex": rng.choice(["Male", "Female"], rows), "outcome": rng.integers(0, 2, rows),
    })  # fmt: skip


def read(table, folder, **options):
    table.to_csv(folder / "t.csv", index=False)
    return read_cohort(TableOptions(data=str(folder / "t.csv"), **ROLES, **options))


def test_numbers_equal_in_value_and_blanks_around_a_name_are_one(table, tmp_path):
    table["sex"] = np.resize(["1", "1.0", " 1", "2", "2.00", "001"], len(table))
    assert {*read(table, tmp_path).domains} == {"001", "1", "2"}
    assert plain_name("1.50") == "1.50" and plain_name("v1.0") == "v1.0"


@pytest.mark.parametrize("column", ["sex", "hospital", "outcome"])
def test_names_that_differ_in_case_or_blanks_are_asked_about(table, tmp_path, column):
    table["outcome"] = np.where(table["outcome"] == 1, "dead", "alive")
    other = {"sex": "MA LE", "hospital": "N", "outcome": "Dead"}[column]
    first = table.index[table[column] == {"sex": "Male", "hospital": "n", "outcome": "dead"}[column]][:3]
    table.loc[first, column] = other
    with pytest.raises(UserError, match=rf"column '{column}' .*'{other}' \(3 rows\): add --spellings merge"):
        read(table, tmp_path)
    merged, kept = (read(table, tmp_path, spellings=what) for what in ("merge", "keep"))
    names = {"sex": lambda each: each.domains, "hospital": lambda each: each.clients, "outcome": lambda e: e.classes}
    assert len(names[column](kept)) == len(names[column](merged)) + 1
    assert other not in names[column](merged) and other in names[column](kept)
    assert any(f"column '{column}': '{other}' is read as" in note for note in merged.notes)


def test_a_crossed_domain_is_merged_by_column(table, tmp_path):
    table["race"] = np.resize(["A", "B", "b"], len(table))
    table.to_csv(tmp_path / "t.csv", index=False)
    options = TableOptions(data=str(tmp_path / "t.csv"), **ROLES | {"domain": "sex,race"}, spellings="merge")
    assert {name.split(", ")[1] for name in read_cohort(options).domains} <= {"A", "B", "b"}
    assert len(read_cohort(options).domains) == 4


def test_new_names_are_read_as_those_known(table):
    known = as_spelled(pd.Series(["MALE", "Male", "x"]), ["Male", "Female"])
    assert known.tolist() == ["Male", "Male", "x"]
    assert spellings_in(pd.Series(["a", "A", "A", "b"])) == [{"A": 2, "a": 1}]


def test_a_run_with_merged_names_predicts_other_spellings(table, tmp_path):
    table.loc[0, "sex"] = "MALE" if table.loc[0, "sex"] == "Male" else "FEMALE"
    table.to_csv(tmp_path / "t.csv", index=False)
    more = ["--min-client", 20, "--rounds", 1, "--out", tmp_path / "run"]
    feddar("run", tmp_path / "t.csv", *FLAGS, *more, "--spellings", "merge", cwd=tmp_path)
    table.assign(sex=table["sex"].str.upper()).to_csv(tmp_path / "new.csv", index=False)
    feddar("predict", tmp_path / "run", tmp_path / "new.csv", "--out", tmp_path / "p.csv", cwd=tmp_path)
    assert set(pd.read_csv(tmp_path / "p.csv")["head"]) == {"Male", "Female"}


def test_small_clients_are_left_out_or_pooled(table, tmp_path):
    dropped = read(table, tmp_path, min_client=20)
    assert dropped.clients == ("n", "s") and len(dropped) == 110
    assert "left out: 2 clients with fewer than 20 rows (11 of 121 rows): 'e' (7), 'w' (4)." in dropped.notes
    pooled = read(table, tmp_path, min_client=20, small_clients="pool")
    assert pooled.clients == ("n", "s", "small clients") and len(pooled) == 121
    assert "pooled as 'small clients': 2 clients with fewer than 20 rows (11 rows): 'e' (7), 'w' (4)." in pooled.notes
    with pytest.raises(UserError, match="no client has 100 rows or more: lower --min-client"):
        read(table, tmp_path, min_client=100)


def test_incomplete_rows_are_left_out_and_lines_stay_those_of_the_file(table, tmp_path):
    table = table.astype({"outcome": object, "age": object})
    table.loc[[2, 5], "sex"] = None
    table.loc[5, "outcome"] = None
    table.loc[9, "age"] = "old"
    with pytest.raises(UserError, match="there are 3 problems") as error:
        read(table, tmp_path)
    assert "line 4: column 'sex' is empty there and in 1 more" in str(error.value)
    assert "line 7: column 'outcome' is empty" in str(error.value)
    with pytest.raises(UserError, match="line 11: column 'age' holds 'old'"):
        read(table, tmp_path, incomplete="drop")
    made = read(table, tmp_path, incomplete="drop", missing="old")
    assert len(made) == 119
    assert "2 of 121 rows are left out, which lack 'sex' (2), 'outcome' (1)." in " ".join(made.notes)
