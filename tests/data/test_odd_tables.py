"""Malformed tables: each is refused with exit code 2 and a sentence that names the remedy, and nothing is written."""

import bz2
import gzip
import io
import lzma
import os
import zipfile
from decimal import Decimal

import numpy as np
import openpyxl
import pandas as pd
import pytest

from feddar import UserError, read_table
from helpers.command import feddar

HEADER = "age,ward,hospital,race,outcome"
GERMAN = HEADER.replace(",", ";")
ROWS = [f"{50 + n * 7 % 31}.5,{'ab'[n % 2]},{'ns'[n // 2 % 2]},{'AB'[n // 4 % 2]},{n * 3 % 7 % 2}" for n in range(48)]


def lines(*first, header=HEADER, rows=ROWS):
    return "\n".join([header, *first, *rows]) + "\n"


CASES = {
    "empty file": ("", [], "is empty"),
    "header only": (HEADER + "\n", [], "no samples below it"),
    "no header": (lines(header="1,2,3,4,5"), [], "put a line with the names there"),
    "no header, few numbers": (lines(header="50.5,a,n,A,0"), [], "put a line with the names there"),
    "no header, numbers twice": (lines(header="5,5,5,A,0"), [], "put a line with the names there"),
    "title above the header": ("Export of ward 3,,,,\n" + lines(), [], "delete the lines above the header"),
    "title without separators": ("Export of ward 3\n" + lines(), [], "delete the lines above the header"),
    "units below the header": (lines("years,,n,A,1"), [], "line 2: column 'age' holds 'years' among numbers"),
    "unclosed quote": (lines('"51.5,a,n,A,1'), [], "cannot read t.csv"),
    "percentages": (lines(rows=[row.replace(".5,", "%,", 1) for row in ROWS]), [], "write percentages as numbers"),
    "fewer entries": (lines("51.5,a,n"), [], "there are 2 problems"),
    "two texts among numbers": (lines("> 89,a,n,A,1", "?,a,n,A,1"), [], "--missing '> 89,?'"),
    "group is missing": (lines(), ["--group", "patient"], "has no column 'patient'"),
    "optional domain": (lines(), ["--optional", "race"], "cannot be --optional"),
    "unknown optional": (lines(), ["--optional", "crp"], "has no column 'crp'"),
    "one role twice": (lines(), ["--group", "race"], "named twice"),
    "too many domains": (
        lines(rows=[f"{row.rsplit(',', 2)[0]},g{n},1" for n, row in enumerate(ROWS * 3)]),
        [],
        "distinct values; is it a group?",
    ),
    "header again": (lines(HEADER), [], "delete that line"),
    "two separators": (lines(header=HEADER.replace(",", ";")), [], "write both in one way"),
    "repeated name": (lines(header="age,age,hospital,race,outcome"), [], "rename one"),
    "unnamed column": (lines(header=",ward,hospital,race,outcome"), [], "name it or leave it out"),
    "too many entries": (lines(rows=[row + ",9" for row in ROWS]), [], "line 2 has 6 entries, and the header 5"),
    "no such column": (lines(header=HEADER.replace("race", "rasse")), [], "has no column 'race'"),
    "empty domain": (lines("51.5,a,n,,1"), [], "--incomplete drop"),
    "empty client": (lines("51.5,a,,A,1"), [], "--incomplete drop"),
    "empty target": (lines("51.5,a,n,A,"), [], "--incomplete drop"),
    "target NA": (lines("51.5,a,n,A,NA"), [], "--incomplete drop"),
    "domain in capitals": (lines("51.5,a,n,a,1"), [], "--spellings merge"),
    "client in capitals": (lines("51.5,a,N,A,1"), [], "--spellings merge"),
    "text among numbers": (lines("old,a,n,A,1"), [], "--ignore age"),
    "comparison": (lines("<5,a,n,A,1"), [], "--ignore age"),
    "decimal comma": (lines('"5,3",a,n,A,1'), [], "write decimals with a point"),
    "infinite number": (lines("inf,a,n,A,1"), [], "is infinite"),
    "one class": (lines(rows=[row[:-1] + "1" for row in ROWS]), [], "only one class"),
    "local dates": (lines(rows=["31/12/2020" + row[4:] for row in ROWS]), [], "write dates as 2020-12-31"),
    "single client row": (lines("51.5,a,x,A,1"), [], "need at least 2"),
    "all clients small": (lines(), ["--min-client", 1000], "lower --min-client"),
    "nothing to learn from": (lines(), ["--ignore", "age,ward"], "no column left to learn from"),
    "both kinds": (lines(), ["--categories", "age", "--numbers", "age"], "choose one"),
    "text as number": (lines(), ["--numbers", "ward"], "which is no number"),
    "target as feature": (lines(), ["--features", "age,outcome"], "leave it out of --features"),
    "feature twice": (lines(), ["--features", "age,age"], "leave one out"),
    "unknown positive": (lines(), ["--positive", "5"], "must be one of two values"),
    "unknown encoding": (lines(), ["--encoding", "klingon"], "there is no encoding"),
    "no image": (lines(), ["--image", "ward"], "does column 'ward' hold paths of images"),
    "unknown ignored": (lines(), ["--ignore", "agee"], "has no column 'agee'"),
    "no separator": (
        lines(header=HEADER.replace(",", "^"), rows=["^".join(row.split(",")) for row in ROWS]),
        [],
        "--sep",
    ),
    "separator of two signs": (lines(), ["--sep", "||"], "separated by one sign, such as ; or tab"),
    "decimal mark": (lines(), ["--decimal", ";"], "the decimal mark is a point or a comma"),
    "encoding of no text": (lines(), ["--encoding", "base64"], "there is no encoding 'base64'"),
    "zero byte": (lines("51.5,a\0,n,A,1"), [], "is no text, as it has zero bytes"),
    "separators at the ends": (
        lines(header=HEADER + ",", rows=[row + "," for row in ROWS]),
        [],
        "a separator too many",
    ),
    "one long line": (lines(rows=[*ROWS, *ROWS, "51.5,a,n,A,1,9"]), [], "line 98 has 6 entries, and those before it 5"),
    "comment above": ("# of ward 3\n# by me\n" + lines(), [], "delete the lines above the header"),
    "unnamed, no row numbers": (lines(header="," + HEADER, rows=[f"x,{row}" for row in ROWS]), [], "no row numbers"),
    "thousands with blanks": (lines(rows=[f"1 {200 + n},{ROWS[n][5:]}" for n in range(48)]), [], "between thousands"),
    "money": (lines(rows=["$" + row for row in ROWS]), [], "write amounts of money as numbers"),
    "short years": (lines(rows=["31/12/20" + row[4:] for row in ROWS]), [], "write dates as 2020-12-31"),
    "names of months": (lines(rows=["31 Dec 2020" + row[4:] for row in ROWS]), [], "write dates as 2020-12-31"),
    "text among numbers to predict": (
        lines("51.5,a,n,A,high", rows=[f"{row[:-1]}{n}.5" for n, row in enumerate(ROWS)]),
        [],
        "line 2: the label is 'high', which is no number",
    ),
    "decimal commas to predict": (
        lines(rows=[f'{row[:-1]}"{n},5"' for n, row in enumerate(ROWS)]),
        [],
        "line 2: the label is '0,5', which is no number",
    ),
    "names to predict": (lines(rows=[f"{row[:-1]}p{n}" for n, row in enumerate(ROWS)]), [], "48 distinct texts in 48"),
    "several single rows": (lines("51.5,a,x,A,1", "51.5,a,y,A,1"), [], "clients 'x', 'y' have fewer than 2 samples"),
    "sign that is not seen": (lines("51.5,a,n,A\u200b,1"), [], "--spellings merge"),
    "mixed marks with commas": (
        lines(
            "51;3,5;n;A;1",
            "> 89;3,5;n;A;0",
            header=HEADER.replace(",", ";"),
            rows=[row.replace(",", ";").replace(".", ",") for row in ROWS],
        ),
        ["--ignore", "ward"],
        "line 3: column 'age' holds '> 89' among numbers",
    ),
    "blanks as domain": (lines("51.5,a,n,  ,1"), [], "line 2: column 'race' is empty there"),
    "blanks as target": (lines("51.5,a,n,A,\u00a0"), [], "line 2: column 'outcome' is empty there"),
    "remark below": (lines(rows=[*ROWS, "# by me"]), [], "line 50: column 'hospital' is empty there"),
    "truth values to predict in two ways": (
        lines(rows=[row if n % 4 else f"{row[:-1]}{('no', 'yes')[n % 8 // 4]}" for n, row in enumerate(ROWS)]),
        [],
        "truth values in several ways, 0, 1, no, yes: write them in one",
    ),
    "line breaks in entries": (lines('51,"a\nb",n,A,1', '51,"a\nb",n,A,1', "old,a,n,A,1"), [], "line 6: column 'age'"),
    "header after blank lines": (lines("51.5,a,n,A,1", "", "", HEADER), [], "line 5 is the header once more"),
    "JSON": ('[\n {"age": 51.5, "race": "A"},\n {"age": 52, "race": "B"}\n]\n', [], "is JSON and no table: export it"),
    "HTML": ("<html><table><tr><td>age</td></tr></table>\n</html>\n", [], "is HTML or XML and no table: export it"),
    "hyphens in names": (lines("51.5,a,n,x-y,1", "51.5,a,n,x\u2010y,0"), [], "only in letter case, blanks or hyphens"),
    "separator that is none": (lines(), ["--sep", ";"], "only one column by ';': leave out --sep, so that it is found"),
    "encoding that needs a mark": (lines(), ["--encoding", "utf-16"], "say what it is with --encoding"),
    "mark as number": (
        lines("51.5,-,n,A,1", rows=[row.replace(",a,", ",1,").replace(",b,", ",2,") for row in ROWS]),
        ["--numbers", "ward"],
        "which is no number; mend it, take it as missing with --missing '-'",
    ),
}


