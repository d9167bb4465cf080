"""Reads labels from the columns of a table: finds the classes, allows for ways of writing them, checks them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from feddar.errors import RowError, UserError
from feddar.lazy import pandas as pd

Scalar = str | int | float | bool
Asked = Literal["auto", "regression", "classification"]

MOST_WHOLE_NUMBER_CLASSES = 20

VOCABULARIES = ({"true": 1.0, "false": 0.0}, {"yes": 1.0, "no": 0.0, "y": 1.0, "n": 0.0}, {"t": 1.0, "f": 0.0})
"""Words for truth values; all values of a column must be of one set, since beside F and Y an N may be a third value."""
TRUTH = {word: value for words in VOCABULARIES for word, value in words.items()}


@dataclass(frozen=True)
class LabelColumns:
    """One or several columns of labels, and what the user said about them."""

    columns: tuple[pd.Series[Any], ...]
    asked: Asked = "auto"
    known_classes: tuple[Scalar, ...] | None = None
    """The classes in their order, if they are given."""
    positive: str | None = None
    """The positive one of two classes as the user wrote it, if it was given."""

    @classmethod
    def of(
        cls, y: Any, asked: Asked = "auto", classes: Sequence[Scalar] | None = None, positive: str | None = None
    ) -> LabelColumns:
        """Return labels as users give them: one column, or a table of several."""
        known = None if classes is None else tuple(classes)
        return cls(tuple(column.rename(name) for name, column in _columns(y)), asked, known, positive)

    @property
    def only(self) -> pd.Series[Any]:
        """The only column; several are an error."""
        if len(self.columns) > 1:
            raise UserError(f"the label must be one column, and there are {len(self.columns)}.")
        return self.columns[0]

    @property
    def known(self) -> pd.Series[Any]:
        """The only column; missing values are an error."""
        return without_gaps(self.only, "label")


def _columns(y: Any) -> list[tuple[str, pd.Series[Any]]]:
    if isinstance(y, pd.DataFrame):
        if not y.columns.is_unique:
            raise UserError("two columns of labels have the same name: give each its own.")
        return [(str(name), as_column(y[name], "label")) for name in y.columns]
    if getattr(y, "ndim", 1) == 2 and y.shape[1] == 1:
        return _columns(y[:, 0])
    if getattr(y, "ndim", 1) == 2 and y.shape[1] > 1:
        return [(str(place + 1), as_column(y[:, place], "label")) for place in range(y.shape[1])]
    return [("label", as_column(y, "label"))]


def as_column(values: Any, what: str) -> pd.Series[Any]:
    """Return names or labels of samples as a pandas column with the index 0, 1, ...; several columns are an error."""
    plain = values.detach().numpy() if isinstance(values, Tensor) else values
    if isinstance(plain, str) or getattr(plain, "ndim", 1) != 1:
        raise UserError(f"{what} must be one column with an entry for each sample.")
    series = pd.Series(plain if isinstance(plain, (np.ndarray, pd.Series)) else list(plain)).reset_index(drop=True)
    if series.dtype == object and not all(isinstance(value, Hashable) for value in series):
        raise UserError(f"{what} must be one column with an entry for each sample, and has lists in it.")
    return series


def without_gaps(series: pd.Series[Any], what: str) -> pd.Series[Any]:
    """Return the column; a missing value is an error."""
    missing = series.isna()
    if missing.any():
        raise UserError(
            f"the {what} is missing in {int(missing.sum()):,} row{'s' * int(missing.sum() > 1)}, first in row "
            f"{int(missing.argmax())}: fill it in or leave the row out."
        )
    return series


def by_distinct(values: pd.Series[Any], change: Callable[[pd.Series[Any]], pd.Series[Any]]) -> pd.Series[Any]:
    """Apply ``change`` to the distinct values of a column only, since values repeat; missing ones stay missing."""
    codes, distinct = pd.factorize(values)
    changed = change(pd.Series(distinct)).reindex(codes)
    changed.index = values.index
    return changed


def distinct_in_order(series: pd.Series[Any]) -> list[Any]:
    """Return the sorted distinct values: as numbers if all are, such as '2' and '10', else as text."""
    distinct = series.unique().tolist()
    for key in (float, str):
        try:
            return sorted(distinct, key=key)
        except (TypeError, ValueError):
            continue
    return distinct


def require_known(series: pd.Series[Any], index: pd.Series[Any], what: str, known: Sequence[Scalar]) -> None:
    """Raise an error for the first row whose name is not known, that is, whose ``index`` is NaN."""
    if index.isna().any():
        row = int(index.isna().argmax())
        raise RowError(f"the {what} '{series.iloc[row]}' is not among {list(known)}.", row)


def class_numbers(series: pd.Series[Any], classes: Sequence[Scalar]) -> pd.Series[Any]:
    """Return the class index of each label; NaN for one that is none of the classes.

    Files may write a class in several ways: 1 and 1.0 are the same, and so are True and TRUE.
    """
    key = _key(classes)
    numbers = {key(name): number for number, name in enumerate(classes)}
    return by_distinct(series, lambda distinct: distinct.map(lambda value: numbers.get(key(value)))).astype(float)


def _key(classes: Sequence[Scalar]) -> Callable[[Any], Any]:
    """Return a function that maps all ways of writing a class to one value."""
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
    """Return a class as text that does not depend on its type in a file: 1.0 as 1, and TRUE as true."""
    text = str(whole(value)).strip()
    return text.lower() if isinstance(value, (bool, np.bool_)) or text in ("TRUE", "FALSE", "True", "False") else text


def whole(value: Any) -> Any:
    """Return a float that is a whole number as an int, anything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def plain(name: Any) -> Scalar:
    """Return a class as a plain Python value, which a file can hold."""
    value = name.item() if isinstance(name, np.generic) else name
    if not isinstance(value, (str, int, float, bool)) or value in (float("inf"), float("-inf")):
        raise UserError(f"a class must be text, a number or a truth value, and {name!r} is not.")
    return value


