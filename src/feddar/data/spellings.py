"""Names of clients, domains and classes that are written in several ways.

``1`` and ``1.0`` are one name, as are ``Male`` and ``Male`` with blanks around it (``plain_name``). Names that differ
in letter case or in blanks within may be one or not, and only the user can say which.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any

from feddar.lazy import pandas as pd
from feddar.objectives.labels import by_distinct, whole

_WHOLE = re.compile(r"([+-]?\d+)\.0+")
_MOST_LISTED = 5


def plain_name(value: Any) -> Any:
    """Return a name without blanks around it, and a whole number without its zeros behind the point.

    >>> plain_name(" Male "), plain_name("1.0"), plain_name(1.0), plain_name("001")
    ('Male', '1', 1, '001')
    """
    if not isinstance(value, str):
        return whole(value)
    name = value.strip()
    found = _WHOLE.fullmatch(name)
    return found[1] if found else name


def same_name(name: str) -> str:
    """Return what all likely spellings of a name have in common.

    >>> same_name("Native American"), same_name("NATIVE  american\\u200b"), same_name("007"), same_name("a\\u2010b")
    ('nativeamerican', 'nativeamerican', '007', 'a-b')
    """
    kinds = [(sign, unicodedata.category(sign)) for sign in unicodedata.normalize("NFKC", name)]
    shown = ("-" if kind == "Pd" else sign for sign, kind in kinds if kind != "Cf")
    return "".join("".join(shown).casefold().split())


def spellings_in(values: pd.Series[Any]) -> list[dict[str, int]]:
    """Return the names that are written in more than one way: for each, the rows of every spelling, most first."""
    counts: dict[str, dict[str, int]] = {}
    for name, count in values.dropna().map(str).value_counts().items():
        counts.setdefault(same_name(str(name)), {})[str(name)] = int(count)
    return [each for each in counts.values() if len(each) > 1]


def refusal_of(column: str, found: list[dict[str, int]]) -> str:
    """Return the sentence that asks whether spellings in a column are one name or several."""
    listed = "; ".join(
        " and ".join(f"'{name}' ({count:,} rows)" for name, count in each.items()) for each in found[:_MOST_LISTED]
    )
    more = f"; and {len(found) - _MOST_LISTED:,} more" if len(found) > _MOST_LISTED else ""
    return (
        f"column '{column}' has names that differ only in letter case, blanks or hyphens: {listed}{more}: add "
        "--spellings merge if they are one, --spellings keep if they are not."
    )


def merged(found: list[dict[str, int]]) -> dict[str, str]:
    """Return the most frequent spelling of each other one."""
    return {name: next(iter(each)) for each in found for name in each}


def as_spelled(values: pd.Series[Any], known: Iterable[str]) -> pd.Series[Any]:
    """Return names in the spelling of those that are known; a name that is none of them stays as it is."""
    by_key = {same_name(name): name for name in known}
    exact = {*by_key.values()}

    def spelled(name: Any) -> Any:
        return name if str(name) in exact else by_key.get(same_name(str(name)), name)

    return by_distinct(values, lambda distinct: distinct.map(spelled))


def renamed(values: pd.Series[Any], names: Mapping[str, str]) -> pd.Series[Any]:
    """Return a column with other names in place of some."""
    return by_distinct(values, lambda distinct: distinct.map(lambda name: names.get(str(name), name)))
