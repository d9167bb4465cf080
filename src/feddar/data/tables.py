"""The user's own table: a file with columns for client, domain and target, or one file per client (``data.files``).

Every other column is a feature: a number, a truth value, a date or a category, with gaps (``data.columns``). A column
that is none of these is left out with a note, unless it was asked for. Error messages name file, column and line.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from feddar.data.cohort import Cohort
from feddar.data.columns import Column, Kind, Table, UnusableColumnError, infer, nested
from feddar.data.files import BY_LOOKING, Reading, TableFile, files_of, is_pattern, name_of, open_table
from feddar.data.suspicions import notes_on
from feddar.data.table_options import TableOptions
from feddar.errors import RowError, UserError
from feddar.methods import there_are
from feddar.objectives.labels import by_distinct, whole

MOST_DOMAINS = 100
FEWEST_ROWS_TO_NUMBER = 50
"""In so many rows, whole numbers that are all different are probably identifiers."""
FILE = "the file"
"""The pseudo-column of file names, for folders in which each file is a client."""


def read_cohort(options: TableOptions, *, of_one_client: bool = False) -> Cohort:
    """Read a file, or several with one client each, as a cohort; a file ``of_one_client`` has no client column."""
    path, reading = Path(options.data), reading_of(options)
    roles = {"client": options.client, "domain": options.domain, "target": options.target, "group": options.group}
    if options.client is None and (is_of_several(path) or of_one_client):
        roles["client"] = FILE
    first = open_table(files_of(path)[0], reading)
    for role in ("client", "domain", "target"):
        if roles[role] is None:
            raise missing_role(role, first)
    given = {
        role: quoted_if_column(name, first.header) if role == "target" else name
        for role, name in roles.items()
        if name is not None
    }
    table = TableFiles(path, given, options.image, reading=reading, text=names_in(options.categories))
    listed = (options.ignore, options.features, options.image, options.categories, options.numbers)
    table.require(_role_columns(given), [name for text in listed for name in names_in(text)])
    return as_cohort(table, given, options)


def reading_of(options: TableOptions) -> Reading:
    """Return how the files of a table are read."""
    return Reading(options.sep, options.decimal, options.encoding, tuple(names_in(options.missing)))


def is_of_several(path: Path) -> bool:
    """Return whether a path is a folder, or a pattern of several files."""
    return path.is_dir() or is_pattern(path)


def missing_role(role: str, file: TableFile) -> UserError:
    """Return the error to raise if no column was given for a role that is needed."""
    return UserError(f"say which column of {file.path} is the {role}: --{role} COLUMN; {there_are(file.header)}")


def as_cohort(table: Table, roles: dict[str, str], options: TableOptions) -> Cohort:
    """Return a table as a cohort; ``roles`` is the column of each role."""
    _require_apart(roles, options)
    domain = crossed(table, columns_of("domain", roles["domain"]))
    groups = domain.nunique()
    if groups > MOST_DOMAINS:
        raise UserError(f"{options.data}: column '{roles['domain']}' has {groups:,} distinct values; is it a group?")
    columns, notes = _kinds(table, roles, options)
    labels = labels_in(table, roles["target"])
    if isinstance(table, TableFiles):
        notes = (*notes, *notes_on(table, columns, labels))
    try:
        cohort = Cohort.from_arrays(
            table,
            labels,
            domain=domain,
            client=table[roles["client"]],
            group=table[roles["group"]] if "group" in roles else None,
            task=options.task,
            columns=columns,
            positive=options.positive,
        )
    except RowError as problem:
        raise UserError(f"{place(table, problem.row)}: {problem.reason}") from None
    return replace(cohort, notes=notes)


def labels_in(table: Table, target: str) -> pd.DataFrame:
    """Return the columns of labels; ``target`` is one name, or several separated by commas."""
    return pd.DataFrame({name: table[name] for name in columns_of("target", target)})


def quoted_if_column(given: str, header: Sequence[str]) -> str:
    """Return the name in quotes if a column has exactly this name with a comma in it, so that it is not split.

    >>> quoted_if_column("dead, yes/no", ["age", "dead, yes/no"]), quoted_if_column("died,icu", ["died", "icu"])
    ('"dead, yes/no"', 'died,icu')
    """
    return f'"{given}"' if given in header and "," in given else given


def names_in(text: str) -> list[str]:
    """Return the names in a list separated by commas; a name with a comma in it is written in double quotes.

    >>> names_in('age, "weight, kg"')
    ['age', 'weight, kg']
    """
    return [name for name in _listed_in(text) if name]


def _listed_in(text: str) -> list[str]:
    return [name.strip() for name in next(csv.reader([text], skipinitialspace=True), [])]


def columns_of(role: str, given: str) -> list[str]:
    """Return the columns of a role: several for a crossed domain or several outcomes, else one."""
    if role not in ("domain", "target"):
        return [given]
    if not all(_listed_in(given)):
        raise UserError(f"the {role} '{given}' has a comma without a name beside it: add the name, or take it away.")
    return names_in(given)


def _role_columns(roles: dict[str, str]) -> list[str]:
    return [name for role, given in roles.items() for name in columns_of(role, given)]


def crossed(table: Table, names: list[str]) -> pd.Series[Any]:
    """Return the domain of each row: one column, or several crossed ('White, F'); missing if one of them is."""
    if len(names) == 1:
        return table[names[0]]
    others = pd.DataFrame({name: table[name].astype("string") for name in names[1:]})
    return table[names[0]].astype("string").str.cat(others, sep=", ")


def _require_apart(roles: dict[str, str], options: TableOptions) -> None:
    """Refuse a column that is given for two roles that exclude each other."""
    taken, features = _role_columns(roles), names_in(options.features)
    for name in taken:
        if taken.count(name) > 1:
            playing = [role for role, given in roles.items() if name in columns_of(role, given)]
            raise UserError(f"column '{name}' is named twice, as {' and '.join(playing)}: each needs one of its own.")
    for role, given in roles.items():
        for name in columns_of(role, given):
            if role != "domain" and name in features:
                raise UserError(
                    f"column '{name}' is the {role}, which is not learned from: leave it out of --features."
                )
    for name in features:
        if features.count(name) > 1:
            raise UserError(f"--features names column '{name}' twice: leave one out.")
    for name in names_in(options.image):
        if name in {*taken, *names_in(options.ignore)}:
            raise UserError(f"column '{name}' cannot be both --image and ignored or in another role: choose one.")


def _kinds(table: Table, roles: dict[str, str], options: TableOptions) -> tuple[list[Column], tuple[str, ...]]:
    """Return the columns to learn from, and notes on those that were left out."""
    wanted, ignored = names_in(options.features), names_in(options.ignore)
    images, taken = names_in(options.image), _role_columns(roles)
    if len(images) > 1:
        raise UserError(f"--image names the one column of image paths, and was '{options.image}'.")
    found = [Column(name, "image", size=options.image_size) for name in images]
    said = _said_kinds(options)
    notes = list(table.notes) if isinstance(table, TableFiles) else []
    for name in wanted or [str(name) for name in table.columns if name not in {*taken, *ignored}]:
        if name in images:
            continue
        try:
            values = table[name]
            found.append(infer(name, values, said.get(name)))
            if not wanted and _numbers_rows(values):
                notes.append(
                    f"column '{name}' is a different whole number in every row; if it is an identifier, leave it out "
                    f"with --ignore {name}."
                )
        except UnusableColumnError as problem:
            if problem.row is not None:
                raise UserError(
                    f"{place(table, problem.row)}: column '{name}' {problem}; {problem.remedy}, or leave it out with "
                    f"--ignore {name}."
                ) from None
            if wanted:
                raise UserError(f"{options.data}: column '{name}' {problem}; leave it out of --features.") from None
            notes.append(f"column '{name}' is left out: it {problem}.")
    if not found:
        raise UserError(f"{options.data} has no column left to learn from beside client, domain and target.")
    return found, tuple(notes)


def _said_kinds(options: TableOptions) -> dict[str, Kind]:
    """Return the kinds of columns that were said to be categories or numbers."""
    categories, numbers = names_in(options.categories), names_in(options.numbers)
    both = [name for name in categories if name in numbers]
    if both:
        raise UserError(f"column '{both[0]}' is both in --categories and in --numbers: choose one.")
    return {**dict.fromkeys(categories, "category"), **dict.fromkeys(numbers, "number")}


def _numbers_rows(values: pd.Series[Any]) -> bool:
    """Return whether a column looks like record numbers: whole numbers of which none occurs twice."""
    if len(values) < FEWEST_ROWS_TO_NUMBER or not pd.api.types.is_integer_dtype(values):
        return False
    return bool(values.notna().all() and values.is_unique)


def place(table: Table, row: int | None) -> str:
    """Return where a row is, for messages: file and line if the table was read from files, else its number."""
    return table.line(row) if isinstance(table, TableFiles) and row is not None else f"row {row}"


class TableFiles:
    """A table in one file, or in several with the same columns. Parquet files are read column by column."""

    def __init__(
        self, path: Path, roles: dict[str, str], image: str = "", text: Sequence[str] = (),
        reading: Reading = BY_LOOKING,
    ) -> None:  # fmt: skip
        """Columns in ``text`` are read as text, even if they look like numbers or truth values."""
        self.image = image
        self.role_columns, self.targets = _role_columns(roles), columns_of("target", roles.get("target", ""))
        self.of_clients = roles.get("client") == FILE
        names = [name for name in self.role_columns if name not in self.targets]
        self.files = [open_table(file, reading, names, [*names, *text]) for file in files_of(path)]
        first = self.files[0]
        for file in self.files:
            if set(file.header) != set(first.header):
                raise UserError(
                    f"{file.path} has other columns than {first.path}"
                    f"{_listed('without', set(first.header) - set(file.header))}"
                    f"{_listed('with', set(file.header) - set(first.header))}: every file needs the same ones."
                )
        self.columns = [*first.header, *([FILE] if self.of_clients else [])]
        for file in self.files:
            if not len(file):
                who = f"client '{name_of(file.path)}' has no samples: " if self.of_clients else ""
                raise UserError(f"{who}{file.path} has a header and no samples below it.")
        self.starts = np.cumsum([0, *map(len, self.files)])

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences that say how files are read, if it is unusual; of several files that of the first that has one."""
        return next((file.notes for file in self.files if file.notes), ())

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, name: str) -> pd.Series[Any]:
        if name == FILE:
            return pd.Series(np.repeat([name_of(file.path) for file in self.files], np.diff(self.starts)))
        values = pd.concat([self._read(file, name) for file in self.files], ignore_index=True)
        if name in self.targets:
            return stripped(values)
        return as_names(values) if name in self.role_columns else values

    def line(self, row: int) -> str:
        """Return file and line of a row, for messages."""
        file = self.files[int(np.searchsorted(self.starts, row, side="right")) - 1]
        return file.line(row - int(self.starts[self.files.index(file)]))

    def require(self, roles: list[str], others: list[str]) -> None:
        """Refuse a table that lacks one of these columns, or has missing values in a column with a role."""
        for name in [*roles, *others]:
            if name not in self.columns:
                raise UserError(f"{self.files[0].path} has no column '{name}': {self.files[0].hint(name)}")
        for name in roles:
            missing = self[name].isna()
            if missing.any():
                more = f" and in {int(missing.sum()) - 1:,} more" if missing.sum() > 1 else ""
                marks = " (or says NA, None or the like)" if name in self.targets else ""
                raise UserError(
                    f"{self.line(int(missing.argmax()))}: column '{name}' is empty there{marks}{more}; fill it in or "
                    "leave the rows out."
                )

    def _read(self, file: TableFile, name: str) -> pd.Series[Any]:
        values = file.column(name)
        return paths_beside(file.path, values) if name == self.image else values


def _listed(what: str, names: set[str]) -> str:
    return f", {what} {', '.join(sorted(names))}" if names else ""


def stripped(values: pd.Series[Any]) -> pd.Series[Any]:
    """Return texts without spaces around them: 'White' and 'White ' are one group."""
    if pd.api.types.is_numeric_dtype(values):
        return values
    if nested(values).any():
        raise UserError(f"column '{values.name}' holds lists or records: write a single value in each row.")
    return by_distinct(values, lambda distinct: distinct.map(_strip))


def _strip(value: Any) -> Any:
    return value.strip() if isinstance(value, str) else value


def as_names(values: pd.Series[Any]) -> pd.Series[Any]:
    """Return names of clients, domains or groups; 1.0, to which pandas changes 1 in a column with gaps, is 1 again."""
    if pd.api.types.is_float_dtype(values):
        return by_distinct(values, lambda distinct: pd.Series(list(map(whole, distinct)), dtype=object))
    return stripped(values)


def paths_beside(file: Path, values: pd.Series[Any]) -> pd.Series[Any]:
    """Return paths that are relative to the folder of their table."""
    return values.map(lambda path: str(file.parent / str(path)), na_action="ignore")