@pytest.mark.parametrize(("text", "options", "said"), CASES.values(), ids=CASES.keys())
def test_a_malformed_table_is_refused_with_the_remedy(text, options, said, tmp_path):
    (tmp_path / "t.csv").write_text(text, encoding="utf-8")
    roles = ["--client", "hospital", "--domain", "race", "--target", "outcome", "--out", tmp_path / "run"]
    out = feddar("run", "t.csv", *roles, *options, cwd=tmp_path, code=2)
    assert said in (out if isinstance(out, str) else " ".join(map(str, out)))
    assert not (tmp_path / "run").exists()


READ = {
    "semicolons": (lines(header=HEADER.replace(",", ";"), rows=[r.replace(",", ";") for r in ROWS]), [], "semicolons"),
    "bars": (lines(header=HEADER.replace(",", "|"), rows=[row.replace(",", "|") for row in ROWS]), [], "by bars"),
    "decimal commas": (
        lines(header=HEADER.replace(",", ";"), rows=[r.replace(",", ";").replace(".", ",") for r in ROWS]),
        [],
        "with decimal commas",
    ),
    "number among texts": (
        lines(rows=[f"{row[:4]},{'99' if n % 3 else 'abcdef'[n % 6]}{row[6:]}" for n, row in enumerate(ROWS)]),
        [],
        "--missing '99'",
    ),
    "code with zeros": (
        lines(rows=[f"{row[:4]},0{n % 9}{row[6:]}" for n, row in enumerate(ROWS)]),
        [],
        "--categories ward",
    ),
    "code as category": (
        lines(rows=[f"{row[:4]},0{n % 9}{row[6:]}" for n, row in enumerate(ROWS)]),
        ["--categories", "ward"],
        "00, 01, 02",
    ),
    "record number": (
        lines(header="mrn," + HEADER, rows=[f"{n},{row}" for n, row in enumerate(ROWS * 2)]),
        [],
        "--ignore mrn",
    ),
    "patients with several rows": (
        lines(header="patient," + HEADER, rows=[f"{n % 30},{row}" for n, row in enumerate(ROWS)]),
        [],
        "--group patient",
    ),
    "leak": (
        lines(header=HEADER + ",status", rows=[f"{row},{'open' if row[-1] == '0' else 'shut'}" for row in ROWS]),
        [],
        "--ignore status",
    ),
    "path": (
        lines(header=HEADER + ",scan", rows=[f"{row},{n % 7}.png" for n, row in enumerate(ROWS)]),
        [],
        "--image scan",
    ),
    "empty column": (lines(header=HEADER + ",crp", rows=[row + "," for row in ROWS]), [], "'crp' is left out"),
    "constant column": (lines(header=HEADER + ",site", rows=[row + ",7" for row in ROWS]), [], "same value everywhere"),
    "quoted names": (lines(header='"age","ward","hospital","race","outcome"'), [], "age"),
    "tabs": (lines(header=HEADER.replace(",", "\t"), rows=[row.replace(",", "\t") for row in ROWS]), [], "by tabs"),
    "byte order mark": ("\ufeff" + lines(), [], "age"),
    "blanks around names": (lines("51.5,a, n ,A ,1"), [], "age"),
    "1 and 1.0": (lines(rows=[row.replace(",A,", ",1,").replace(",B,", ",1.0,") for row in ROWS]), [], "age"),
    "merged": (lines("51.5,a,n,a,1"), ["--spellings", "merge"], "'a' is read as 'A'"),
    "kept": (lines("51.5,a,n,a,1", "52.5,a,n,a,0"), ["--spellings", "keep"], "age"),
    "incomplete": (lines("51.5,a,n,,1"), ["--incomplete", "drop"], "1 of 49 rows are left out, which lack 'race' (1)."),
    "small client": (lines("51.5,a,x,A,1"), ["--min-client", 5], "left out: 1 client with fewer than 5 rows"),
    "pooled": (lines("5,a,x,A,1", "5,a,y,A,1"), ["--min-client", 5, "--small-clients", "pool"], "'small clients'"),
    "mark": (lines("?,a,n,A,1"), ["--missing", "?"], "age"),
    "row numbers": (
        lines(header="," + HEADER, rows=[f"{3 * n},{row}" for n, row in enumerate(ROWS)]),
        [],
        "the first column of t.csv has no name, and is left out: it has row numbers.",
    ),
    "thousands and decimal commas": (
        lines(
            header=HEADER.replace(",", ";"), rows=[f"1.{200 + n};{n},5;n;{'AB'[n % 2]};{n // 2 % 2}" for n in range(48)]
        ),
        [],
        "number 1200 to 1247",
    ),
    "thousands or decimals": (
        lines(
            header=HEADER.replace(",", ";"), rows=[f"1.{200 + n};{n};n;{'AB'[n % 2]};{n // 2 % 2}" for n in range(48)]
        ),
        [],
        "'age' has three digits after the point: if it parts thousands, add --decimal ','.",
    ),
    "tab by its name": (
        lines(header=HEADER.replace(",", "\t"), rows=[row.replace(",", "\t") for row in ROWS]),
        ["--sep", "tab"],
        "50.5 to 80.5",
    ),
    "mark in the target": (lines("51.5,a,n,A,?"), [], "the target 'outcome' has values that look like marks"),
    "levels in capitals": (lines("51.5,A,n,A,1"), [], "column 'ward' has levels that differ only in letter case"),
    "truth values in two ways": (
        lines(rows=[f"{row[:5]}{('yes', 'no', '1', '0')[n % 4]}{row[6:]}" for n, row in enumerate(ROWS)]),
        [],
        "column 'ward' has truth values in several ways (0, 1, no, yes)",
    ),
    "far date": (
        lines("9999-12-31,a,n,A,1", rows=[f"2020-01-{n % 28 + 1:02}{row[4:]}" for n, row in enumerate(ROWS)]),
        [],
        "--missing '9999-12-31'",
    ),
    "blank in a name": (
        lines(header="mrn no," + HEADER, rows=[f"{n},{row}" for n, row in enumerate(ROWS * 2)]),
        [],
        "--ignore 'mrn no'",
    ),
    "blanks around a mark": (lines(" NA ,a,n,A,1", "  ,a,n,A,0"), [], "50.5 to 80.5, mean 65.17 4.0%"),
    "blanks around a mark that was said": (lines(" ? ,a,n,A,1"), ["--missing", "?"], "50.5 to 80.5, mean 65.17 2.0%"),
    "blanks around a mark to predict": (
        lines("51.5,a,n,A, ? ", rows=[f"{row[:-1]}{n}.5" for n, row in enumerate(ROWS)]),
        ["--missing", "?", "--incomplete", "drop"],
        "predicted: a number",
    ),
    "blanks as category": (lines("51.5,  ,n,A,1"), [], "category a, b 2.0%"),
    "mark as domain": (
        lines(rows=[f"{row[:9]}{(1, 2, 3, 99)[n % 4]},{row[-1]}" for n, row in enumerate(ROWS)]),
        [],
        "the domain 'race' has names that look like marks of a missing one (99)",
    ),
    "units": (lines(rows=[f"{n + 50} mg{row[4:]}" for n, row in enumerate(ROWS)]), [], "without 'mg' they would be"),
    "times of day": (lines(rows=[f"{n % 24}:{n:02}{row[4:]}" for n, row in enumerate(ROWS)]), [], "holds times of day"),
    "dates without hyphens": (
        lines(rows=[f"202001{n % 28 + 1:02}{row[4:]}" for n, row in enumerate(ROWS)]),
        [],
        "numbers that may be dates (20200101): if they are, write them with hyphens",
    ),
    "one client": (lines(rows=[row.replace(",s,", ",n,") for row in ROWS]), [], "there is one client only"),
    "one domain": (lines(rows=[row.replace(",B,", ",A,") for row in ROWS]), [], "there is one domain only"),
    "three classes": (lines(rows=[f"{row[:-1]}{'xyz'[n % 3]}" for n, row in enumerate(ROWS)]), [], "one of 3 classes"),
    "blanks as separator": (lines().replace(",", " "), ["--sep", "space"], "50.5 to 80.5"),
    "large whole numbers": (lines(rows=[f"{10**25 + n}{row[4:]}" for n, row in enumerate(ROWS)]), [], "1e+25"),
    "old dates": (lines("1500-01-01,a,n,A,1", rows=["2020-01-01" + row[4:] for row in ROWS]), [], "date 1500-01-01"),
    "signs of markup": (lines(rows=[row.replace(",A,", ",[/b],") for row in ROWS]), [], "[/b]"),
    "other scripts": (lines(rows=[row.replace(",A,", ",\u9ed2\u4eba,") for row in ROWS]), [], "\u9ed2\u4eba"),
    "any line ends": (lines().replace("\n", "\r"), [], "50.5 to 80.5"),
}


