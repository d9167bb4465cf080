"""Files of tables: CSV in any usual form, Parquet and Excel.

Separator, decimal mark, encoding and compression of a CSV file are found by looking at it, unless they are given; what
is unusual is said in a note. Error messages name file and line, and say what to do.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import lzma
import re
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import pandas as pd

from feddar.data.columns import nested
from feddar.data.table_options import COMPRESSED, SUFFIXES
from feddar.errors import UserError
from feddar.methods import nearest

MISSING = ("", "NA", "N/A", "n/a", "NaN", "nan", "null", "NULL", "None", "<NA>")
SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
_LOOKED_AT = 50
"""The number of lines by which the separator is found."""
_COMMA = re.compile(r"\s*[-+]?\d+,\d+\s*")
_POINT = re.compile(r"\s*[-+]?\d+\.\d+\s*")
_NUMBER = re.compile(r"\s*[-+]?(\d+([.,]\d*)?|[.,]\d+)([eE][-+]?\d+)?\s*")


@dataclass(frozen=True)
class Reading:
    """How files are read, as far as it was said; "" is found by looking."""

    sep: str = ""
    decimal: str = ""
    encoding: str = ""
    missing: tuple[str, ...] = ()
    """Texts that stand for a missing value, beside the usual ones."""

    def __post_init__(self) -> None:
        if self.encoding:
            try:
                codecs.lookup(self.encoding)
            except LookupError:
                raise UserError(f"there is no encoding '{self.encoding}': utf-8, cp1252 and utf-16 are some.") from None


BY_LOOKING = Reading()


class TableFile(ABC):
    """A file with a table; its columns can be read one by one, or its rows in chunks."""

    def __init__(
        self, path: Path, reading: Reading = BY_LOOKING, names: Sequence[str] = (), text: Sequence[str] = ()
    ) -> None:
        """``names`` are columns of clients, domains and groups, ``text`` stays text.

        Names are read as text, so that '001' does not become 1, and only an empty one is missing: 'NA' may be a name.
        """
        self.path, self.reading, self.names, self.text = path, reading, names, text

    @cached_property
    def header(self) -> list[str]:
        """The names of the columns; an empty or repeated name is an error."""
        with readable(self.path):
            names = self._header()
        for name in names:
            if not name:
                raise UserError(f"{self.path} has a column without a name (row numbers?): name it or leave it out.")
            if names.count(name) > 1:
                raise UserError(f"{self.path} has the column '{name}' more than once: rename one.")
        if 2 * sum(bool(_NUMBER.fullmatch(name)) for name in names) > len(names):
            raise UserError(
                f"the first line of {self.path} has numbers and no names of columns: put a line with the names there."
            )
        return names

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences that say what was found by looking, if it is unusual."""
        return ()

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

    @abstractmethod
    def _header(self) -> list[str]: ...

    def _missing_in(self, name: str) -> list[str]:
        """Return the texts that are missing values in a column."""
        return [""] if name in self.names else [*MISSING, *self.reading.missing]


@dataclass(frozen=True)
class CsvForm:
    """How a CSV file is written."""

    encoding: str
    sep: str
    decimal: str


class CsvFile(TableFile):
    """A CSV file."""

    @cached_property
    def form(self) -> CsvForm:
        """How it is written."""
        encoding = self.reading.encoding or encoding_of(self.path)
        with opened(self.path) as file, io.TextIOWrapper(file, encoding=encoding, newline="") as text:
            lines = [line for line in islice(text, _LOOKED_AT) if line.strip()]
        if not lines:
            raise UserError(f"{self.path} is empty.")
        sep = self.reading.sep or separator_of(self.path, lines)
        return CsvForm(encoding, sep, self.reading.decimal or _decimal_of(lines[1:], sep))

    @property
    def notes(self) -> tuple[str, ...]:
        """One sentence if it is not UTF-8 with commas and decimal points."""
        form, given = self.form, self.reading
        found = [
            f"separated by {SEPARATORS.get(form.sep, repr(form.sep))}" if not given.sep and form.sep != "," else "",
            "with decimal commas" if not given.decimal and form.decimal == "," else "",
            f"encoded as {form.encoding}" if not given.encoding and not form.encoding.startswith("utf-8") else "",
        ]
        said = ", ".join(filter(None, found))
        return (f"{self.path} is read as {said} (--sep, --decimal and --encoding say otherwise).",) if said else ()

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
                yield self._checked(frame, first).reset_index(drop=True)
                first += len(frame)

    def _header(self) -> list[str]:
        with opened(self.path) as file:
            first = pd.read_csv(
                file, header=None, nrows=1, dtype=str, keep_default_na=False, sep=self.form.sep,
                encoding=self.form.encoding,
            )  # fmt: skip
        return [str(name).strip() for name in first.iloc[0]]

    def _options(self) -> dict[str, Any]:
        return {
            "encoding": self.form.encoding, "sep": self.form.sep, "decimal": self.form.decimal,
            "names": self.header, "header": 0, "keep_default_na": False, "low_memory": False,
            "na_values": {name: self._missing_in(name) for name in self.header},
            "dtype": {name: str for name in {*self.names, *self.text} if name in self.header},
        }  # fmt: skip

    def _checked(self, frame: pd.DataFrame, first: int) -> pd.DataFrame:
        """Refuse rows with more entries than the header, which pandas would use as the index, and repeated headers."""
        if not frame.index.equals(pd.RangeIndex(first, first + len(frame))):
            raise UserError(
                f"{self.path} has more entries in its rows than in its header: mend the header or the rows."
            )
        again = pd.Series(True, index=frame.index)
        for name in self.header:
            again &= frame[name].astype(str).str.strip() == name if _holds_text(frame[name]) else False
        if again.any():
            raise UserError(f"{self.line(first + int(again.argmax()))} is the header once more: delete that line.")
        return frame


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
        return [name for name in schema.names if name not in index]

    def _marked(self, values: pd.Series[Any]) -> pd.Series[Any]:
        missing = self._missing_in(str(values.name))
        if _holds_text(values):
            return values.mask(values.isin(missing))
        marks = pd.to_numeric(pd.Series(missing), errors="coerce").dropna()
        return values.mask(values.isin(marks)) if len(marks) and pd.api.types.is_numeric_dtype(values) else values


