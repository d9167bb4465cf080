"""Files of tables: CSV in any usual form, Parquet and Excel.

How a CSV file is written is found by looking at it (``csv_form``), unless it is given; what is unusual is said in a
note. Error messages name file and line, and say what to do.
"""

from __future__ import annotations

import csv
import gzip
import io
import lzma
import re
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Self

import numpy as np
import pandas as pd

from feddar.data.columns import nested
from feddar.data.csv_form import (
    SEPARATORS,
    CsvForm,
    all_in_threes,
    decimal_of,
    encoding_of,
    opened,
    separator_of,
    with_points,
)
from feddar.data.name_lists import names_in
from feddar.data.table_paths import files_of, name_of
from feddar.errors import UserError
from feddar.methods import nearest

MISSING = ("", "NA", "N/A", "n/a", "NaN", "nan", "null", "NULL", "None", "<NA>")
_SEPARATORS = {"tab": "\t", "\\t": "\t", "space": " "}
"""Words for separators that are hard to type."""
_LOOKED_AT = 50
"""The number of lines by which the form of a file is found."""
_OTHERS = {r"\s*<[!?a-z]": "HTML or XML", r'\s*[\[{]\s*[\[{"]': "JSON", r"\s*[\[{]\s*$": "JSON", "%PDF-": "a PDF"}
"""What a file is that begins like this."""
_PADDED = re.compile(r"\s*0\d+\s*")
_NUMBER = re.compile(r"\s*[-+]?(\d+([.,]\d*)?|[.,]\d+)([eE][-+]?\d+)?\s*")
_DAMAGES = (zipfile.BadZipFile, EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile, KeyError, SyntaxError)
"""What other packages raise for a file that is damaged; a syntax error is one of XML in a workbook."""
_LONG_LINE = re.compile(r"Expected (\d+) fields in line (\d+), saw (\d+)")
"""What pandas says of a line with more entries than those before it."""


