"""Tables as they come: whatever a spreadsheet, a statistics program or a colleague has written is read the same."""

import gzip
import zipfile

import numpy as np
import pandas as pd
import pytest

import feddar
from feddar.data.csv_form import encoding_of
from feddar.data.files import Reading, open_table
from feddar.data.table_options import TableOptions
from feddar.data.table_paths import files_of, name_of
from feddar.data.tables import read_cohort
from feddar.errors import UserError

ROLES = {"client": "hospital", "domain": "race", "target": "outcome"}


def frame(rows=120, seed=0):
    rng = np.random.default_rng(seed)
    return pd.DataFrame({
        "age": rng.normal(60, 12, rows).round(1), "stay": rng.gamma(2, 3, rows).round(2),
        "ward": rng.choice(["Chirurgie, 1. Stock", "Onkologie", "Säuglinge"], rows), "smoker": rng.integers(1, 3, rows),
        "hospital": rng.choice(["nord", "süd"], rows), "race": rng.choice(["A", "B"], rows),
        "outcome": rng.integers(0, 2, rows),
    })  # fmt: skip


@pytest.mark.parametrize("form", ["t.csv", "t.parquet", "t.xlsx"])
def test_the_reader_in_python(tmp_path, form):
    table, path = frame(), tmp_path / form
    {".csv": table.to_csv, ".parquet": table.to_parquet, ".xlsx": table.to_excel}[path.suffix](path, index=False)
    pd.testing.assert_frame_equal(feddar.read_table(path), table, check_dtype=False)


def test_the_reader_in_python_says_from_which_file_a_row_is(tmp_path):
    for name in ("a", "b"):
        frame(3).to_csv(tmp_path / f"{name}.csv", sep=";", decimal=",", index=False)
    found = feddar.read_table(tmp_path)
    assert found["file"].tolist() == [*"aaabbb"]
    pd.testing.assert_frame_equal(found.drop(columns="file")[:3], frame(3), check_dtype=False)


def test_an_excel_file_is_read_like_a_csv_file(tmp_path):
    frame().to_csv(tmp_path / "t.csv", index=False)
    with pd.ExcelWriter(tmp_path / "t.xlsx") as book:
        frame().to_excel(book, sheet_name="patients", index=False)
        frame(2).to_excel(book, sheet_name="notes", index=False)
    expected, found = (read_cohort(TableOptions(data=str(tmp_path / each), **ROLES)) for each in ("t.csv", "t.xlsx"))
    assert found.fingerprint() == expected.fingerprint()
    assert found.notes == (f"of {tmp_path / 't.xlsx'} the sheet 'patients' is read, and not notes.",)


