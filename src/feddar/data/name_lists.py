"""Lists of names of columns, as options take them: separated by commas, and one with a comma in double quotes."""

from __future__ import annotations

import csv
import shlex
from collections.abc import Iterable


def names_in(text: str) -> list[str]:
    """Return the names in a list separated by commas; a name with a comma in it is written in double quotes.

    >>> names_in('age, "weight, kg"')
    ['age', 'weight, kg']
    """
    return [name for name in entries_in(text) if name]


def entries_in(text: str) -> list[str]:
    """Return what stands between the commas of a list, which may be empty."""
    return [name.strip() for name in next(csv.reader([text], skipinitialspace=True), [])]


def as_list(names: Iterable[str]) -> str:
    """Undo ``names_in``: return names separated by commas.

    >>> as_list(["age", "weight, kg"])
    'age,"weight, kg"'
    """
    return ",".join(f'"{name}"' if "," in name else name for name in names)


def option_for(flag: str, names: Iterable[str]) -> str:
    """Return an option with names of columns, as it is typed in a shell.

    >>> option_for("--ignore", ["age", "ward"]), option_for("--ignore", ["Unnamed: 0"])
    ('--ignore age,ward', "--ignore 'Unnamed: 0'")
    """
    return f"{flag} {shlex.quote(as_list(names))}"
