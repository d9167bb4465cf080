"""The columns of a table: the kind of each, and how its values become the inputs of an encoder.

Numbers, truth values (0 or 1) and dates (days since 1970) become numbers, with NaN where a value is missing;
categories become the number of their level, 0 where a value is missing; paths become images. Nothing is filled in or
scaled here: the encoder does that (``models.encoders.tabular``), with statistics that are sums over clients and are
stored with it.

>>> import pandas as pd
>>> table = pd.DataFrame({"age": [61, None], "smoker": ["yes", "no"], "ward": ["A", "B"]})
>>> columns = [infer(name, table[name]) for name in table]
>>> [(column.name, column.kind) for column in columns]
[('age', 'number'), ('smoker', 'boolean'), ('ward', 'category')]
>>> _, numbers, levels = inputs(table, columns)
>>> numbers.tolist(), levels.tolist()
([[61.0, 1.0], [nan, 0.0]], [[1], [2]])
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from feddar.data.image_cache import images_for, require_room
from feddar.data.images import UnreadableImagesError
from feddar.errors import RowError, UserError
from feddar.lazy import pandas as pd
from feddar.methods import nearest, there_are
from feddar.objectives.labels import TRUTH, VOCABULARIES, by_distinct

Kind = Literal["number", "boolean", "date", "category", "image"]
UnknownLevel = Literal["error", "missing"]
"""What to do with a level of a category that did not occur in training: refuse it, or take it as missing."""

FEWEST_NUMBERS = 20
"""A column with so many distinct numbers and few other texts is meant to be numeric, however frequent these are."""
LOCAL_NOTATIONS = (
    (
        r"[+-]?\d+([.,]\d{3})*,\d+(\.\d+)?|[+-]?\d{1,3}([ '\u2019\u00a0\u202f]\d{3})+([.,]\d+)?",
        "write decimals with a point and nothing between thousands",
    ),
    (
        r"(\d{1,2}[./-]\d{1,2}[./-]\d{4}|\d{4}[./]\d{1,2}[./]\d{1,2}|\d\d[./]\d\d[./]\d\d)(\s.*)?"
        r"|\d{1,2}[ .-]+[A-Za-z]{3,9}[ .,-]+\d{2,4}(\s.*)?",
        "write dates as 2020-12-31",
    ),
    (r"[+-]?\d+(\.\d+)?\s*%", "write percentages as numbers without the sign"),
    (r"[+-]?[$€£¥]\s*\d[\d.,]*|[+-]?\d[\d.,]*\s*[$€£¥]", "write amounts of money as numbers without the sign"),
)
"""Local notations of numbers and dates, which are refused, since guessing their meaning would be unsafe."""
_TIME = r"\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?"
_WITH_UNIT = r"^[-+]?\d+(?:[.,]\d+)?\s*([^\d\s.,:/-][^\d\s]{0,10})$"
MOST_MARKS = 3
"""So many different texts among numbers may stand for a missing value."""
MOST_LEVELS = 1000
DAY = np.timedelta64(1, "D")
EPOCH = np.datetime64("1970-01-01")


@dataclass(frozen=True)
class Column:
    """A column that a model learns from."""

    name: str
    kind: Kind
    levels: tuple[str, ...] = ()
    """The levels of a category in their order; the first has number 1 (0 is a missing value)."""
    gaps: bool = False
    """Whether values may be missing."""
    size: int = 0
    """For images: the width and height to which they are resized."""
    optional: bool = False
    """Whether a table may lack the column, which is then missing in all of its rows."""

    @property
    def is_numeric(self) -> bool:
        """Whether the encoder gets its values as numbers: true for numbers, truth values and dates."""
        return self.kind not in ("category", "image")


class Table(Protocol):
    """The interface of a table: a data frame, or files that are read column by column (``TableFiles``)."""

    def __getitem__(self, name: str, /) -> pd.Series[Any]: ...
    def __len__(self) -> int: ...
    @property
    def columns(self) -> Any: ...  # noqa: D102


class UnusableColumnError(UserError):
    """A column that cannot be a feature as it is; ``row`` is the first row that shows it, if it is in certain rows.

    ``texts`` are those that keep it from being numbers or dates, if there are few: they may stand for a missing value.
    A column of many different texts ``may_name`` patients.
    """

    def __init__(
        self, reason: str, row: int | None = None, remedy: str = "mend it", texts: tuple[str, ...] = (), *,
        may_name: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(reason)
        self.row, self.remedy, self.texts, self.may_name = row, remedy, texts, may_name


def values_of(table: Table, column: Column) -> pd.Series[Any]:
    """Return the values of a column; all are missing if the table lacks one that is optional."""
    if column.optional and column.name not in table.columns:
        return pd.Series(np.nan, index=range(len(table)), name=column.name, dtype=object)
    return table[column.name]


def infer(name: str, values: pd.Series[Any], kind: Kind | None = None) -> Column:
    """Infer the kind of a column from its values, or take the ``kind`` that was said.

    ``UnusableColumnError`` if it is none.
    """
    present = values.dropna()
    gaps = len(present) < len(values)
    if present.empty:
        raise UnusableColumnError("has no values")
    if kind == "category" or (kind is None and isinstance(values.dtype, pd.CategoricalDtype)):
        return _category(name, present, gaps)
    if kind == "number":
        return _number(name, present, gaps)
    if pd.api.types.is_bool_dtype(values):
        return Column(name, "boolean", gaps=gaps)
    if pd.api.types.is_numeric_dtype(values):
        _require_finite(values)
        return Column(name, "number", gaps=gaps)
    lasting = pd.api.types.is_timedelta64_dtype(values)
    if lasting or pd.api.types.is_datetime64_any_dtype(values):
        return Column(name, "number" if lasting else "date", gaps=gaps)
    if nested(present).any():
        raise UnusableColumnError("holds lists or records")
    return _infer_from_text(name, present.astype(str), gaps)


def _category(name: str, present: pd.Series[Any], gaps: bool) -> Column:
    """Return a column that is a category, whatever its values look like."""
    levels = tuple(sorted(_stripped(present.drop_duplicates().map(str)).unique()))
    if len(levels) > MOST_LEVELS:
        raise UnusableColumnError(f"has {len(levels):,} distinct values, and a category has at most {MOST_LEVELS:,}")
    return Column(name, "category", levels, gaps)


def _number(name: str, present: pd.Series[Any], gaps: bool) -> Column:
    """Return a column that is a number, though few of its values may be different."""
    unread = pd.to_numeric(present, errors="coerce").isna().to_numpy()
    if unread.any():
        place = int(unread.argmax())
        others = tuple(sorted(_stripped(present[unread].drop_duplicates().map(str)).unique()))
        raise UnusableColumnError(
            f"holds {str(present.iloc[place])!r}, which is no number", int(present.index[place]),
            texts=others if len(others) <= MOST_MARKS else (),
        )  # fmt: skip
    return Column(name, "number", gaps=gaps)


def _infer_from_text(name: str, present: pd.Series[Any], gaps: bool) -> Column:
    # Texts repeat, so it is much faster to look at the distinct ones only.
    counts = present.value_counts(sort=False)
    text = _stripped(counts.index.to_series()).reset_index(drop=True)
    if any(set(text.str.lower()) <= set(words) for words in VOCABULARIES):
        return Column(name, "boolean", gaps=gaps)

    def rows(those: NDArray[np.bool_]) -> int:
        return int(counts.to_numpy()[those].sum())

    def refused(those: NDArray[np.bool_], suffix: str = "", **more: Any) -> UnusableColumnError:
        first = present.isin(counts.index[those])
        row = int(first.index[int(first.to_numpy().argmax())])
        return UnusableColumnError(f"holds {str(present.loc[row])!r}{suffix}", row, **more)

    def refused_among(plural: str, read: NDArray[np.bool_], **more: Any) -> UnusableColumnError:
        others = tuple(sorted(text[~read].unique()))
        return refused(~read, f" among {plural}", texts=others if len(others) <= MOST_MARKS else (), **more)

    number, date = _numerals(text).notna().to_numpy(), _dates(text).notna().to_numpy()
    for notation, remedy in LOCAL_NOTATIONS:
        local = text.str.fullmatch(notation).to_numpy(bool)
        if local.any() and rows(local | number | date) >= 0.5 * len(present):
            raise refused(local, remedy=remedy)
    readings: tuple[tuple[Kind, str, NDArray[np.bool_]], ...] = (("number", "numbers", number), ("date", "dates", date))
    for kind, plural, read in readings:
        if read.all():
            return Column(name, kind, gaps=gaps)
        # More texts than numbers: a category in which a number, such as 99, stands for a missing value.
        if rows(read) > 0.5 * len(present) and text[read].nunique() >= text[~read].nunique():
            raise refused_among(plural, read)
    if text[number].nunique() >= FEWEST_NUMBERS and text[~number].nunique() <= 2:
        raise refused_among("numbers", number, remedy="leave it empty where a value is missing")
    levels = tuple(sorted(text.unique()))
    if len(levels) > max(20, min(MOST_LEVELS, len(present) // 4)):
        _require_no_measures(text)
        raise UnusableColumnError(
            f"has {len(levels):,} distinct texts in {len(present):,} rows, so it is no category", may_name=True
        )
    return Column(name, "category", levels, gaps)


def _require_no_measures(texts: pd.Series[Any]) -> None:
    """Refuse many different texts that are times of day or numbers with a unit, and say how to write them."""
    if texts.str.fullmatch(_TIME).all():
        raise UnusableColumnError(f"holds times of day such as '{texts[0]}' (hours, such as 13.25, would be numbers)")
    units = texts.str.extract(_WITH_UNIT)[0]
    if units.notna().all() and units.nunique() == 1:
        raise UnusableColumnError(f"holds texts such as '{texts[0]}' (without '{units[0]}' they would be numbers)")


def nested(values: pd.Series[Any]) -> NDArray[np.bool_]:
    """Return a mask of the rows that hold lists or records instead of single values."""
    if values.dtype != object:
        return np.zeros(len(values), bool)
    return np.fromiter(map(pd.api.types.is_list_like, values), bool, len(values))


def infer_all(table: pd.DataFrame) -> tuple[Column, ...]:
    """Infer the kinds of all columns of a table; one that cannot be a feature is an error that names it."""
    found = []
    for name in table.columns:
        try:
            found.append(infer(str(name), table[name].reset_index(drop=True)))
        except UnusableColumnError as problem:
            where = "" if problem.row is None else f" in row {problem.row}"
            raise UserError(f"column '{name}' {problem}{where}: {problem.remedy}, or leave it out.") from None
    return tuple(found)


def inputs(
    table: Table,
    columns: Sequence[Column],
    dtype: DTypeLike = np.float64,
    *,
    to_learn: bool = True,
    unknown: UnknownLevel = "error",
    image_cache: Path | None = None,
) -> tuple[Tensor | None, NDArray[np.floating], NDArray[np.int16]]:
    """Return images (if a column has their paths, else None), numbers [n, p] and level numbers of categories [n, c].

    A missing number is NaN and a missing category 0; an optional column that the table lacks is missing everywhere.
    With ``to_learn``, a column whose values are all equal after rounding to ``dtype`` is refused. With
    ``image_cache``, a folder, images are kept in a file there.
    """
    needed = [column.name for column in columns if not column.optional]
    require_columns("x", needed, list(map(str, table.columns)), "which the model needs")
    measured, named = [c for c in columns if c.is_numeric], [c for c in columns if c.kind == "category"]
    numbers = np.empty((len(table), len(measured)), dtype)
    codes = np.empty((len(table), len(named)), np.int16)
    for place, column in enumerate(measured):
        exact = _numbers(values_of(table, column), column)
        with np.errstate(over="ignore"):
            numbers[:, place] = exact
        too_large = np.isinf(numbers[:, place])
        if too_large.any():
            row = int(too_large.argmax())
            raise RowError(
                f"column '{column.name}' holds {exact[row]:g}, too large for {numbers.dtype}: mend it, or leave it "
                "empty if it is not known.",
                row,
            )
        if to_learn:
            require_distinguishable(f"column '{column.name}'", exact, numbers[:, place])
    for place, column in enumerate(named):
        codes[:, place] = _codes(values_of(table, column), column, unknown)
    if to_learn and image_cache is None:
        for column in columns:
            require_room(len(table) * (column.kind == "image"), column.size)
    images = [_images(table[column.name], column, image_cache) for column in columns if column.kind == "image"]
    return (images[0] if images else None), numbers, codes


def require_columns(
    where: str, names: Sequence[str], header: Sequence[str], what: str, hint: Callable[[str], str] | None = None
) -> None:
    """Refuse a table that lacks columns, and name all of them; ``what`` says who needs them."""
    absent = [name for name in names if name not in header]
    if len(absent) == 1:
        helped = hint(absent[0]) if hint else nearest(absent[0], list(header))
        raise UserError(f"{where} has no column '{absent[0]}', {what}: {helped}")
    if absent:
        listed = ", ".join(f"'{name}'" for name in absent)
        raise UserError(f"{where} has no columns {listed}, {what}; {there_are(header)}")


def require_distinguishable(name: str, exact: NDArray[Any], rounded: NDArray[Any]) -> None:
    """Refuse a column whose exact values differ but are all equal when rounded to the encoder's precision."""
    if exact.dtype == rounded.dtype:
        return
    present = ~np.isnan(exact)
    if present.any() and np.ptp(exact[present]) > 0 and np.ptp(rounded[present]) == 0:
        raise UserError(f"{name} varies less than {rounded.dtype} can tell: subtract a constant from it.")


