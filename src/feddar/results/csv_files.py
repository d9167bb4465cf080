"""CSV files that may be opened in a spreadsheet: text of users and sites is never taken for a formula there.

Text that begins as formulas do gets an apostrophe in front, by which spreadsheets know text; reading takes it away
again. Numbers, also those in columns of text, stay as they are.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Literal, TypeVar

from feddar.lazy import pandas as pd

_BEGIN = r"[=+\-@\t\r\n＝＋－＠]"
_FORMULA, _GUARDED = re.compile(f"'*{_BEGIN}"), re.compile(f"'+{_BEGIN}")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
Cell = TypeVar("Cell")


def guarded(cell: Cell) -> Cell | str:
    """Return a cell as it is written: with an apostrophe in front if it is text that looks like a formula."""
    odd = isinstance(cell, str) and _FORMULA.match(cell) and not _NUMBER.fullmatch(cell)
    return f"'{cell}" if odd else cell


def unguarded(cell: Cell) -> Cell | str:
    """Undo ``guarded``."""
    return cell[1:] if isinstance(cell, str) and _GUARDED.match(cell) else cell


def write_csv(frame: pd.DataFrame, file: Path | IO[str], *, header: bool = True) -> None:
    """Write a table without its index, and without formulas."""
    # Python's csv leaves a cell with a carriage return alone, and what follows it would be a cell of its own.
    returns = any("\r" in str(each) for column in _texts(frame).values() for each in column.unique())
    quoting: Literal[0, 2] = csv.QUOTE_NONNUMERIC if returns else csv.QUOTE_MINIMAL
    _mapped(frame, guarded).to_csv(file, index=False, header=header, quoting=quoting)


def without_guards(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a table that was read as it was before ``write_csv`` wrote it."""
    return _mapped(frame, unguarded)


def _mapped(frame: pd.DataFrame, change: Callable[[Any], Any]) -> pd.DataFrame:
    """Return a table with ``change`` done to its texts; columns in which that changes nothing are left as they are."""
    texts = _texts(frame).items()
    odd = {name: column for name, column in texts if any(change(each) is not each for each in column.unique())}
    return frame.assign(**{name: column.map(change) for name, column in odd.items()})


def _texts(frame: pd.DataFrame) -> dict[str, pd.Series[Any]]:
    """Return the columns that are not of numbers."""
    return {str(name): column for name, column in frame.items() if not pd.api.types.is_numeric_dtype(column.dtype)}