@dataclass(frozen=True)
class Reading:
    """How files are read, as far as it was said; "" is found by looking."""

    sep: str = ""
    decimal: str = ""
    encoding: str = ""
    missing: tuple[str, ...] = ()
    """Texts that stand for a missing value, beside the usual ones."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "sep", _SEPARATORS.get(self.sep, self.sep))
        if len(self.sep) > 1 or self.sep in ('"', "\n", "\r"):
            raise UserError(f"entries are separated by one sign, such as ; or tab, and not by '{self.sep}'.")
        if self.decimal not in ("", ".", ","):
            raise UserError(f"the decimal mark is a point or a comma, and not '{self.decimal}'.")
        try:
            "".encode(self.encoding or "utf-8")
        except (LookupError, ValueError):
            raise UserError(f"there is no encoding '{self.encoding}': utf-8, cp1252 and utf-16 are some.") from None


BY_LOOKING = Reading()


class TableFile(ABC):
    """A file with a table; its columns can be read one by one, or its rows in chunks."""

    names: Sequence[str] = ()
    text: Sequence[str] = ()

    def __init__(self, path: Path, reading: Reading = BY_LOOKING) -> None:
        self.path, self.reading = path, reading

    def with_roles(self, names: Sequence[str], text: Sequence[str]) -> Self:
        """Return the file with columns of names (clients, domains and groups) and others that stay text.

        Names are read as text, so that '001' does not become 1, and only an empty one is missing: 'NA' may be a name.
        What was found by looking at the file is kept.
        """
        made = copy(self)
        made.names, made.text = names, text
        made.__dict__.pop("frame", None)
        return made

    @cached_property
    def header(self) -> list[str]:
        """The names of the columns; an empty or repeated name is an error, but for row numbers, which are no column."""
        names = self._first_line[self.is_numbered :]
        if 2 * names.count("") >= len(names):
            raise UserError(
                f"the first line of {self.path} has few names of columns: delete the lines above the header."
            )
        if 2 * sum(map(is_number, names)) > len(names):
            raise self.no_header()
        for name in names:
            if not name:
                raise UserError(
                    f"{self.path} has a column without a name (a separator too many in each line, or merged cells?): "
                    "name it or leave it out."
                )
            if names.count(name) > 1:
                raise UserError(f"{self.path} has the column '{name}' more than once: rename one.")
        return names

    @cached_property
    def _first_line(self) -> list[str]:
        with readable(self.path):
            return self._header()

    @property
    def is_numbered(self) -> bool:
        """Whether the first column has no name, as programs write row numbers."""
        return len(self._first_line) > 1 and not self._first_line[0]

    def _require_numbers(self, index: pd.Index[Any]) -> None:
        """Refuse a first column without a name that has no row numbers."""
        numbers = pd.to_numeric(pd.Series(index), errors="coerce")
        if not (index.is_unique and bool((numbers == numbers.round()).all())):
            raise UserError(
                f"{self.path} has a first column without a name, which has no row numbers: name it or leave it out."
            )

    def no_header(self) -> UserError:
        """Return the error to raise if the first line has no names of columns."""
        return UserError(
            f"the first line of {self.path} has numbers and no names of columns: put a line with the names there."
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences that say what was found by looking, if it is unusual."""
        numbered = f"the first column of {self.path} has no name, and is left out: it has row numbers."
        return (*self._found(), *([numbered] if self.is_numbered else []))

    def _found(self) -> Iterator[str]:
        """Yield a sentence for each thing that is unusual in how a file of this kind is written."""
        yield from ()

    @property
    def padded(self) -> frozenset[str]:
        """The columns of whole numbers that are written with zeros before them, as codes are; only text shows that."""
        return frozenset()

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def column(self, name: str) -> pd.Series[Any]:
        """Return the values of a column."""

    @abstractmethod
    def chunks(self, wanted: Sequence[str], rows: int) -> Iterator[pd.DataFrame]:
        """Yield some columns, so many rows at a time."""

    def line(self, row: int) -> str:
        """Return file and line of a row, which counts from 0, for messages."""
        return f"{self.path}, line {row + 2}"

    def hint(self, name: str) -> str:
        """Return a hint for a name that is none of its columns."""
        return nearest(name, self.header)

    @property
    def elsewhere(self) -> str:
        """The remedy if the table may be in another part of the file; "" if there is none."""
        return ""

    @abstractmethod
    def _header(self) -> list[str]: ...

    def _missing_in(self, name: str) -> list[str]:
        """Return the texts that are missing values in a column."""
        return [""] if name in self.names else [*MISSING, *self.reading.missing]

    def _without_marks(self, values: pd.Series[Any]) -> pd.Series[Any]:
        """Return a column in which texts that stand for a missing value are missing, also with blanks around them."""
        if not _holds_text(values):
            return values
        missing = {*self._missing_in(str(values.name))}
        marks = [text for text in values.unique() if isinstance(text, str) and text.strip() in missing]
        return values.mask(values.isin(marks)) if marks else values

    def _read(self, values: pd.Series[Any]) -> pd.Series[Any]:
        """Return a column as it was read, without marks, which may have kept numbers from being read as such."""
        known = self._without_marks(values)
        if known is values or values.name in {*self.names, *self.text}:
            return known
        numbers = pd.to_numeric(known, errors="coerce")
        return numbers if numbers.count() == known.count() else known