@pytest.mark.parametrize(("text", "options", "said"), READ.values(), ids=READ.keys())
def test_an_odd_table_is_read_rightly_and_noted(text, options, said, tmp_path):
    (tmp_path / "t.csv").write_text(text, encoding="utf-8")
    roles = ["--client", "hospital", "--domain", "race", "--target", "outcome"]
    assert said in " ".join(feddar("cohort", "t.csv", *roles, *options, cwd=tmp_path).split())


def test_what_was_said_to_be_a_number_is_no_code(tmp_path):
    (tmp_path / "t.csv").write_text(lines(rows=[f"{row[:5]}{n % 3}{row[6:]}" for n, row in enumerate(ROWS)]))
    roles = ["--client", "hospital", "--domain", "race", "--target", "outcome"]
    assert "may be codes" in feddar("cohort", "t.csv", *roles, cwd=tmp_path)
    assert "may be codes" not in feddar("cohort", "t.csv", *roles, "--numbers", "ward", cwd=tmp_path)


def packed(*names, password=False):
    """Return a ZIP archive with the table under these names."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        for name in names:
            archive.writestr(name, lines())
    found = bytearray(target.getvalue())
    if password:
        found[6] |= 1  # the flag of an encrypted entry, in front of it and in the directory
        found[found.rfind(b"PK\x01\x02") + 8] |= 1
    return bytes(found)


def broken(content, place=60):
    """Return bytes with two of them changed."""
    return content[:place] + bytes(255 - byte for byte in content[place : place + 2]) + content[place + 2 :]


def saved(how, **changed):
    """Return the table as a file that pandas writes."""
    target = io.BytesIO()
    getattr(pd.read_csv(io.StringIO(lines())).assign(**changed), how)(target, index=False)
    return target.getvalue()


LONG = lines(rows=ROWS * 20).encode()
DAMAGED = {
    "gzip that ends too early": ("t.csv.gz", lambda: gzip.compress(LONG)[:-20], "copy or export it again"),
    "gzip with other bytes": ("t.csv.gz", lambda: broken(gzip.compress(LONG)), "copy or export it again"),
    "gzip with another sum": ("t.csv.gz", lambda: gzip.compress(LONG)[:-8] + bytes(8), "copy or export it again"),
    "bzip2 with other bytes": ("t.csv.bz2", lambda: broken(bz2.compress(LONG)), "copy or export it again"),
    "xz that ends too early": ("t.csv.xz", lambda: lzma.compress(LONG)[:-30], "copy or export it again"),
    "ZIP that is none": ("t.csv.zip", lambda: b"PK\x03\x04" + bytes(50), "copy or export it again"),
    "ZIP with a password": ("t.csv.zip", lambda: packed("t.csv", password=True), "it has a password; unpack it"),
    "ZIP of two": ("t.csv.zip", lambda: packed("a.csv", "b.csv"), "holds 2 files: unpack it"),
    "ZIP of nothing": ("t.csv.zip", packed, "holds no file"),
    "Parquet that ends too early": ("t.parquet", lambda: saved("to_parquet")[:-20], "copy or export it again"),
    "Excel that ends too early": ("t.xlsx", lambda: saved("to_excel")[:-99], "copy or export it again"),
    "Excel of before 2007": ("t.xls", lambda: bytes.fromhex("d0cf11e0a1b11ae1") + bytes(99), "save it as .xlsx"),
    "another office program": ("t.ods", lambda: packed("mimetype", "content.xml"), "save it as .xlsx or CSV"),
    "workbook without sheets": ("t.xlsx", lambda: packed("xl/workbook.xml"), "copy or export it again"),
    "R": ("t.rds", lambda: gzip.compress(b"X\n\0\0\0\3"), "is no text, as it has zero bytes"),
    "PDF": ("t.pdf", lambda: b"%PDF-1.4\n1 0 obj", "is a PDF and no table"),
    "zero bytes of UTF-16": ("t.csv", lambda: lines("1,\0,n,A,1").encode("utf-16")[:-1], "say what it is"),
    "Parquet of lists": ("t.parquet", lambda: saved("to_parquet", race=[["A"]] * 48), "holds lists or records"),
    "Parquet of bytes": ("t.parquet", lambda: saved("to_parquet", ward=[b"\xff"] * 48), "bytes that are no text"),
}


@pytest.mark.parametrize(("name", "content", "said"), DAMAGED.values(), ids=DAMAGED.keys())
def test_a_file_that_cannot_be_read_is_said_with_the_remedy(name, content, said, tmp_path):
    (tmp_path / name).write_bytes(content())
    roles = ["--client", "hospital", "--domain", "race", "--target", "outcome"]
    assert said in feddar("cohort", name, *roles, cwd=tmp_path, code=2)


@pytest.mark.parametrize("values", [
    pd.to_timedelta(range(48), unit="D"), np.arange(48, dtype=np.float16), [Decimal(n) for n in range(48)],
    pd.array([*range(48)], "Int64"), [str(n).encode() for n in range(48)],
], ids=["durations", "half precision", "decimals", "whole numbers with gaps", "bytes"])  # fmt: skip
def test_numbers_of_parquet_files_are_read_whatever_their_type(values, tmp_path):
    (tmp_path / "t.parquet").write_bytes(saved("to_parquet", age=values))
    roles = ["--client", "hospital", "--domain", "race", "--target", "outcome"]
    assert "number 0 to 47, mean 23.5" in " ".join(feddar("cohort", "t.parquet", *roles, cwd=tmp_path).split())


def test_sheets_that_are_empty_or_have_merged_cells(tmp_path):
    roles = ["--client", "hospital", "--domain", "race", "--target", "outcome"]
    (tmp_path / "t.xlsx").write_bytes(saved("to_excel"))
    book = openpyxl.load_workbook(tmp_path / "t.xlsx")
    book.active.merge_cells("C2:C5")
    book.save(tmp_path / "merged.xlsx")
    assert "merged cells, C2:C5, of which" in feddar("cohort", "merged.xlsx", *roles, cwd=tmp_path, code=2)
    book = openpyxl.load_workbook(tmp_path / "t.xlsx")
    book.create_sheet("remarks", 0)
    book.save(tmp_path / "empty.xlsx")
    said = feddar("cohort", "empty.xlsx", *roles, cwd=tmp_path, code=2)
    assert "'remarks', is empty (others: Sheet1): move the sheet with the table to the front" in said
    book["remarks"]["A1"] = "by me"
    book.save(tmp_path / "second.xlsx")
    assert "no samples below it (others: Sheet1): move" in feddar("cohort", "second.xlsx", *roles, cwd=tmp_path, code=2)
    book["remarks"]["A2"] = "in May"
    book.save(tmp_path / "second.xlsx")
    assert "'remarks', is read (others: Sheet1): move" in feddar("cohort", "second.xlsx", *roles, cwd=tmp_path, code=2)


def test_the_name_of_a_file_that_is_named_does_not_matter(tmp_path):
    for name in ("adult.data", "table"):
        (tmp_path / name).write_text(lines())
        assert len(read_table(tmp_path / name)) == 48
    (tmp_path / "open.zip").write_bytes(packed("2020.csv"))
    assert len(read_table(tmp_path / "open.zip")) == 48
    os.mkfifo(tmp_path / "pipe.csv")
    with pytest.raises(UserError, match="save it as a file"):
        read_table(tmp_path / "pipe.csv")


def test_a_file_that_is_not_there_is_said_without_numbers_of_the_system(tmp_path):
    with pytest.raises(UserError, match=r"^cannot read .*nothing.csv: No such file or directory\.$"):
        read_table(tmp_path / "nothing.csv")


def test_marks_may_be_given_as_one_text(tmp_path):
    (tmp_path / "t.csv").write_text(lines("?,a,n,A,1", "-9,N,n,A,1"))
    found = read_table(tmp_path / "t.csv", missing="?,-9")
    assert found["age"].isna().sum() == 2
    assert found["ward"].isna().sum() == 0
    pd.testing.assert_frame_equal(found, read_table(tmp_path / "t.csv", missing=["?", "-9"]))


def test_all_problems_of_a_table_are_said_at_once(tmp_path):
    (tmp_path / "t.csv").write_text(lines("old,a,n,,1", "51.5,a,N,A,"))
    roles = ["--client", "hospital", "--domain", "race", "--target", "outcome"]
    out = str(feddar("run", "t.csv", *roles, cwd=tmp_path, code=2))
    for said in ("there are 4 problems", "'race' is empty", "'outcome' is empty", "--spellings merge", "holds 'old'"):
        assert said in out


def test_a_file_is_what_its_bytes_say(tmp_path):
    plain = pd.read_csv(io.StringIO(lines()))
    (tmp_path / "plain.csv").write_text(lines())
    (tmp_path / "unmarked.csv").write_bytes(lines().encode("utf-16-le"))
    (tmp_path / "unmarked-be.csv").write_bytes(lines().encode("utf-16-be"))
    (tmp_path / "wide.csv").write_bytes(lines().encode("utf-32"))
    (tmp_path / "text.xlsx").write_text(lines())
    (tmp_path / "text.parquet").write_text(lines())
    plain.to_excel(tmp_path / "book.xlsx", index=False)
    (tmp_path / "book.xlsx").rename(tmp_path / "book.csv")
    plain.to_parquet(tmp_path / "rows.csv", index=False)
    for path in tmp_path.iterdir():
        pd.testing.assert_frame_equal(read_table(path), plain, check_dtype=False, obj=path.name)


def test_an_excel_sheet_may_have_row_numbers_blank_rows_and_a_title(tmp_path):
    plain = pd.read_csv(io.StringIO(lines()))
    plain.to_excel(tmp_path / "numbered.xlsx")
    pd.testing.assert_frame_equal(read_table(tmp_path / "numbered.xlsx"), plain, check_dtype=False)
    book = openpyxl.load_workbook(tmp_path / "numbered.xlsx")
    book.active.insert_rows(4)
    book.active["B7"] = "old"
    book.save(tmp_path / "blank.xlsx")
    roles = ["--client", "hospital", "--domain", "race", "--target", "outcome"]
    assert "line 7: column 'age' holds 'old'" in feddar("cohort", "blank.xlsx", *roles, cwd=tmp_path, code=2)
    plain.to_excel(tmp_path / "title.xlsx", index=False, startrow=1)
    book = openpyxl.load_workbook(tmp_path / "title.xlsx")
    book.active["A1"] = "Ward 3"
    book.active.merge_cells("A1:E1")
    book.save(tmp_path / "title.xlsx")
    assert "delete the lines above the header" in feddar("cohort", "title.xlsx", *roles, cwd=tmp_path, code=2)


def test_a_folder_is_read_without_what_is_no_table(tmp_path):
    roles = ["--domain", "race", "--target", "outcome"]
    folder = tmp_path / "sites"
    folder.mkdir()
    for name in ("a.csv", "b.csv"):
        (folder / name).write_text(lines())
    (folder / "LICENSE.txt").write_text("Free.")
    (folder / "~$b.xlsx").write_bytes(b"lock")
    (folder / "old.csv").mkdir()
    assert "clients: 2" in feddar("cohort", "sites", *roles, cwd=tmp_path)
    (folder / "c.csv").write_text("stay,unit\n1,2\n")
    assert "c.csv is another table than sites/a.csv" in feddar("cohort", "sites", *roles, cwd=tmp_path, code=2)
    (folder / "c.csv").write_text(lines().replace("age", "Age"))
    said = feddar("cohort", "sites", *roles, cwd=tmp_path, code=2)
    assert "c.csv has the column 'Age', and sites/a.csv 'age': write it in one way." in said
    (folder / "lost.csv").symlink_to(folder / "nothing.csv")
    for path in ("sites", "sites/*.csv"):
        assert "lost.csv is a link that leads nowhere" in feddar("cohort", path, *roles, cwd=tmp_path, code=2)
    (folder / "lost.csv").unlink()
    (folder / "c.csv").rename(folder / "b.tsv")
    (folder / "b.tsv").write_text(lines())
    assert "both be the client 'b'" in feddar("cohort", "sites", *roles, cwd=tmp_path, code=2)


def test_predict_names_all_that_new_samples_lack_at_once(tmp_path):
    (tmp_path / "t.csv").write_text(lines())
    roles = ["--client", "hospital", "--domain", "race", "--target", "outcome"]
    feddar("run", "t.csv", *roles, "--rounds", 1, "--out", "run", cwd=tmp_path)
    (tmp_path / "new.csv").write_text("stay\n1\n2\n")
    said = feddar("predict", "run", "new.csv", cwd=tmp_path, code=2)
    assert "there are 2 problems" in said
    assert "has no columns 'age', 'ward', which the model needs" in said
    assert "'race', its domain" in said
