"""What an analyst would ask about a table before training on it: codes, marks of missing values, leaks and paths.

Nothing is changed; each suspicion is a note that says which option answers it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from feddar.data.columns import MOST_LEVELS, Column, Table
from feddar.data.images import SUFFIXES as IMAGES
from feddar.data.name_lists import option_for
from feddar.data.spellings import spellings_in
from feddar.objectives.labels import TRUTH

_ROWS = 100_000
"""The number of rows that are looked at."""
_CODES = range(3, 21)
"""So many different whole numbers may be codes."""
_CODE_NAME = re.compile(r".*([_ ]id|code|type)", re.IGNORECASE)
_RECORD_NAME = re.compile(r".*((?<!pa)(?<!ac)(?<!u)id|[_ ](no|nr|number|key))", re.IGNORECASE)
_PERSON_NAME = re.compile(
    r"(.*[_ .-])?(pat(ient)?|person|subject|participant|proband|mrn|pid)"
    r"([_ .-]?(no|nr|num|number|key|code|hash)|.*id)?|id",
    re.IGNORECASE,
)
_FEWEST_PEOPLE = 20
"""So many different entries, some of them repeated, may be patients if the column has such a name."""
_FEWEST_RECORDS = 50
"""In so many rows, whole numbers that are all different are probably identifiers."""
_MARK = re.compile(
    r"\?+|-+|\.+|unk|unknown|unspecified|not (known|stated|recorded|available|applicable|done)|missing|sysmis"
    r"|n\.?\s?/?a\.?|\\n|#(n/a|div/0!|value!|ref!|num!)|9999-(99-99|12-31)|0000-00-00|1900-01-01",
    re.IGNORECASE,
)
_DATE = r"\d{4}-\d{2}-\d{2}.*"
_HIGH_MARKS = (7, 8, 9, 77, 88, 97, 98, 99, 777, 888, 997, 998, 999, 7777, 8888, 9997, 9998, 9999)
_LOW_MARKS = (-1, -7, -8, -9, -77, -88, -99, -999, -9999)
_FAR = 3
"""A mark above the values is larger than the largest of them by this factor."""
LEAK = 0.95
"""A column that alone takes away so much of the errors that are made without it probably tells the outcome."""
HALF = 0.5
"""Few columns that are known beforehand alone take away so much of the errors."""
LEAK_OF_DATE = 0.8
"""Of a date that only some rows have, so many of them with one outcome make it likely that it came afterwards."""
_FEWER = 4
"""Rows with a value in a column that is written down afterwards have the other outcomes so many times less often."""
_BINS, _FEWEST = 20, 10


def notes_on(
    table: Table, columns: Sequence[Column], labels: pd.DataFrame, domains: pd.DataFrame,
    padded: Collection[str] = (), said: Collection[str] = (),
) -> Iterator[str]:  # fmt: skip
    """Yield a sentence for each thing in the columns to learn from that the user should look at.

    ``padded`` are columns of whole numbers that are written with zeros before them, as only codes are; of others it was
    ``said`` that they are numbers.
    """
    looked = {column.name: table[column.name][:_ROWS] for column in columns if column.kind != "image"}
    kinds = {column.name: column.kind for column in columns}
    marks = {name: marks_in(values) for name, values in looked.items()}
    known = {name: _without(values, marks[name]) for name, values in looked.items()}
    numbers = {name: whole for name, kind in kinds.items() if kind == "number" and len(whole := _whole(known[name]))}
    records = [name for name, values in numbers.items() if _are_records(name, values, len(looked[name]))]
    for name in records:
        yield (
            f"column '{name}' has {numbers[name].nunique():,} different whole numbers in {len(looked[name]):,} rows: "
            f"if it is an identifier, add {option_for('--ignore', [name])}."
        )
    people = [name for name, values in known.items() if name not in records and _are_people(name, values, kinds[name])]
    for name in people:
        several = int((known[name].value_counts() > 1).sum())
        yield (
            f"column '{name}' may name patients, {several:,} of whom have several rows: if so, add "
            f"{option_for('--group', [name])}, which keeps the rows of each in one part and does not learn from them."
        )
    dates = [name for name in numbers if _are_compact_dates(numbers[name])]
    if dates:
        yield (
            f"{_columns(dates)} {_verb(dates, 'holds', 'hold')} numbers that may be dates "
            f"({numbers[dates[0]].iloc[0]:.0f}): if they are, write them with hyphens, as 2020-12-31."
        )
    known_kinds = {*records, *people, *dates, *said}
    codes = [name for name in numbers if name not in known_kinds and _are_codes(name, numbers[name], name in padded)]
    if codes:
        yield (
            f"{_columns(codes)} {_verb(codes, 'holds', 'hold')} whole numbers that may be codes: if they are no "
            f"amounts, add {option_for('--categories', codes)}."
        )
    yield from _noted_marks(looked, marks)
    yield from _noted_spellings({name: values for name, values in looked.items() if kinds[name] == "category"})
    for name, values in looked.items():
        if kinds[name] == "category" and are_paths(values):
            image, ignore = (option_for(flag, [name]) for flag in ("--image", "--ignore"))
            yield f"column '{name}' holds paths of images: {image} reads them, {ignore} leaves them out."
    for domain in domains:
        found = _marks_among_names(domains[domain])
        if found:
            yield (
                f"the domain '{domain}' has names that look like marks of a missing one ({', '.join(found)}): they are "
                "groups as any other; if that is not meant, take their rows out of the table."
            )
    for target in labels:
        classes = labels[target][:_ROWS]
        found = [] if _is_amount(classes) else marks_in(classes)
        if found:
            yield (
                f"the target '{target}' has values that look like marks of a missing one: if they are, add --missing "
                f"'{','.join(found)}' --incomplete drop."
            )
        yield from _noted_leaks(looked, known, classes)


def _columns(names: Sequence[str]) -> str:
    quoted = ", ".join(f"'{name}'" for name in names)
    return f"column {quoted}" if len(names) == 1 else f"columns {quoted}"


def _verb(names: Sequence[str], one: str, several: str) -> str:
    return one if len(names) == 1 else several


def _whole(values: pd.Series[Any]) -> pd.Series[Any]:
    """Return the values of a column that are there, if all are whole numbers that fit into 64 bits; else nothing."""
    numbers = pd.to_numeric(values, errors="coerce").dropna()
    whole = (numbers == numbers.round()) & (numbers.abs() < 2.0**63)
    return numbers if bool(whole.all()) else numbers[:0]


def _are_records(name: str, numbers: pd.Series[Any], rows: int) -> bool:
    """Return whether whole numbers may be identifiers: one for each row, or for few rows and with such a name."""
    if rows < _FEWEST_RECORDS:
        return False
    different = numbers.nunique()
    return different == rows or (different > rows / 2 and bool(_RECORD_NAME.fullmatch(name)))


def _are_people(name: str, values: pd.Series[Any], kind: str) -> bool:
    """Return whether a column may name patients of whom some have several rows: by its name, and with many entries."""
    if not _PERSON_NAME.fullmatch(name) or (kind == "number" and not len(_whole(values))):
        return False
    return kind in ("number", "category") and _FEWEST_PEOPLE <= values.nunique() < values.count()


def _are_codes(name: str, numbers: pd.Series[Any], padded: bool) -> bool:
    """Return whether whole numbers may be codes: few, with zeros before them or such a name, or many left out."""
    different = numbers.nunique()
    if different > MOST_LEVELS:
        return False
    few = different in _CODES and len(numbers) > 5 * different
    return few or padded or bool(_CODE_NAME.fullmatch(name)) or _skips_most(numbers)


def _skips_most(numbers: pd.Series[Any]) -> bool:
    """Return whether whole numbers leave out most of those between them, though there are rows enough for all.

    Amounts do that only at their ends, so the middle is looked at. Amounts may be multiples, of 10 for example.

    >>> codes = pd.Series([10, 30, 110, 340, 345, 560, 995] * 500)
    >>> _skips_most(codes), _skips_most(pd.Series(range(10, 1000, 10)).repeat(30)), _skips_most(codes[:20])
    (True, False, False)
    """
    low, high = numbers.quantile([0.05, 0.95])
    middle = numbers[numbers.between(low, high)].to_numpy(np.int64)
    different = np.unique(middle)
    if len(different) < 2:
        return False
    between = (different[-1] - different[0]) // np.gcd.reduce(np.diff(different)) + 1
    return bool(len(middle) > 2 * between and len(different) < between / 2)


def _noted_marks(looked: Mapping[str, pd.Series[Any]], marks: Mapping[str, list[str]]) -> Iterator[str]:
    found = [name for name, each in marks.items() if each]
    every = sorted({mark for each in marks.values() for mark in each}, key=lambda mark: (len(mark), mark))
    if not every:
        return
    also = [name for name, values in looked.items() if name not in found and _has_one_of(values, every)]
    warning = f" (which takes them as missing in {_columns(also)} too)" if also else ""
    yield (
        f"{_columns(found)} {_verb(found, 'has', 'have')} values that look like marks of a missing one: if they are, "
        f"add --missing '{','.join(every)}'{warning}."
    )


def _noted_spellings(categories: Mapping[str, pd.Series[Any]]) -> Iterator[str]:
    """Yield a sentence for each category with levels that are probably one."""
    for name, values in categories.items():
        texts = values.dropna().astype(str).str.strip()
        words = {*texts.str.lower().unique()}
        if words <= {*TRUTH, "0", "1"}:
            yield f"column '{name}' has truth values in several ways ({', '.join(sorted(words))}): write them in one."
            continue
        several = [", ".join(map(repr, each)) for each in spellings_in(texts)]
        if several:
            yield (
                f"column '{name}' has levels that differ only in letter case, blanks or hyphens "
                f"({'; '.join(several[:5])}): if they are one, write them in one way."
            )


def _are_compact_dates(numbers: pd.Series[Any]) -> bool:
    """Return whether whole numbers are dates without hyphens, of 1900 to 2100; a few amounts may look like one.

    >>> days = pd.Series(range(20200101, 20200199))
    >>> _are_compact_dates(days[:31]), _are_compact_dates(days)
    (True, False)
    """
    if numbers.nunique() < _FEWEST or not numbers.between(19000101, 21001231).all():
        return False
    texts = pd.Series(numbers.unique()).astype(np.int64).astype(str)
    return bool(pd.to_datetime(texts, format="%Y%m%d", errors="coerce").notna().all())


def _marks_among_names(names: pd.Series[Any]) -> list[str]:
    numbers = pd.to_numeric(names.dropna().astype(str), errors="coerce")
    return marks_in(names if numbers.isna().any() else numbers)


def _has_one_of(values: pd.Series[Any], marks: Sequence[str]) -> bool:
    return len(_without(values, marks).dropna()) < len(values.dropna())


def _without(values: pd.Series[Any], marks: Sequence[str]) -> pd.Series[Any]:
    """Return a column with nothing in place of marks."""
    if pd.api.types.is_bool_dtype(values) or pd.api.types.is_datetime64_any_dtype(values) or not marks:
        return values
    if pd.api.types.is_numeric_dtype(values):
        return values.mask(values.isin(pd.to_numeric(pd.Series(marks), errors="coerce").dropna()))
    return values.mask(values.astype(str).str.strip().isin(marks))


def marks_in(values: pd.Series[Any]) -> list[str]:
    """Return the values of a column that look as if they stood for a missing one.

    >>> marks_in(pd.Series([1, 2, 2, 1, 98, 99])), marks_in(pd.Series([96, 97, 98, 99, 3]))
    (['98', '99'], [])
    >>> marks_in(pd.Series(['99', 'Cuba', 'Peru'])), marks_in(pd.Series([1, 3, 7, 8, 99]))
    (['99'], ['99'])
    """
    present = values.dropna()
    if pd.api.types.is_bool_dtype(values) or pd.api.types.is_datetime64_any_dtype(values):
        return []
    if not pd.api.types.is_numeric_dtype(values):
        texts = present.astype(str).str.strip().drop_duplicates()
        numbers = {str(mark) for mark in _HIGH_MARKS + _LOW_MARKS} & {*texts}
        others = numbers if len(texts) > 2 * len(numbers) and not _numerals(texts) - numbers else set()
        return sorted({text for text in texts if _MARK.fullmatch(text)} | others)
    different = np.unique(present.to_numpy(float))
    above = _far_above(different)
    rest = np.setdiff1d(different, above)
    low = rest[np.isin(rest, _LOW_MARKS)]
    rest = np.setdiff1d(rest, low)
    if len(rest) < 2:
        return []
    below = low if rest.min() >= 0 else low[:0]
    return [f"{mark:g}" for mark in (*below, *above)]


def _far_above(different: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the largest of some numbers in order, if all are marks and far above the others; as many as can be."""
    for place in range(1, len(different)):
        above = different[place:]
        if np.isin(above, _HIGH_MARKS).all() and different[place - 1] * _FAR < above[0]:
            return above
    return different[:0]


