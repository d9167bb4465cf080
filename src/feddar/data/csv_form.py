"""How a CSV file is written: its compression, encoding, separator and decimal mark, found by looking at it."""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import lzma
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pandas as pd

from feddar.errors import UserError
from feddar.objectives.labels import by_distinct

SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32", codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16", codecs.BOM_UTF8: "utf-8-sig",
}  # fmt: skip
"""Encodings by the mark at the start of a file; that of UTF-32 begins with that of UTF-16."""
_UNUSED_BY_WINDOWS = b"\x81\x8d\x8f\x90\x9d"
_POINT = re.compile(r"\s*[-+]?\d+\.\d+\s*")
_COMMA = re.compile(r"\s*[-+]?(\d+|\d{1,3}(\.\d{3})+),\d+\s*")
_THREES = {mark: re.compile(rf"\s*[-+]?\d{{1,3}}({re.escape(mark)}\d{{3}})+\s*") for mark in ".,"}
"""Numbers in which a mark may stand between thousands."""
_WITH_COMMA = r"[-+]?(\d+|\d{1,3}(\.\d{3})+)(,\d+)?"


@dataclass(frozen=True)
class CsvForm:
    """How a CSV file is written."""

    encoding: str
    sep: str
    decimal: str


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
    names = [name for name in archive.namelist() if not name.endswith("/") and not name.startswith("__MACOSX/")]
    if len(names) != 1:
        count = f"{len(names)} files: unpack it into a folder" if names else "no file"
        raise UserError(f"{getattr(raw, 'name', 'the archive')} holds {count}.")
    return archive.open(names[0])  # type: ignore[return-value]


_COMPRESSIONS: dict[bytes, Callable[[BinaryIO], Any]] = {
    b"\x1f\x8b": lambda raw: gzip.GzipFile(fileobj=raw), b"BZh": bz2.BZ2File, b"\xfd7zXZ\x00": lzma.LZMAFile,
    b"PK\x03\x04": _only_file_in, b"PK\x05\x06": _only_file_in,
}  # fmt: skip


def encoding_of(path: Path) -> str:
    """Return the encoding of a file: by its first bytes, UTF-8 if all of it is, else that of Windows."""
    with opened(path) as file:
        start = file.read(1024)
    marked = next((encoding for mark, encoding in _MARKS.items() if start.startswith(mark)), None)
    found = marked or _wide_encoding_of(start)
    if found:
        return found
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for part in _parts(path):
            decoder.decode(part)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        unused = any(byte in part for part in _parts(path) for byte in _UNUSED_BY_WINDOWS)
        return "latin-1" if unused else "cp1252"
    return "utf-8"


def _wide_encoding_of(start: bytes) -> str:
    """Return the encoding of text with two bytes a letter and no mark: of ordinary letters, every other byte is 0."""
    first, second = start[::2], start[1::2]
    if 2 * second.count(0) > len(second) and not first.count(0):
        return "utf-16-le"
    return "utf-16-be" if 2 * first.count(0) > len(first) and not second.count(0) else ""


def _parts(path: Path) -> Iterator[bytes]:
    """Yield a file in parts; bytes that no text has are an error."""
    with opened(path) as file:
        while part := file.read(1 << 20):
            if b"\0" in part:
                raise UserError(f"{path} is no text, as it has zero bytes: export it as CSV, Parquet or Excel (.xlsx).")
            yield part


def separator_of(path: Path, lines: Sequence[str]) -> str:
    """Return what separates the entries of a file, by its first lines; refuse a header unlike its rows."""
    widths = {sep: [len(row) for row in csv.reader(lines, delimiter=sep)] for sep in SEPARATORS}
    in_header = max(SEPARATORS, key=lambda sep: widths[sep][0])
    rows = {sep: counts[1:] for sep, counts in widths.items()}
    if widths[in_header][0] == 1:
        _require_no_title(path, rows)
        return ","
    other = max(SEPARATORS, key=lambda sep: sum(count == widths[in_header][0] for count in rows[sep]))
    if rows[in_header] and set(rows[in_header]) == {1} and set(rows[other]) == {widths[in_header][0]}:
        raise UserError(
            f"the header of {path} is separated by {SEPARATORS[in_header]} and its rows by {SEPARATORS[other]}: write "
            "both in one way."
        )
    fits = {sep: sum(count == widths[sep][0] for count in rows[sep]) for sep in SEPARATORS if widths[sep][0] > 1}
    return max(fits, key=lambda sep: (fits[sep], widths[sep][0]))


def _require_no_title(path: Path, rows: dict[str, list[int]]) -> None:
    """Refuse a file whose first line is one entry, and most lines below it have several."""
    for counts in rows.values():
        for width, times in Counter(counts).most_common(1):
            if width > 1 and 2 * times > len(counts):
                raise UserError(
                    f"the first line of {path} is one entry, and lines below it have {width}: delete the lines above "
                    "the header."
                )


def decimal_of(lines: Sequence[str], sep: str) -> str:
    """Return what decimals are behind: a comma if entries are written so, and no point but between thousands.

    >>> decimal_of(["3,5;1.200"], ";"), decimal_of(["3.5;1.200"], ";"), decimal_of(["3,5;1.25"], ";")
    (',', '.', '.')
    """
    if sep == ",":
        return "."
    entries = [entry for row in csv.reader(lines, delimiter=sep) for entry in row]
    points = [entry for entry in entries if _POINT.fullmatch(entry)]
    return "," if any(map(_COMMA.fullmatch, entries)) and all(map(_THREES["."].fullmatch, points)) else "."


def all_in_threes(entries: Sequence[str], mark: str) -> bool:
    """Return whether a mark may stand between thousands in all numbers of a column that have it, and some have.

    >>> all_in_threes(["1.200", "950"], "."), all_in_threes(["1.200", "1.25"], "."), all_in_threes(["950"], ".")
    (True, False, False)
    """
    marked = [entry for entry in entries if mark in entry]
    return bool(marked) and all(map(_THREES[mark].fullmatch, marked))


def with_points(values: pd.Series[Any]) -> pd.Series[Any]:
    """Return texts of a file with decimal commas, with numbers as Python writes them, if most are numbers.

    >>> with_points(pd.Series(["1.200,5", "3", "> 89"])).tolist(), with_points(pd.Series(["1,5", "2"])).tolist()
    (['1200.5', '3', '> 89'], [1.5, 2.0])
    """
    present = values.dropna().astype(str).str.strip()
    numbers = present.str.fullmatch(_WITH_COMMA)
    if 2 * int(numbers.sum()) <= len(present) or present[numbers].nunique() < present[~numbers].nunique():
        return values
    plain = by_distinct(present[numbers], lambda texts: texts.str.replace(".", "").str.replace(",", "."))
    return pd.to_numeric(plain).reindex(values.index) if numbers.all() else plain.reindex(values.index).fillna(values)
