"""Labels as they come in a table: which values are classes, how files write them, and what is wrong with some."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from feddar.errors import UserError
from feddar.lazy import pandas as pd

Scalar = str | int | float | bool
Asked = Literal["auto", "regression", "classification"]

MOST_WHOLE_NUMBER_CLASSES = 20

VOCABULARIES = ({"true": 1.0, "false": 0.0}, {"yes": 1.0, "no": 0.0, "y": 1.0, "n": 0.0}, {"t": 1.0, "f": 0.0})
"""Of truth values; a column keeps to one of them, else N may be a third value beside F and Y."""
TRUTH = {word: value for words in VOCABULARIES for word, value in words.items()}


@dataclass(frozen=True)
class LabelColumns:
    """The column of labels, or several, and what was said of them."""

    columns: tuple[pd.Series[Any], ...]
    asked: Asked = "auto"
    known_classes: tuple[Scalar, ...] | None = None
    """The classes in their order, where they are known beforehand."""
    positive: str | None = None
    """Of two classes, the one that was named as positive, as a person writes it."""

    @classmethod
    def of(
        cls, y: Any, asked: Asked = "auto", classes: Sequence[Scalar] | None = None, positive: str | None = None
    ) -> LabelColumns:
        """Take labels as users give them: one column, or a table of several."""
        known = None if classes is None else tuple(classes)
        return cls(tuple(column.rename(name) for name, column in _columns(y)), asked, known, positive)

    @property
    def only(self) -> pd.Series[Any]:
        """The one column; several are an error."""
        if len(self.columns) > 1:
            raise UserError(f"the label must be one column, and there are {len(self.columns)}.")
        return self.columns[0]

    @property
    def known(self) -> pd.Series[Any]:
        """The one column, in which nothing may be missing."""
        return without_gaps(self.only, "label")


def _columns(y: Any) -> list[tuple[str, pd.Series[Any]]]:
    if isinstance(y, pd.DataFrame):
        return [(str(name), as_column(y[name], "label")) for name in y.columns]
    if getattr(y, "ndim", 1) == 2 and y.shape[1] > 1:
        return [(str(place + 1), as_column(y[:, place], "label")) for place in range(y.shape[1])]
    return [("label", as_column(y, "label"))]


def as_column(values: Any, what: str) -> pd.Series[Any]:
    """Return what names or labels each sample as a column numbered from 0; several columns are an error."""
    plain = values.detach().numpy() if isinstance(values, Tensor) else values
    if isinstance(plain, str) or getattr(plain, "ndim", 1) != 1:
        raise UserError(f"{what} must be one column with an entry for each sample.")
    series = pd.Series(plain if isinstance(plain, (np.ndarray, pd.Series)) else list(plain)).reset_index(drop=True)
    if series.dtype == object and not all(isinstance(value, Hashable) for value in series):
        raise UserError(f"{what} must be one column with an entry for each sample, and has lists in it.")
    return series


def without_gaps(series: pd.Series[Any], what: str) -> pd.Series[Any]:
    """Return the column, in which a missing value is an error."""
    missing = series.isna()
    if missing.any():
        raise UserError(
            f"the {what} is missing in {int(missing.sum()):,} rows, first in row {int(missing.argmax())}: fill it in "
            "or leave the row out."
        )
    return series


def by_distinct(values: pd.Series[Any], change: Callable[[pd.Series[Any]], pd.Series[Any]]) -> pd.Series[Any]:
    """Change a column by changing each of its distinct values once, since names repeat; missing ones stay missing."""
    codes, distinct = pd.factorize(values)
    changed = change(pd.Series(distinct)).reindex(codes)
    changed.index = values.index
    return changed


def distinct_in_order(series: pd.Series[Any]) -> list[Any]:
    """Sort what is distinct: codes such as '2' and '10' as the numbers they are, other names as text."""
    distinct = series.unique().tolist()
    for key in (float, str):
        try:
            return sorted(distinct, key=key)
        except (TypeError, ValueError):
            continue
    return distinct


def require_known(series: pd.Series[Any], index: pd.Series[Any], what: str, known: Sequence[Scalar]) -> None:
    """Refuse names that were not numbered, with the first row that has one."""
    if index.isna().any():
        row = int(index.isna().argmax())
        raise UserError(f"row {row} has the {what} '{series.iloc[row]}', which is not among {list(known)}.")


def class_numbers(series: pd.Series[Any], classes: Sequence[Scalar]) -> pd.Series[Any]:
    """Return the number of each label among the classes, however a file writes it; NaN for one that is none of them.

    A file tells neither 1 from 1.0 nor True from TRUE.
    """
    key = _key(classes)
    numbers = {key(name): number for number, name in enumerate(classes)}
    return by_distinct(series, lambda distinct: distinct.map(lambda value: numbers.get(key(value)))).astype(float)


def _key(classes: Sequence[Scalar]) -> Callable[[Any], Any]:
    """Return what two ways of writing the same class have in common."""
    if all(isinstance(name, (bool, np.bool_)) for name in classes):
        return lambda value: TRUTH.get(str(value).strip().lower(), TRUTH.get(_truth_of_number(value)))
    if all(isinstance(name, (int, float)) for name in classes):
        return _number
    return written


def _truth_of_number(value: Any) -> str:
    return {0.0: "false", 1.0: "true"}.get(_number(value), "") if not isinstance(value, str) else ""


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return float("nan")


def written(value: Any) -> str:
    """Return how a class is written, whatever type a file gives it: 1.0 as 1, and TRUE as true."""
    text = str(whole(value)).strip()
    return text.lower() if isinstance(value, (bool, np.bool_)) or text in ("TRUE", "FALSE", "True", "False") else text


def whole(value: Any) -> Any:
    """Return a whole number as one, anything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def plain(name: Any) -> Scalar:
    """Return a class as what a file can hold."""
    value = name.item() if isinstance(name, np.generic) else name
    if not isinstance(value, (str, int, float, bool)) or value in (float("inf"), float("-inf")):
        raise UserError(f"a class must be text, a number or a truth value, and {name!r} is not.")
    return value