def _numerals(texts: pd.Series[Any]) -> set[str]:
    return {*texts[pd.to_numeric(texts, errors="coerce").notna()]}


def are_paths(values: pd.Series[Any]) -> bool:
    """Return whether all values of a column are names of image files."""
    texts = values.dropna().astype(str).str.lower()
    return len(texts) > 0 and bool(texts.str.endswith(IMAGES).all())


def _noted_leaks(
    looked: Mapping[str, pd.Series[Any]], known: Mapping[str, pd.Series[Any]], labels: pd.Series[Any]
) -> Iterator[str]:
    """Yield a sentence on columns that tell the outcome, and one for each that is filled in for one outcome."""
    taken = {name: explained(values, labels) for name, values in looked.items()}
    leaks = [name for name, part in taken.items() if part >= LEAK]
    strong = [name for name, part in taken.items() if HALF <= part < LEAK]
    if leaks:
        yield (
            f"{_columns(leaks)} alone {_verb(leaks, 'tells', 'tell')} '{labels.name}' almost without error: if that is "
            f"not known beforehand, add {option_for('--ignore', leaks)}."
        )
    if strong:
        yield (
            f"{_columns(strong)} alone {_verb(strong, 'saves', 'each save')} more than half of the errors in "
            f"'{labels.name}': if that is not known beforehand, add {option_for('--ignore', strong)}."
        )
    for name, values in known.items():
        label, share, elsewhere = filled_for(values, labels)
        enough = LEAK_OF_DATE if _are_dates(values) else LEAK
        expected = (1 - elsewhere) * int(values.notna().sum())
        if taken[name] < HALF and share >= enough and 1 - share <= (1 - elsewhere) / _FEWER and expected >= _FEWEST:
            yield (
                f"column '{name}' is filled in for {int(values.notna().sum()):,} rows, and '{labels.name}' is {label} "
                f"in {share:.0%} of them and {elsewhere:.0%} of the others: if it is written down afterwards, add "
                f"{option_for('--ignore', [name])}."
            )