def _images(values: pd.Series[Any], column: Column, cache: Path | None) -> Tensor:
    missing = values.isna().to_numpy()
    if missing.any():
        more = f", nor in {int(missing.sum()) - 1:,} more" if missing.sum() > 1 else ""
        raise RowError(
            f"column '{column.name}' names no image{more}: fill it in or leave the row out.", int(missing.argmax())
        )
    try:
        return images_for([Path(str(path)) for path in values], column.size, cache)
    except UnreadableImagesError as problem:
        first = problem.images[0].row
        if len(problem.images) < len(values):
            raise RowError(str(problem), first) from None
        asked = f" (does column '{column.name}' hold paths of images?)"
        raise RowError(str(UnreadableImagesError(problem.images, asked)), first) from None


def unseen_values(table: Table, columns: Sequence[Column]) -> Iterator[tuple[int, str]]:
    """Yield each row with a level or gap that did not occur in training, and a note on how it is handled.

    >>> list(unseen_values(pd.DataFrame({"ward": ["A", "C", None]}), [Column("ward", "category", ("A", "B"))]))
    [(1, "ward 'C' unknown: as missing"), (2, 'ward missing, never so in training')]
    """
    for column in columns:
        values = values_of(table, column)
        missing = values.isna().to_numpy()
        if column.kind == "category":
            for row in np.flatnonzero(~missing & (_codes(values, column, "missing") == 0)):
                yield int(row), f"{column.name} '{str(values.iloc[row]).strip()}' unknown: as missing"
        if not column.gaps:
            for row in np.flatnonzero(missing):
                yield int(row), f"{column.name} missing, never so in training"