FORMS = {
    "commas": ("t.csv", {}),
    "semicolons and decimal commas": ("t.csv", {"sep": ";", "decimal": ","}),
    "semicolons and decimal points": ("t.csv", {"sep": ";"}),
    "tabs": ("t.tsv", {"sep": "\t"}),
    "tabs in a .txt file": ("t.txt", {"sep": "\t", "decimal": ","}),
    "bars": ("t.csv", {"sep": "|"}),
    "everything in quotes": ("t.csv", {"quoting": 1}),
    "UTF-8 with a mark": ("t.csv", {"encoding": "utf-8-sig"}),
    "UTF-16": ("t.csv", {"encoding": "utf-16", "sep": "\t"}),
    "Windows": ("t.csv", {"encoding": "cp1252", "sep": ";", "decimal": ","}),
    "Windows line ends": ("t.csv", {"lineterminator": "\r\n"}),
    "gzip": ("t.csv.gz", {}),
    "gzip under another name": ("t.csv", {"compression": "gzip"}),
    "bzip2": ("t.csv.bz2", {"sep": ";"}),
    "xz": ("t.csv.xz", {}),
    "zip": ("t.csv.zip", {}),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_cohort(tmp_path, form):
    name, how = FORMS[form]
    frame().to_csv(tmp_path / "plain.csv", index=False)
    frame().to_csv(tmp_path / name, index=False, **how)
    expected, found = (read_cohort(TableOptions(data=str(tmp_path / each), **ROLES)) for each in ("plain.csv", name))
    assert found.fingerprint() == expected.fingerprint()
    assert found.columns == expected.columns
    unusual = how.get("sep", ",") != "," or how.get("encoding", "utf-8") not in ("utf-8", "utf-8-sig")
    assert bool(found.notes) == unusual


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_read_in_chunks_as_it_is_read_whole(tmp_path, form):
    name, how = FORMS[form]
    frame().to_csv(tmp_path / name, index=False, **how)
    file = open_table(tmp_path / name)
    chunks = pd.concat([*file.chunks(file.header, 50)], ignore_index=True)
    whole = pd.DataFrame({column: open_table(tmp_path / name).column(column) for column in file.header})
    pd.testing.assert_frame_equal(chunks[file.header], whole)
    assert len(file) == 120


def test_what_was_found_is_said(tmp_path):
    frame().to_csv(tmp_path / "t.csv", index=False, sep=";", decimal=",", encoding="cp1252")
    (note,) = read_cohort(TableOptions(data=str(tmp_path / "t.csv"), **ROLES)).notes
    assert note == (
        f"{tmp_path / 't.csv'} is read as separated by semicolons, with decimal commas, encoded as cp1252 (--sep, "
        "--decimal and --encoding say otherwise)."
    )
    said = {"sep": ";", "decimal": ",", "encoding": "cp1252"}
    assert read_cohort(TableOptions(data=str(tmp_path / "t.csv"), **ROLES, **said)).notes == ()


@pytest.mark.parametrize(("content", "sentence"), [
    (b"", "is empty"),
    (b"\n\n", "is empty"),
    (b"61.5,2,A\n70,3,B\n", "the first line of .* has numbers and no names of columns"),
    (b"age;ward;race\n1,2,3\n4,5,6\n", "the header of .* is separated by semicolons and its rows by commas"),
    (b"age,ward\n61,a\nage,ward\n62,b\n", r"t.csv, line 3 is the header once more: delete that line"),
    (b"age,ward\n1,2,3\n4,5,6\n", "line 2 has 3 entries, and the header 2"),
    (b"age,,ward\n1,2,3\n", "a column without a name"),
    (b"age,age\n1,2\n", "has the column 'age' more than once"),
    (gzip.compress(b"age,ward\n1,2\n", mtime=0)[:-9], "cannot read"),
])  # fmt: skip
def test_what_cannot_be_read_is_said_with_the_remedy(tmp_path, content, sentence):
    (tmp_path / "t.csv").write_bytes(content)
    with pytest.raises(UserError, match=sentence):
        open_table(tmp_path / "t.csv").column("age")


def test_a_header_in_the_middle_is_found_in_chunks_too(tmp_path):
    lines = ["age,ward", *(f"{n},x" for n in range(70)), "age,ward", "3,y"]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    with pytest.raises(UserError, match="line 72 is the header once more"):
        [*open_table(tmp_path / "t.csv").chunks(["age"], 50)]


def test_what_is_no_table_is_refused(tmp_path):
    (tmp_path / "t.pdf").write_bytes(b"%PDF-1.4\n1 0 obj")
    with pytest.raises(UserError, match="is a PDF and no table: export it as CSV, Parquet or Excel"):
        open_table(tmp_path / "t.pdf").column("x")
    with pytest.raises(UserError, match="there is no encoding 'klingon'"):
        Reading(encoding="klingon")
    with zipfile.ZipFile(tmp_path / "two.csv.zip", "w") as archive:
        archive.writestr("a.csv", "x")
        archive.writestr("b.csv", "y")
    with pytest.raises(UserError, match="holds 2 files: unpack it into a folder"):
        open_table(tmp_path / "two.csv.zip").column("x")


def test_an_encoding_that_is_said_wrongly_is_refused(tmp_path):
    frame().to_csv(tmp_path / "t.csv", index=False, encoding="cp1252")
    with pytest.raises(UserError, match="it is not utf-8; say what it is with --encoding"):
        open_table(tmp_path / "t.csv", Reading(encoding="utf-8")).column("age")


def test_the_encoding_is_that_of_the_whole_file(tmp_path):
    (tmp_path / "late.csv").write_bytes(b"ward\n" + b"a\n" * (1 << 20) + "süd\n".encode("cp1252"))
    assert encoding_of(tmp_path / "late.csv") == "cp1252"
    (tmp_path / "split.csv").write_bytes(b"ward\n" + b"a" * ((1 << 20) - 2) + "ü\n".encode())
    assert encoding_of(tmp_path / "split.csv") == "utf-8"


def test_folders_and_patterns(tmp_path):
    for name, table in frame().groupby("hospital"):
        table.drop(columns="hospital").to_csv(tmp_path / f"{name}.csv.gz", index=False)
    (tmp_path / "README.md").write_text("not a table")
    roles = {"domain": "race", "target": "outcome"}
    folder, pattern = (read_cohort(TableOptions(data=str(path), **roles)) for path in (tmp_path, tmp_path / "*.csv.gz"))
    assert folder.clients == pattern.clients == ("nord", "süd")
    assert folder.fingerprint() == pattern.fingerprint()
    assert [name_of(path) for path in files_of(tmp_path / "n*.gz")] == ["nord"]
    with pytest.raises(UserError, match=r"no CSV, Parquet or Excel file fits the pattern .*x\*"):
        files_of(tmp_path / "x*")


def test_files_of_a_folder_may_have_a_column_of_clients(tmp_path):
    for part in range(2):
        frame(seed=part).to_csv(tmp_path / f"part-{part}.csv", index=False)
    assert read_cohort(TableOptions(data=str(tmp_path), **ROLES)).clients == ("nord", "süd")


@pytest.mark.parametrize("name", ["t.csv", "t.parquet"])
def test_values_that_stand_for_a_missing_one(tmp_path, name):
    table = frame()
    table["smoker"] = np.where(np.arange(120) < 20, 98, table["smoker"])
    table["ward"] = np.where(np.arange(120) < 30, "?", table["ward"])
    table.to_csv(tmp_path / name, index=False) if name.endswith("csv") else table.to_parquet(tmp_path / name)
    cohort = read_cohort(TableOptions(data=str(tmp_path / name), missing="?,98", **ROLES))
    by_name = {column.name: column for column in cohort.columns}
    assert by_name["smoker"].gaps
    assert by_name["ward"].gaps
    assert "?" not in by_name["ward"].levels
    assert int(cohort.numbers.isnan().sum()) == 20
    assert int((cohort.codes == 0).sum()) == 30


@pytest.mark.parametrize("name", ["t.csv", "t.parquet"])
def test_kinds_that_are_said(tmp_path, name):
    table = frame()
    table.to_csv(tmp_path / name, index=False) if name.endswith("csv") else table.to_parquet(tmp_path / name)
    options = TableOptions(data=str(tmp_path / name), categories="smoker", **ROLES)
    by_name = {column.name: column for column in read_cohort(options).columns}
    assert (by_name["smoker"].kind, by_name["smoker"].levels) == ("category", ("1", "2"))
    for more, sentence in (
        ({"categories": "smoker", "numbers": "smoker"}, "both in --categories and in --numbers"),
        ({"numbers": "ward"}, "which is no number"),
        ({"categories": "smokr"}, "no column 'smokr'"),
    ):
        with pytest.raises(UserError, match=sentence):
            read_cohort(TableOptions(data=str(tmp_path / name), **ROLES, **more))


def test_categories_of_pandas_are_categories(tmp_path):
    table = frame()
    table["smoker"] = table["smoker"].astype("category")
    table.to_parquet(tmp_path / "t.parquet")
    by_name = {
        column.name: column for column in read_cohort(TableOptions(data=str(tmp_path / "t.parquet"), **ROLES)).columns
    }
    assert (by_name["smoker"].kind, by_name["smoker"].levels) == ("category", ("1", "2"))