def _are_dates(values: pd.Series[Any]) -> bool:
    present = values.dropna()
    return pd.api.types.is_datetime64_any_dtype(values) or bool(present.astype(str).str.fullmatch(_DATE).all())


def filled_for(values: pd.Series[Any], labels: pd.Series[Any]) -> tuple[str, float, float]:
    """Return the class that most rows with a value in a column have, its share of them, and of rows without one.

    >>> died = pd.Series(["2020-05-01"] * 10 + [None] * 30)
    >>> filled_for(died, pd.Series(["dead"] * 12 + ["alive"] * 28))
    ('dead', 1.0, 0.06666666666666667)
    """
    filled = values.notna().to_numpy()
    if min(filled.sum(), (~filled).sum()) < _FEWEST or _is_amount(labels):
        return "", 0.0, 0.0
    texts = labels.astype(str).to_numpy()
    label = str(pd.Series(texts[filled]).mode()[0])
    return label, float((texts[filled] == label).mean()), float((texts[~filled] == label).mean())


def _is_amount(labels: pd.Series[Any]) -> bool:
    return pd.api.types.is_float_dtype(labels) or (pd.api.types.is_numeric_dtype(labels) and labels.nunique() > 20)


def explained(values: pd.Series[Any], labels: pd.Series[Any]) -> float:
    """Return the part of the errors without a column that are not made with it alone, from 0 to 1.

    Errors are those of the most frequent class, or squares around the mean, by level or by bins of the column's values.
    """
    cells = _cells(values)
    if _is_amount(labels):
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
        bins = min(_BINS, max(2, len(numeric) // _FEWEST))
        cells = pd.qcut(numeric, bins, labels=False, duplicates="drop")
    else:
        cells = pd.Series(pd.factorize(values.astype(str).where(values.notna()))[0], index=values.index)
        cells = cells.where(cells.map(cells.value_counts()) >= _FEWEST, -2)
    return pd.Series(cells).fillna(-1).astype(int).reset_index(drop=True)