def _numbers(values: pd.Series[Any], column: Column) -> NDArray[np.float64]:
    _require_single(values, column)
    if column.kind == "date":
        dates = values if pd.api.types.is_datetime64_any_dtype(values) else by_distinct(values, _dates)
        _require_read(values, dates.notna().to_numpy(), column)
        plain = dates.dt.tz_convert(None) if getattr(dates.dt, "tz", None) is not None else dates
        return ((plain.to_numpy("datetime64[us]") - EPOCH) / DAY).astype(np.float64)
    if pd.api.types.is_timedelta64_dtype(values):
        return np.asarray(values.to_numpy("timedelta64[us]") / DAY, np.float64)
    if pd.api.types.is_bool_dtype(values) or pd.api.types.is_numeric_dtype(values):
        numbers = np.asarray(values.to_numpy(np.float64, na_value=np.nan), np.float64)
        readable = np.isin(numbers, (0, 1)) if column.kind == "boolean" else np.isfinite(numbers)
        _require_read(values, readable, column)
        return numbers
    read = by_distinct(values, _truths if column.kind == "boolean" else _numerals)
    _require_read(values, np.isfinite(read.to_numpy(np.float64, na_value=np.nan)), column)
    return np.asarray(read.to_numpy(np.float64, na_value=np.nan), np.float64)


