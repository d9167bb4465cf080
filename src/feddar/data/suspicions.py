"""What an analyst would ask about a table before training on it: codes, marks of missing values, leaks and paths.

Nothing is changed; each suspicion is a note that says which option answers it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from feddar.data.columns import Column, Table
from feddar.data.images import SUFFIXES as IMAGES

_ROWS = 100_000
"""The number of rows that are looked at."""
_CODES = range(3, 21)
"""So many different whole numbers may be codes."""
_CODE_NAME = re.compile(r".*([_ ]id|code|type)", re.IGNORECASE)
_MARK = re.compile(
    r"\?+|-+|\.+|unk|unknown|not (known|stated|recorded|available)|missing|n\.?\s?/?a\.?|9999-99-99|0000-00-00",
    re.IGNORECASE,
)
_HIGH_MARKS = (7, 8, 9, 77, 88, 97, 98, 99, 777, 888, 997, 998, 999, 7777, 8888, 9997, 9998, 9999)
_LOW_MARKS = (-1, -7, -8, -9, -77, -88, -99, -999, -9999)
_FAR = 3
"""A mark above the values is larger than the largest of them by this factor."""
LEAK = 0.95
"""A column that alone takes away so much of the errors that are made without it probably tells the outcome."""
_BINS, _FEWEST = 20, 10


def notes_on(table: Table, columns: Sequence[Column], labels: pd.DataFrame) -> Iterator[str]:
    """Yield a sentence for each thing in the columns to learn from that the user should look at."""
    looked = {column.name: table[column.name][:_ROWS] for column in columns if column.kind != "image"}
    kinds = {column.name: column.kind for column in columns}
    numbers = {name: values for name, values in looked.items() if kinds[name] == "number"}
    codes = [name for name, values in numbers.items() if _are_codes(name, values)]
    if codes:
        yield (
            f"{_columns(codes)} {_few_numbers(codes)}: if they are codes and not amounts, add --categories "
            f"{','.join(codes)}."
        )
    yield from _noted_marks(looked)
    for name, values in looked.items():
        if kinds[name] == "category" and _are_paths(values):
            yield f"column '{name}' holds paths of images: --image {name} reads them, --ignore {name} leaves them out."
    for target in labels:
        leaks = [name for name, values in looked.items() if explained(values, labels[target][:_ROWS]) >= LEAK]
        if leaks:
            yield (
                f"{_columns(leaks)} alone {'tells' if len(leaks) == 1 else 'tell'} '{target}' almost without error: if "
                f"that is not known beforehand, add --ignore {','.join(leaks)}."
            )


def _columns(names: Sequence[str]) -> str:
    quoted = ", ".join(f"'{name}'" for name in names)
    return f"column {quoted}" if len(names) == 1 else f"columns {quoted}"


def _few_numbers(names: Sequence[str]) -> str:
    return "holds few different whole numbers" if len(names) == 1 else "hold few different whole numbers"


def _are_codes(name: str, values: pd.Series[Any]) -> bool:
    """Return whether a column of numbers may be codes: few different whole numbers, or a name that says so."""
    numbers = pd.to_numeric(values, errors="coerce").dropna()
    if not len(numbers) or not bool((numbers == numbers.round()).all()):
        return False
    different = numbers.nunique()
    return (different in _CODES and len(numbers) > 5 * different) or bool(_CODE_NAME.fullmatch(name))


def _noted_marks(looked: Mapping[str, pd.Series[Any]]) -> Iterator[str]:
    found = {name: marks for name, values in looked.items() if (marks := marks_in(values))}
    marks = list(dict.fromkeys(mark for each in found.values() for mark in each))
    if marks:
        quoted = ",".join(marks)
        yield (
            f"{_columns(list(found))} {'has' if len(found) == 1 else 'have'} values that look like marks of a missing "
            f"one: if they are, add --missing '{quoted}'."
        )


def marks_in(values: pd.Series[Any]) -> list[str]:
    """Return the values of a column that look as if they stood for a missing one.

    >>> marks_in(pd.Series([1, 2, 2, 1, 98, 99])), marks_in(pd.Series([96, 97, 98, 99, 3]))
    (['98', '99'], [])
    """
    present = values.dropna()
    if pd.api.types.is_bool_dtype(values) or pd.api.types.is_datetime64_any_dtype(values):
        return []
    if not pd.api.types.is_numeric_dtype(values):
        texts = present.astype(str).str.strip().drop_duplicates()
        return sorted(text for text in texts if _MARK.fullmatch(text))
    different = np.unique(present.to_numpy(float))
    high, low = (different[np.isin(different, marks)] for marks in (_HIGH_MARKS, _LOW_MARKS))
    rest = np.setdiff1d(different, np.concatenate([high, low]))
    if len(rest) < 2:
        return []
    below = low.tolist() if rest.min() >= 0 else []
    above = high.tolist() if len(high) and rest.max() * _FAR < high.min() else []
    return [f"{mark:g}" for mark in below + above]


def _are_paths(values: pd.Series[Any]) -> bool:
    texts = values.dropna().astype(str).str.lower()
    return len(texts) > 0 and bool(texts.str.endswith(IMAGES).all())


def explained(values: pd.Series[Any], labels: pd.Series[Any]) -> float:
    """Return the part of the errors without a column that are not made with it alone, from 0 to 1.

    Errors are those of the most frequent class, or squares around the mean, by level or by bins of the column's values.
    """
    cells = _cells(values)
    number = pd.api.types.is_float_dtype(labels) or (pd.api.types.is_numeric_dtype(labels) and labels.nunique() > 20)
    if number:
        target = pd.Series(pd.to_numeric(labels, errors="coerce").to_numpy(float))
        around = float(np.nansum((target - target.groupby(cells).transform("mean")) ** 2))
        whole = float(np.nansum((target - target.mean()) ** 2))
        return 1 - around / whole if whole else 0.0
    counts = pd.crosstab(cells, labels.astype(str).to_numpy())
    errors = len(labels) - int(counts.sum(axis=0).max())
    return 1 - (len(labels) - int(counts.max(axis=1).sum())) / errors if errors else 0.0


def _cells(values: pd.Series[Any]) -> pd.Series[Any]:
    """Return the cell of each row: its level or bin; missing values, and rare levels, are cells of their own."""
    numeric = pd.to_numeric(values, errors="coerce") if pd.api.types.is_numeric_dtype(values) else None
    if numeric is not None and numeric.nunique() > _BINS:
        cells = pd.qcut(numeric, _BINS, labels=False, duplicates="drop")
    else:
        cells = pd.Series(pd.factorize(values.astype(str).where(values.notna()))[0], index=values.index)
        cells = cells.where(cells.map(cells.value_counts()) >= _FEWEST, -2)
    return pd.Series(cells).fillna(-1).astype(int).reset_index(drop=True)
