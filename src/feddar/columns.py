"""The columns of a table: which kind each is, and how its values become the inputs of an encoder.

Numbers, truth values (0 or 1) and dates (days since 1970) become numbers, with NaN where a value is missing;
categories become the number of their level, 0 where a value is missing. Nothing is filled in or scaled here: that is
the encoder's part (``feddar.encoders.tabular``), with statistics that are sums over clients and are stored with it.

>>> import pandas as pd
>>> table = pd.DataFrame({"age": [61, None], "smoker": ["yes", "no"], "ward": ["A", "B"]})
>>> columns = [infer(name, table[name]) for name in table]
>>> [(column.name, column.kind) for column in columns]
[('age', 'number'), ('smoker', 'boolean'), ('ward', 'category')]
>>> inputs(table, columns)
(array([[61.,  1.],
       [nan,  0.]]), array([[1],
       [2]]))
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from feddar.errors import RowError, UserError
from feddar.methods import nearest

Kind = Literal["number", "boolean", "date", "category"]
UnknownLevel = Literal["error", "missing"]
"""What to do with a level of a category that training did not show: refuse it, or take it as a missing value."""

TRUTH = {"true": 1.0, "false": 0.0, "yes": 1.0, "no": 0.0, "y": 1.0, "n": 0.0, "t": 1.0, "f": 0.0}
MOST_LEVELS = 1000
DAY = np.timedelta64(1, "D")
EPOCH = np.datetime64("1970-01-01")


@dataclass(frozen=True)
class Column:
    """A column that a model learns from."""

    name: str
    kind: Kind
    levels: tuple[str, ...] = ()
    """Of a category, in their order: the first has number 1."""
    gaps: bool = False
    """Whether values may be missing."""


class UnusableColumnError(UserError):
    """A column that cannot be learned from as it is; ``row`` says where that shows, if at one place."""

    def __init__(self, reason: str, row: int | None = None) -> None:
        super().__init__(reason)
        self.row = row


def infer(name: str, values: pd.Series[Any]) -> Column:
    """Tell the kind of a column from its values; ``UnusableColumnError`` says why there is none."""
    present = values.dropna()
    gaps = len(present) < len(values)
    if present.empty:
        raise UnusableColumnError("has no values")
    if pd.api.types.is_bool_dtype(values):
        return Column(name, "boolean", gaps=gaps)
    if pd.api.types.is_numeric_dtype(values):
        _require_finite(values)
        return Column(name, "number", gaps=gaps)
    if pd.api.types.is_datetime64_any_dtype(values):
        return Column(name, "date", gaps=gaps)
    text = present.astype(str).str.strip()
    if set(text.str.lower().unique()) <= set(TRUTH):
        return Column(name, "boolean", gaps=gaps)
    readings: tuple[tuple[Kind, str, pd.Series[Any]], ...] = (
        ("number", "numbers", pd.to_numeric(text, errors="coerce")),
        ("date", "dates", _dates(text)),
    )
    for kind, plural, read in readings:
        if read.notna().all():
            return Column(name, kind, gaps=gaps)
        if read.notna().mean() > 0.5:
            row = int(read.index[int(read.isna().argmax())])
            raise UnusableColumnError(f"holds {str(values.loc[row])!r} among {plural}", row)
    levels = tuple(sorted(text.unique()))
    if len(levels) > max(20, min(MOST_LEVELS, len(text) // 4)):
        raise UnusableColumnError(f"has {len(levels):,} distinct texts in {len(text):,} rows, so it is no category")
    return Column(name, "category", levels, gaps)


def infer_all(table: pd.DataFrame) -> tuple[Column, ...]:
    """Tell the kinds of all columns of a table; one that cannot be learned from is an error that names it."""
    found = []
    for name in table.columns:
        try:
            found.append(infer(str(name), table[name].reset_index(drop=True)))
        except UnusableColumnError as problem:
            where = "" if problem.row is None else f" in row {problem.row}"
            raise UserError(f"column '{name}' {problem}{where}: mend it or leave it out.") from None
    return tuple(found)


def inputs(
    table: pd.DataFrame, columns: Sequence[Column], unknown: UnknownLevel = "error"
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return numbers [n, p] with NaN where missing, and the levels of categories [n, c] with 0 where missing."""
    for column in columns:
        if column.name not in table.columns:
            hint = nearest(column.name, list(map(str, table.columns)))
            raise UserError(f"x has no column '{column.name}', which the model needs: {hint}")
    measured = [_numbers(table[column.name], column) for column in columns if column.kind != "category"]
    coded = [_codes(table[column.name], column, unknown) for column in columns if column.kind == "category"]
    n = len(table)
    return (
        np.stack(measured, axis=1) if measured else np.zeros((n, 0)),
        np.stack(coded, axis=1) if coded else np.zeros((n, 0), np.int64),
    )