def _codes(values: pd.Series[Any], column: Column, unknown: UnknownLevel) -> NDArray[np.int16]:
    _require_single(values, column)
    number = {level: number for number, level in enumerate(column.levels, start=1)}
    found = by_distinct(values, lambda distinct: _stripped(distinct).map(number))
    if unknown == "error":
        _require_read(values, found.notna().to_numpy(), column)
    return np.asarray(found.astype(np.float64).fillna(0).to_numpy(np.int16), np.int16)


def _stripped(values: pd.Series[Any]) -> pd.Series[Any]:
    return values.astype("string").str.strip()


def _truths(values: pd.Series[Any]) -> pd.Series[Any]:
    return _stripped(values).str.lower().map(TRUTH)


def _numerals(values: pd.Series[Any]) -> pd.Series[Any]:
    return pd.to_numeric(_stripped(values), errors="coerce")


def _dates(values: pd.Series[Any]) -> pd.Series[Any]:
    """Read ISO dates and times, which begin with year, month and day; anything else is missing."""
    text = _stripped(values)
    shaped = text.where(text.str.match(r"\d{4}-\d{2}-\d{2}"))
    return pd.to_datetime(shaped, format="ISO8601", errors="coerce", utc=True).dt.tz_localize(None)


def _require_read(values: pd.Series[Any], readable: NDArray[np.bool_], column: Column) -> None:
    wrong = values.notna().to_numpy() & ~readable
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


def _require_single(values: pd.Series[Any], column: Column) -> None:
    several = nested(values)
    if several.any():
        raise RowError(f"column '{column.name}' holds a list or record: write a single value.", int(several.argmax()))


def _require_finite(values: pd.Series[Any]) -> None:
    infinite = np.isinf(values.to_numpy(np.float64, na_value=np.nan))
    if infinite.any():
        raise UnusableColumnError("is infinite", int(infinite.argmax()))