def classes_of(labels: LabelColumns) -> tuple[Scalar, ...]:
    """Return the classes in their order: as given, or sorted; a positive class that was named is last."""
    if labels.known_classes is not None:
        found = [plain(name) for name in labels.known_classes]
    elif labels.positive is not None:
        found = _positive_last(labels)
    else:
        found = [plain(name) for name in distinct_in_order(labels.known)]
    if len(found) < 2:
        raise UserError(f"the label has only one class, {found}: there is nothing to learn.")
    words = {str(name).strip().lower() for name in found}
    if labels.known_classes is None and len(found) > 2 and words <= {*TRUTH, "0", "1"} and not words <= {*"tfyn"}:
        raise UserError(f"the label has truth values in several ways, {', '.join(map(str, found))}: write them in one.")
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
    """Return whether labels are measured numbers (regression) and not classes; if that is unclear, it is an error."""
    if not pd.api.types.is_numeric_dtype(labels) or pd.api.types.is_bool_dtype(labels):
        _require_classes(labels)
        return False
    are_whole = bool((labels == labels.round()).all())
    distinct = labels.nunique()
    if are_whole and pd.api.types.is_integer_dtype(labels) and distinct > MOST_WHOLE_NUMBER_CLASSES:
        raise UserError(
            f"the label has {distinct} distinct whole numbers: say which task it is, "
            "--task regression|classification (task=... in Python)."
        )
    return not are_whole or distinct > MOST_WHOLE_NUMBER_CLASSES


def _require_classes(labels: pd.Series[Any]) -> None:
    """Refuse labels of many different texts that are probably no classes: numbers with a text among them, or names."""
    if not (pd.api.types.is_object_dtype(labels) or pd.api.types.is_string_dtype(labels)):
        return
    texts = labels.astype(str).str.strip()
    distinct = pd.Series(texts.unique())
    if len(distinct) <= MOST_WHOLE_NUMBER_CLASSES:
        return
    read = pd.to_numeric(distinct, errors="coerce").notna()
    meant = read | distinct.str.fullmatch(r"[-+]?\d[\d.,' ]*%?")
    classes = "say that they are classes, --task classification (task=... in Python)"
    if not read.all() and 2 * int(meant.sum()) > len(distinct):
        other = distinct[~read].iloc[0]
        raise RowError(
            f"the label is '{other}', which is no number: write numbers as 1234.5, leave out rows without one, or "
            f"{classes}.",
            int((texts == other).to_numpy().argmax()),
        )
    if 2 * len(distinct) > len(labels):
        raise UserError(
            f"the label has {len(distinct)} distinct texts in {len(labels)} rows: name another, or {classes}."
        )


def numbers_of(series: pd.Series[Any]) -> NDArray[np.float64]:
    """Return labels as floats, NaN where one is missing or not a number."""
    return np.asarray(pd.to_numeric(series, errors="coerce").to_numpy(np.float64, na_value=np.nan))