class ExcelFile(TableFile):
    """The first sheet of an Excel file."""

    @cached_property
    def _sheets(self) -> list[str]:
        with readable(self.path), pd.ExcelFile(self.path) as book:
            return [str(name) for name in book.sheet_names]

    @property
    def notes(self) -> tuple[str, ...]:
        """One sentence if there are more sheets."""
        others = ", ".join(self._sheets[1:])
        return (f"of {self.path} the sheet '{self._sheets[0]}' is read, and not {others}.",) if others else ()

    @cached_property
    def frame(self) -> pd.DataFrame:
        """The whole table."""
        with readable(self.path):
            missing: dict[str | int, Sequence[str]] = {name: self._missing_in(name) for name in self.header}
            frame = pd.read_excel(
                self.path, names=self.header, header=0, keep_default_na=False, na_values=missing,
                dtype={name: str for name in {*self.names, *self.text} if name in self.header},
            )  # fmt: skip
        return frame.dropna(how="all").reset_index(drop=True)

    def __len__(self) -> int:
        return len(self.frame)

    def column(self, name: str) -> pd.Series[Any]:
        """Return the values of a column."""
        return self.frame[name]

    def chunks(self, wanted: Sequence[str], rows: int) -> Iterator[pd.DataFrame]:
        """Yield some columns, so many rows at a time."""
        for first in range(0, len(self.frame), rows):
            yield self.frame[[*wanted]][first : first + rows].reset_index(drop=True)

    def _header(self) -> list[str]:
        first = pd.read_excel(self.path, header=None, nrows=1, dtype=str, keep_default_na=False)
        if first.empty:
            raise UserError(f"the first sheet of {self.path} is empty.")
        return [str(name).strip() for name in first.iloc[0]]


KINDS: dict[str, type[TableFile]] = {".parquet": ParquetFile, ".xlsx": ExcelFile}


def read_table(
    path: str | Path, *, sep: str = "", decimal: str = "", encoding: str = "", missing: Sequence[str] = ()
) -> pd.DataFrame:
    """Return a file as a data frame; of a folder, or a pattern such as states/*.csv, all files, one after another.

    How a CSV file is written is found by looking, unless it is said. ``missing`` are texts that stand for a missing
    value, beside the usual ones. Of several files, a column ``file`` says from which one a row is.
    """
    reading = Reading(sep, decimal, encoding, tuple(missing))
    files = [open_table(file, reading) for file in files_of(Path(path))]
    frames = [pd.DataFrame({name: file.column(name) for name in file.header}) for file in files]
    if len(files) > 1:
        frames = [frame.assign(file=name_of(file.path)) for file, frame in zip(files, frames, strict=True)]
    return pd.concat(frames, ignore_index=True)


def open_table(
    path: Path, reading: Reading = BY_LOOKING, names: Sequence[str] = (), text: Sequence[str] = ()
) -> TableFile:
    """Return a file with a table, of the kind that its name says."""
    if not is_table(path):
        raise UserError(f"{path} is no table that can be read: export it as CSV, Parquet or Excel.")
    return KINDS.get(path.suffix.lower(), CsvFile)(path, reading, names, text)


def is_table(path: Path) -> bool:
    """Return whether a file's name is that of a table."""
    return _ending(path) != ""


def name_of(path: Path) -> str:
    """Return a file's name without its ending: 'CT' for CT.csv.gz.

    >>> name_of(Path("states/CT.csv.gz")), name_of(Path("north.v2.parquet"))
    ('CT', 'north.v2')
    """
    return path.name[: len(path.name) - len(_ending(path))]