def classes_of(labels: LabelColumns) -> tuple[Scalar, ...]:
    """Return the classes in their order: as given, or sorted, the positive one of two last where it was named."""
    if labels.known_classes is not None:
        found = [plain(name) for name in labels.known_classes]
    elif labels.positive is not None:
        found = _positive_last(labels)
    else:
        found = [plain(name) for name in distinct_in_order(labels.known)]
    if len(found) < 2:
        raise UserError(f"the label has only one class, {found}: there is nothing to learn.")
    if len(set(map(str, found))) < len(found):
        raise UserError(
            f"the label has the classes {found}, one named twice (as text and as a number?): write it one way."
        )
    return tuple(found)


def _positive_last(labels: LabelColumns) -> list[Scalar]:
    found = sorted((plain(name) for name in labels.known.unique().tolist()), key=str)
    wanted = class_numbers(pd.Series([labels.positive], dtype=object), found).tolist()[0]
    if len(found) != 2 or np.isnan(wanted):
        raise UserError(
            f"--positive {labels.positive} must be one of two values of column '{labels.only.name}', which has "
            f"{', '.join(map(str, found[:10]))}{', …' if len(found) > 10 else ''}."
        )
    return sorted(found, key=lambda value: value == found[int(wanted)])


def is_measured(labels: pd.Series[Any]) -> bool:
    """Tell a measured label (regression) from a class; where that is a guess, ask."""
    if not pd.api.types.is_numeric_dtype(labels) or pd.api.types.is_bool_dtype(labels):
        return False
    are_whole = bool((labels == labels.round()).all())
    distinct = labels.nunique()
    if are_whole and pd.api.types.is_integer_dtype(labels) and distinct > MOST_WHOLE_NUMBER_CLASSES:
        raise UserError(
            f"the label has {distinct} distinct whole numbers: say which task it is, "
            "--task regression|classification (task=... in Python)."
        )
    return not are_whole or distinct > MOST_WHOLE_NUMBER_CLASSES


def numbers_of(series: pd.Series[Any]) -> NDArray[np.float64]:
    """Return measured labels, NaN where one is missing or no number."""
    return np.asarray(pd.to_numeric(series, errors="coerce").to_numpy(np.float64, na_value=np.nan))