class CsvFile(TableFile):
    """A CSV file."""

    @cached_property
    def form(self) -> CsvForm:
        """How it is written."""
        encoding, lines = self._start
        sep = self.reading.sep or separator_of(self.path, lines)
        return CsvForm(encoding, sep, self.reading.decimal or decimal_of(lines[1:], sep))

    @cached_property
    def _start(self) -> tuple[str, list[str]]:
        """The encoding, and the first lines that are not empty."""
        encoding = self.reading.encoding or encoding_of(self.path)
        with opened(self.path) as file, io.TextIOWrapper(file, encoding=encoding, newline="") as text:
            lines = [line for line in islice(text, _LOOKED_AT) if line.strip()]
        if not lines:
            raise UserError(f"{self.path} is empty.")
        other = next((what for start, what in _OTHERS.items() if re.match(start, lines[0], re.IGNORECASE)), None)
        if other:
            raise UserError(f"{self.path} is {other} and no table: export it as CSV, Parquet or Excel (.xlsx).")
        return encoding, lines

    @property
    def padded(self) -> frozenset[str]:
        """The columns in which one of the first entries is a whole number with zeros before it."""
        return frozenset(name for name, entries in self._first_entries if any(map(_PADDED.fullmatch, entries)))

    @property
    def _first_entries(self) -> Iterator[tuple[str, list[str]]]:
        """The first entries of each column, as they are written."""
        rows = [row[self.is_numbered :] for row in csv.reader(self._start[1], delimiter=self.form.sep)][1:]
        for place, name in enumerate(self.header):
            yield name, [row[place] for row in rows if place < len(row)]

    def hint(self, name: str) -> str:
        """Return a hint for a name that is none of its columns."""
        if len(self.header) > 1:
            return super().hint(name)
        given = self.reading.sep
        remedy = "leave out --sep, so that it is found" if given else "say with --sep what separates the entries"
        return f"there is only one column{f' by {given!r}' if given else ''}: {remedy}."

    def line(self, row: int) -> str:
        """Return file and line of a row, from 0: entries may have line breaks, and blank lines are no rows."""
        return f"{self.path}, line {self._lines[row + 1]}" if row + 1 < len(self._lines) else super().line(row)

    @cached_property
    def _lines(self) -> list[int]:
        """The line in which each row begins, that of the header first."""
        found, begin = [], 1
        with opened(self.path) as file, io.TextIOWrapper(file, encoding=self.form.encoding, newline="") as text:
            reader = csv.reader(text, delimiter=self.form.sep)
            for entries in reader:
                if len(entries) > 1 or "".join(entries).strip():
                    found.append(begin)
                begin = reader.line_num + 1
        return found

    def _found(self) -> Iterator[str]:
        """Yield a sentence if it is not UTF-8 with commas and decimal points, and one if a mark may not be decimal."""
        form, given = self.form, self.reading
        found = [
            f"separated by {SEPARATORS.get(form.sep, repr(form.sep))}" if not given.sep and form.sep != "," else "",
            "with decimal commas" if not given.decimal and form.decimal == "," else "",
            f"encoded as {form.encoding}" if not given.encoding and not form.encoding.startswith("utf-8") else "",
        ]
        said = ", ".join(filter(None, found))
        if said:
            yield f"{self.path} is read as {said} (--sep, --decimal and --encoding say otherwise)."
        if form.sep == "," or given.decimal:
            return
        threes = [name for name, entries in self._first_entries if all_in_threes(entries, form.decimal)]
        if threes:
            mark, other = ("point", ",") if form.decimal == "." else ("comma", ".")
            listed = ", ".join(f"'{name}'" for name in threes)
            yield f"{listed} has three digits after the {mark}: if it parts thousands, add --decimal '{other}'."

    @cached_property
    def frame(self) -> pd.DataFrame:
        """The whole table."""
        with readable(self.path), opened(self.path) as file:
            return self._checked(pd.read_csv(file, **self._options()), 0)

    def __len__(self) -> int:
        return len(self.frame)

    def column(self, name: str) -> pd.Series[Any]:
        """Return the values of a column."""
        return self.frame[name]

    def chunks(self, wanted: Sequence[str], rows: int) -> Iterator[pd.DataFrame]:
        """Yield all columns, so many rows at a time."""
        first = 0
        with (
            readable(self.path),
            opened(self.path) as file,
            pd.read_csv(file, **self._options(), chunksize=rows) as frames,
        ):
            for frame in frames:
                yield self._checked(frame, first)
                first += len(frame)

    def _header(self) -> list[str]:
        first, *rows = csv.reader(self._start[1], delimiter=self.form.sep)
        for line, row in enumerate(rows, start=2):
            if len(row) > len(first):
                raise UserError(_too_long(self.path, line, len(row), f"the header {len(first)}"))
        return [name.strip() for name in first]

    def _options(self) -> dict[str, Any]:
        return {
            "encoding": self.form.encoding, "sep": self.form.sep, "decimal": self.form.decimal,
            "names": self.header, "header": 0, "keep_default_na": False, "low_memory": False,
            "na_values": {name: self._missing_in(name) for name in self.header},
            "dtype": {name: str for name in {*self.names, *self.text} if name in self.header},
        }  # fmt: skip

    def _checked(self, frame: pd.DataFrame, first: int) -> pd.DataFrame:
        """Return rows from the ``first`` on; refuse a repeated header."""
        if self.is_numbered:
            self._require_numbers(frame.index)
        frame = frame.reset_index(drop=True)
        frame = pd.DataFrame({name: self._read(frame[name]) for name in self.header})
        again = pd.Series(True, index=frame.index)
        for name in self.header:
            again &= frame[name].astype(str).str.strip() == name if _holds_text(frame[name]) else False
        if again.any():
            raise UserError(f"{self.line(first + int(again.argmax()))} is the header once more: delete that line.")
        if self.form.decimal == ".":
            return frame
        texts = [name for name in self.header if name not in {*self.names, *self.text} and _holds_text(frame[name])]
        return frame.assign(**{name: with_points(frame[name]) for name in texts})