def surprises(table: pd.DataFrame, columns: Sequence[Column]) -> Iterator[tuple[int, str]]:
    """Give each row with something that training did not show, and what is made of it.

    >>> list(surprises(pd.DataFrame({"ward": ["A", "C", None]}), [Column("ward", "category", ("A", "B"))]))
    [(1, "ward 'C' unknown: as missing"), (2, 'ward missing, never so in training')]
    """
    for column in columns:
        values = table[column.name]
        if column.kind == "category":
            text = _text(values)
            for row in np.flatnonzero(text.notna() & ~text.isin(column.levels)):
                yield int(row), f"{column.name} '{text.iloc[row]}' unknown: as missing"
        if not column.gaps:
            for row in np.flatnonzero(values.isna()):
                yield int(row), f"{column.name} missing, never so in training"


def _numbers(values: pd.Series[Any], column: Column) -> NDArray[np.float64]:
    if column.kind == "date":
        dates = values if pd.api.types.is_datetime64_any_dtype(values) else _dates(_text(values))
        _require_read(values, dates, column)
        plain = dates.dt.tz_localize(None) if getattr(dates.dt, "tz", None) is not None else dates
        return ((plain.to_numpy("datetime64[us]") - EPOCH) / DAY).astype(np.float64)
    if pd.api.types.is_bool_dtype(values) or pd.api.types.is_numeric_dtype(values):
        numbers = np.asarray(values.to_numpy(np.float64, na_value=np.nan), np.float64)
        _require_read(values, pd.Series(numbers).replace([np.inf, -np.inf], np.nan), column)
        return numbers
    text = _text(values)
    read = text.str.lower().map(TRUTH) if column.kind == "boolean" else pd.to_numeric(text, errors="coerce")
    _require_read(values, read, column)
    return np.asarray(read.to_numpy(np.float64, na_value=np.nan), np.float64)


def _codes(values: pd.Series[Any], column: Column, unknown: UnknownLevel) -> NDArray[np.int64]:
    found = _text(values).map({level: number for number, level in enumerate(column.levels, start=1)})
    if unknown == "error":
        _require_read(values, found, column)
    return np.asarray(found.fillna(0).to_numpy(np.int64), np.int64)


def _text(values: pd.Series[Any]) -> pd.Series[Any]:
    return values.astype("string").str.strip()


def _dates(text: pd.Series[Any]) -> pd.Series[Any]:
    """Read ISO dates and times, which begin with year, month and day; anything else is missing."""
    shaped = text.where(text.str.match(r"\d{4}-\d{2}-\d{2}"))
    return pd.to_datetime(shaped, format="ISO8601", errors="coerce", utc=True).dt.tz_localize(None)


def _require_read(values: pd.Series[Any], read: pd.Series[Any], column: Column) -> None:
    wrong = values.notna().to_numpy() & read.isna().to_numpy()
    if not wrong.any():
        return
    row = int(wrong.argmax())
    found = f"column '{column.name}' holds {str(values.iloc[row])!r}, which"
    if column.kind == "category":
        advice = "mend it, or take such values as missing: unknown_category='missing' (--unknown-category missing)"
        known = f"did not occur in training ({', '.join(column.levels[:10])}{', …' * (len(column.levels) > 10)})"
        raise RowError(f"{found} {known}: {advice}.", row)
    what = {"number": "a number", "boolean": "yes or no", "date": "a date such as 2020-12-31"}
    raise RowError(f"{found} is not {what[column.kind]}: mend it, or leave it empty if it is not known.", row)


def _require_finite(values: pd.Series[Any]) -> None:
    infinite = np.isinf(values.to_numpy(np.float64, na_value=np.nan))
    if infinite.any():
        raise UnusableColumnError("is infinite", int(infinite.argmax()))