def _ending(path: Path) -> str:
    """Return the ending of a table's name, with that of its compression; "" if it is none of a table."""
    last = path.suffix.lower()
    ending = last if last not in COMPRESSED else Path(path.stem).suffix.lower() + last
    return ending if ending.removesuffix(last if last in COMPRESSED else "") in SUFFIXES else ""


def files_of(path: Path) -> list[Path]:
    """Return the file itself, the tables in a folder, or those that a pattern such as states/*.csv fits, by name."""
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if is_table(file))
    elif is_pattern(path):
        parts = Path(path).parts
        first = next(place for place, part in enumerate(parts) if _is_wild(part))
        files = sorted(file for file in Path(*parts[:first]).glob(str(Path(*parts[first:]))) if is_table(file))
    else:
        files = [path]
    if not files:
        raise UserError(f"there is no CSV, Parquet or Excel file in {path}: put one per client there.")
    return files


def is_pattern(path: Path) -> bool:
    """Return whether a path stands for several files, such as states/*.csv."""
    return not path.exists() and any(map(_is_wild, path.parts))


def _is_wild(part: str) -> bool:
    return any(sign in part for sign in "*?[")


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading, without its compression, which its first bytes tell."""
    with path.open("rb") as raw:
        magic = raw.read(6)
        raw.seek(0)
        how = next((how for start, how in _COMPRESSIONS.items() if magic.startswith(start)), None)
        if how is None:
            yield raw
        else:
            with how(raw) as file:
                yield file


def _only_file_in(raw: BinaryIO) -> BinaryIO:
    archive = zipfile.ZipFile(raw)
    names = [name for name in archive.namelist() if not name.endswith("/")]
    if len(names) != 1:
        raise UserError(f"{getattr(raw, 'name', 'the archive')} holds {len(names)} files: unpack it into a folder.")
    return archive.open(names[0])  # type: ignore[return-value]


_COMPRESSIONS: dict[bytes, Callable[[BinaryIO], Any]] = {
    b"\x1f\x8b": lambda raw: gzip.GzipFile(fileobj=raw), b"BZh": bz2.BZ2File, b"\xfd7zXZ\x00": lzma.LZMAFile,
    b"PK\x03\x04": _only_file_in,
}  # fmt: skip


def encoding_of(path: Path) -> str:
    """Return the encoding of a file: by its first bytes, UTF-8 if all of it is, else that of Windows."""
    with opened(path) as file:
        start = file.read(4)
        if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            return "utf-16"
        decoder = codecs.getincrementaldecoder("utf-8")()
        part, unknown = start, False
        try:
            while part:
                decoder.decode(part)
                part = file.read(1 << 20)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            unknown = True
    if not unknown:
        return "utf-8-sig" if start.startswith(codecs.BOM_UTF8) else "utf-8"
    with opened(path) as file:
        # Bytes that Windows' own encoding does not have.
        rest = any(byte in part for part in iter(lambda: file.read(1 << 20), b"") for byte in b"\x81\x8d\x8f\x90\x9d")
    return "latin-1" if rest else "cp1252"


def separator_of(path: Path, lines: Sequence[str]) -> str:
    """Return what separates the entries of a file, by its first lines; refuse a header unlike its rows."""
    widths = {sep: [len(row) for row in csv.reader(lines, delimiter=sep)] for sep in SEPARATORS}
    in_header = max(SEPARATORS, key=lambda sep: widths[sep][0])
    if widths[in_header][0] == 1:
        return ","
    rows = {sep: counts[1:] for sep, counts in widths.items()}
    other = max(SEPARATORS, key=lambda sep: sum(count == widths[in_header][0] for count in rows[sep]))
    if rows[in_header] and set(rows[in_header]) == {1} and set(rows[other]) == {widths[in_header][0]}:
        raise UserError(
            f"the header of {path} is separated by {SEPARATORS[in_header]} and its rows by {SEPARATORS[other]}: write "
            "both in one way."
        )
    fits = {sep: sum(count == widths[sep][0] for count in rows[sep]) for sep in SEPARATORS if widths[sep][0] > 1}
    return max(fits, key=lambda sep: (fits[sep], widths[sep][0]))


def _decimal_of(lines: Sequence[str], sep: str) -> str:
    """Return what decimals are behind: a comma if entries are written so, and none with a point."""
    if sep == ",":
        return "."
    entries = [entry for row in csv.reader(lines, delimiter=sep) for entry in row]
    return "," if any(map(_COMMA.fullmatch, entries)) and not any(map(_POINT.fullmatch, entries)) else "."


def _holds_text(values: pd.Series[Any]) -> bool:
    if values.dtype == object:
        return not nested(values).any()
    return pd.api.types.is_string_dtype(values) or isinstance(values.dtype, pd.CategoricalDtype)


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
    except UnicodeDecodeError as error:
        raise UserError(f"cannot read {file}: it is not {error.encoding}; say what it is with --encoding.") from None
    except (OSError, ValueError, zipfile.BadZipFile, EOFError, lzma.LZMAError) as error:
        raise UserError(f"cannot read {file}: {str(error).strip()}.") from None