class ParquetFile(TableFile):
    """A Parquet file, of which only the columns that are used are read."""

    def __len__(self) -> int:
        from pyarrow.parquet import read_metadata

        with readable(self.path):
            return int(read_metadata(self.path).num_rows)

    def column(self, name: str) -> pd.Series[Any]:
        """Return the values of a column; '' and 'NA' are missing, as they are in a CSV file."""
        with readable(self.path):
            values = pd.read_parquet(self.path, columns=[name]).reset_index(drop=True)[name]
        return self._marked(values.astype("category") if name in self._categories else values)

    @cached_property
    def _categories(self) -> set[str]:
        """The columns that were categories of a data frame: of numbers, the file holds only the numbers."""
        from pyarrow.parquet import read_schema

        described = (read_schema(self.path).pandas_metadata or {}).get("columns", [])
        return {str(each["name"]) for each in described if each.get("pandas_type") == "categorical"}

    def chunks(self, wanted: Sequence[str], rows: int) -> Iterator[pd.DataFrame]:
        """Yield some columns, so many rows at a time."""
        with readable(self.path):
            from pyarrow import Table, parquet

            with parquet.ParquetFile(self.path) as file:
                for batch in file.iter_batches(batch_size=rows, columns=[*wanted]):
                    frame = Table.from_batches([batch]).to_pandas(ignore_metadata=True)
                    yield pd.DataFrame({name: self._marked(frame[name]) for name in wanted})

    def line(self, row: int) -> str:
        """Return file and row, which counts from 0, for messages."""
        return f"{self.path}, row {row + 1}"

    def hint(self, name: str) -> str:
        """Return a hint for a name that is none of its columns; it may be the index of a saved data frame."""
        from pyarrow.parquet import read_schema

        if name in [each["name"] if isinstance(each, dict) else each for each in _index_of(read_schema(self.path))]:
            return "it is the index of the data frame; use reset_index() before saving."
        return super().hint(name)

    def _header(self) -> list[str]:
        from pyarrow.parquet import read_schema

        schema = read_schema(self.path)
        index = _index_of(schema)
        names = [name for name in schema.names if name not in index]
        if not names:
            raise UserError(f"{self.path} has no columns.")
        return names

    def _marked(self, values: pd.Series[Any]) -> pd.Series[Any]:
        if values.dtype == np.float16:
            return self._marked(values.astype(np.float32))
        if _holds_text(values):
            return self._without_marks(_decoded(values))
        missing = self._missing_in(str(values.name))
        marks = pd.to_numeric(pd.Series(missing), errors="coerce").dropna()
        return values.mask(values.isin(marks)) if len(marks) and pd.api.types.is_numeric_dtype(values) else values


class ExcelFile(TableFile):
    """The first sheet of an Excel file."""

    @cached_property
    def _sheets(self) -> list[str]:
        with readable(self.path), pd.ExcelFile(self.path) as book:
            return [str(name) for name in book.sheet_names]

    @property
    def elsewhere(self) -> str:
        """The remedy if the table is in another sheet than the first; "" if there is none."""
        others = ", ".join(self._sheets[1:])
        return f" (others: {others}): move the sheet with the table to the front, or save it alone" if others else ""

    def _require_unmerged(self) -> None:
        """Refuse cells below the header that are merged: only the first of them has the value."""
        from openpyxl import load_workbook  # type: ignore[import-untyped]

        with zipfile.ZipFile(self.path) as parts:
            sheets = [name for name in parts.namelist() if name.startswith("xl/worksheets/")]
            if not any(b"<mergeCell " in parts.read(name) for name in sheets):
                return
        merged = load_workbook(self.path).worksheets[0].merged_cells.ranges
        below = [str(cells) for cells in merged if cells.max_row > 1]
        if below:
            more = f" and {len(below) - 1:,} more" if below[1:] else ""
            raise UserError(
                f"{self.path} has merged cells, {below[0]}{more}, of which only the first holds the value: unmerge "
                "them and fill in each."
            )

    def _found(self) -> Iterator[str]:
        """Yield a sentence if there are more sheets."""
        others = ", ".join(self._sheets[1:])
        if others:
            yield f"of {self.path} the sheet '{self._sheets[0]}' is read, and not {others}."

    def hint(self, name: str) -> str:
        """Return a hint for a name that is none of its columns; it may be in another sheet."""
        hint = super().hint(name)
        return f"only its first sheet, '{self._sheets[0]}', is read{self.elsewhere}; {hint}" if self.elsewhere else hint

    @cached_property
    def frame(self) -> pd.DataFrame:
        """The whole table; its index is the place of each row in the sheet."""
        with readable(self.path):
            columns = [*([""] if self.is_numbered else []), *self.header]
            missing: dict[str | int, Sequence[str]] = {name: self._missing_in(name) for name in columns}
            frame = pd.read_excel(
                self.path, names=columns, header=0, keep_default_na=False, na_values=missing,
                dtype={name: str for name in {*self.names, *self.text} if name in self.header},
            ).dropna(how="all")  # fmt: skip
            self._require_unmerged()
        if self.is_numbered:
            self._require_numbers(pd.Index(frame[""]))
        return pd.DataFrame({name: self._read(frame[name]) for name in self.header})

    def line(self, row: int) -> str:
        """Return file and line of a row, which counts from 0, for messages."""
        return super().line(int(self.frame.index[row]))

    def __len__(self) -> int:
        return len(self.frame)

    def column(self, name: str) -> pd.Series[Any]:
        """Return the values of a column."""
        return self.frame[name].reset_index(drop=True)

    def chunks(self, wanted: Sequence[str], rows: int) -> Iterator[pd.DataFrame]:
        """Yield some columns, so many rows at a time."""
        for first in range(0, len(self.frame), rows):
            yield self.frame[[*wanted]][first : first + rows].reset_index(drop=True)

    def _header(self) -> list[str]:
        # Several rows, since the first one may be a title, which is narrower than the table.
        first = pd.read_excel(self.path, header=None, nrows=_LOOKED_AT, dtype=str, keep_default_na=False)
        if first.empty:
            raise UserError(f"the first sheet of {self.path}, '{self._sheets[0]}', is empty{self.elsewhere}.")
        return [str(name).strip() for name in first.iloc[0]]


def read_table(
    path: str | Path, *, sep: str = "", decimal: str = "", encoding: str = "", missing: str | Sequence[str] = ()
) -> pd.DataFrame:
    """Return a file as a data frame; of a folder, or a pattern like ``states/*.csv``, all files, one after another.

    How a CSV file is written is found by looking, unless it is said. ``missing`` are texts that stand for a missing
    value, beside the usual ones, as a list or as '?,unknown,-9'. Of several files, a column ``file`` says from which
    one a row is.
    """
    marks = names_in(missing) if isinstance(missing, str) else missing
    reading = Reading(sep, decimal, encoding, tuple(marks))
    files = open_tables(Path(path), reading)
    frames = [pd.DataFrame({name: file.column(name) for name in file.header}) for file in files]
    if len(files) > 1:
        frames = [frame.assign(file=name_of(file.path)) for file, frame in zip(files, frames, strict=True)]
    return pd.concat(frames, ignore_index=True)


def open_tables(path: Path, reading: Reading = BY_LOOKING) -> list[TableFile]:
    """Return the file with a table, or those of a folder or a pattern."""
    return [open_table(file, reading) for file in files_of(path)]


def open_table(path: Path, reading: Reading = BY_LOOKING) -> TableFile:
    """Return a file with a table, of the kind that its first bytes say."""
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is no file that can be read more than once: save it as a file.")
    return _kind_of(path)(path, reading)


def _kind_of(path: Path) -> type[TableFile]:
    """Return what a file is by its first bytes, since its name may be wrong."""
    with readable(path), path.open("rb") as file:
        start = file.read(8)
        if start[:4] == b"PAR1":
            return ParquetFile
        if start == b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1":
            raise UserError(f"{path} is an old Excel file, or has a password: save it as .xlsx without one.")
        names = zipfile.ZipFile(file).namelist() if start[:4] == b"PK\x03\x04" else []
    if "xl/workbook.xml" in names:
        return ExcelFile
    if {"[Content_Types].xml", "mimetype", "xl/workbook.bin"} & {*names}:
        raise UserError(f"{path} is a file of an office program, but no Excel workbook: save it as .xlsx or CSV.")
    return CsvFile


def is_number(name: str) -> bool:
    """Return whether a text is a number, as in a first line that is no header."""
    return bool(_NUMBER.fullmatch(name))


def _holds_text(values: pd.Series[Any]) -> bool:
    if values.dtype == object:
        return not nested(values).any()
    return pd.api.types.is_string_dtype(values) or isinstance(values.dtype, pd.CategoricalDtype)


def _decoded(values: pd.Series[Any]) -> pd.Series[Any]:
    """Return texts that were stored as bytes, as some programs do, as text."""
    if pd.api.types.infer_dtype(values, skipna=True) != "bytes":
        return values
    try:
        return values.map(bytes.decode, na_action="ignore")
    except UnicodeDecodeError:
        raise UserError(f"column '{values.name}' holds bytes that are no text: leave it out of the file.") from None


def _index_of(schema: Any) -> list[Any]:
    """Return the columns of a saved data frame that were its index; a range index is a description instead."""
    return list((schema.pandas_metadata or {}).get("index_columns", []))


@contextmanager
def readable(file: Path) -> Iterator[None]:
    """Turn exceptions from reading a file into a ``UserError`` of one sentence."""
    try:
        yield
    except ImportError:
        extra = "excel" if file.suffix.lower().startswith(".xls") else "parquet"
        raise UserError(f"reading {file} needs one more package: pip install 'feddar[{extra}]'.") from None
    except UserError:
        raise
    except UnicodeError as error:
        encoding = getattr(error, "encoding", "what --encoding says")
        raise UserError(f"cannot read {file}: it is not {encoding}; say what it is with --encoding.") from None
    except RuntimeError as error:
        if "password" not in str(error):
            raise
        raise UserError(f"cannot read {file}: it has a password; unpack it, and name what was in it.") from None
    except (OSError, ValueError, csv.Error, *_DAMAGES) as error:
        raise UserError(_cannot_read(file, error)) from None


def _cannot_read(file: Path, error: Exception) -> str:
    """Return the sentence on a file that cannot be read, by what another package says of it."""
    reason = (getattr(error, "strerror", None) or str(error)).strip().rstrip(".")
    long = _LONG_LINE.search(reason)
    if long:
        return _too_long(file, long[2], long[3], f"those before it {long[1]}")
    if "EOF inside string" in reason:
        return f"cannot read {file}: {reason} (a double quote is opened and not closed)."
    without_number = isinstance(error, OSError) and error.errno is None  # not one of the system
    damaged = isinstance(error, _DAMAGES) or without_number or type(error).__name__ == "ArrowInvalid"
    remedy = ": it seems damaged or cut off, so copy or export it again" if damaged else ""
    return f"cannot read {file}: {reason}{remedy}."


def _too_long(file: Path, line: object, entries: object, others: str) -> str:
    return (
        f"{file}, line {line} has {entries} entries, and {others}: put entries with a separator in them in double "
        "quotes, and delete separators too many, or lines above the header."
    )
