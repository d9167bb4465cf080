"""The user's own table: a CSV or Parquet file with columns for client, domain and target, or one file per client.

Every other column is a feature: a number, a truth value, a date or a category, with gaps (``data.columns``). A column
that is none of these is left out with a note, unless it was asked for. Error messages name file, column and line.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from feddar.data.cohort import Cohort
from feddar.data.columns import Column, Table, UnusableColumnError, infer, nested
from feddar.data.table_options import SUFFIXES, TableOptions
from feddar.errors import RowError, UserError
from feddar.methods import nearest, there_are
from feddar.objectives.labels import by_distinct, whole

MISSING = ["", "NA", "N/A", "n/a", "NaN", "nan", "null", "NULL", "None", "<NA>"]
MOST_DOMAINS = 100
FEWEST_ROWS_TO_NUMBER = 50
"""In so many rows, whole numbers that are all different are probably identifiers."""
FILE = "the file"
"""The pseudo-column of file names, for folders in which each file is a client."""


def read_table(options: TableOptions, *, of_one_client: bool = False) -> Cohort:
    """Read a file, or a folder with one file per client, as a cohort; a file ``of_one_client`` has no client column."""
    path = Path(options.data)
    roles = {"client": options.client, "domain": options.domain, "target": options.target, "group": options.group}
    if path.is_dir() and options.client is not None:
        raise UserError(f"{path} is a folder, where each file is a client: leave out --client.")
    if options.client is None and (path.is_dir() or of_one_client):
        roles["client"] = FILE
    for role in ("client", "domain", "target"):
        if roles[role] is None:
            raise missing_role(role, files_of(path)[0])
    header = header_of(files_of(path)[0])
    given = {
        role: quoted_if_column(name, header) if role == "target" else name
        for role, name in roles.items()
        if name is not None
    }
    table = TableFiles(path, given, options.image)
    table.require(
        _role_columns(given), [*names_in(options.ignore), *names_in(options.features), *names_in(options.image)]
    )
    return as_cohort(table, given, options)


def missing_role(role: str, file: Path) -> UserError:
    """Return the error to raise if no column was given for a role that is needed."""
    columns = header_of(file)
    return UserError(f"say which column of {file} is the {role}: --{role} COLUMN; {there_are(columns)}")


def as_cohort(table: Table, roles: dict[str, str], options: TableOptions) -> Cohort:
    """Return a table as a cohort; ``roles`` is the column of each role."""
    _require_apart(roles, options)
    domain = crossed(table, columns_of("domain", roles["domain"]))
    groups = domain.nunique()
    if groups > MOST_DOMAINS:
        raise UserError(f"{options.data}: column '{roles['domain']}' has {groups:,} distinct values; is it a group?")
    columns, notes = _kinds(table, roles, options)
    try:
        cohort = Cohort.from_arrays(
            table,
            labels_in(table, roles["target"]),
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
    notes = []
    for name in wanted or [str(name) for name in table.columns if name not in {*taken, *ignored}]:
        if name in images:
            continue
        try:
            values = table[name]
            found.append(infer(name, values))
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

    def __init__(self, path: Path, roles: dict[str, str], image: str = "", text: Sequence[str] = ()) -> None:
        """Columns in ``text`` are read as text, even if they look like numbers or truth values."""
        self.image, self.text = image, text
        self.files = files_of(path)
        self.role_columns, self.targets = _role_columns(roles), columns_of("target", roles.get("target", ""))
        self.of_clients = roles.get("client") == FILE
        self.frames: dict[Path, pd.DataFrame] = {}
        headers = [header_of(file) for file in self.files]
        for file, header in zip(self.files, headers, strict=True):
            if set(header) != set(headers[0]):
                raise UserError(
                    f"{file} has other columns than {self.files[0]}{_listed('without', set(headers[0]) - set(header))}"
                    f"{_listed('with', set(header) - set(headers[0]))}: every file needs the same ones."
                )
        self.columns = [*headers[0], *([FILE] if self.of_clients else [])]
        lengths = [self._length(file) for file in self.files]
        for file, length in zip(self.files, lengths, strict=True):
            if not length:
                who = f"client '{file.stem}' has no samples: " if self.of_clients else ""
                raise UserError(f"{who}{file} has a header and no samples below it.")
        self.starts = np.cumsum([0, *lengths])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, name: str) -> pd.Series[Any]:
        if name == FILE:
            return pd.Series(np.repeat([file.stem for file in self.files], np.diff(self.starts)))
        values = pd.concat([self._read(file, name) for file in self.files], ignore_index=True)
        if name in self.targets:
            return stripped(values)
        return as_names(values) if name in self.role_columns else values

    def line(self, row: int) -> str:
        """Return file and line of a row, for messages."""
        file = self.files[int(np.searchsorted(self.starts, row, side="right")) - 1]
        within = row - int(self.starts[self.files.index(file)])
        return line_of(file, within)

    def require(self, roles: list[str], others: list[str]) -> None:
        """Refuse a table that lacks one of these columns, or has missing values in a column with a role."""
        known = [name for name in self.columns if name != FILE]
        for name in [*roles, *others]:
            if name not in self.columns:
                raise UserError(f"{self.files[0]} has no column '{name}': {hint(self.files[0], name, known)}")
        for name in roles:
            missing = self[name].isna()
            if missing.any():
                more = f" and in {int(missing.sum()) - 1:,} more" if missing.sum() > 1 else ""
                marks = " (or says NA, None or the like)" if name in self.targets else ""
                raise UserError(
                    f"{self.line(int(missing.argmax()))}: column '{name}' is empty there{marks}{more}; fill it in or "
                    "leave the rows out."
                )

    def _length(self, file: Path) -> int:
        with reading(file):
            if is_parquet(file):
                from pyarrow.parquet import read_metadata

                return int(read_metadata(file).num_rows)
            self.frames[file] = self._read_csv(file)
        return len(self.frames[file])

    def _read(self, file: Path, name: str) -> pd.Series[Any]:
        if is_parquet(file):
            with reading(file):
                values = pd.read_parquet(file, columns=[name]).reset_index(drop=True)[name]
            values = mark_missing(values, name in self.role_columns and name not in self.targets)
        else:
            values = self.frames[file][name]
        if name == self.image:
            return paths_beside(file, values)
        return values

    def _read_csv(self, file: Path) -> pd.DataFrame:
        names = [name for name in self.role_columns if name not in self.targets]
        frame: pd.DataFrame = pd.read_csv(file, **csv_options(_csv_header(file), names, [*names, *self.text]))
        require_short_rows(file, frame)
        return frame


def _listed(what: str, names: set[str]) -> str:
    return f", {what} {', '.join(sorted(names))}" if names else ""


def files_of(path: Path) -> list[Path]:
    """Return the file itself, or the tables in a folder, sorted by name."""
    files = sorted(p for p in path.iterdir() if p.suffix.lower() in SUFFIXES) if path.is_dir() else [path]
    if not files:
        raise UserError(f"the folder {path} holds no CSV or Parquet file: put one per client there.")
    return files


def header_of(file: Path) -> list[str]:
    """Return the names of a file's columns; an empty or repeated name is an error."""
    if file.suffix.lower() not in SUFFIXES:
        raise UserError(f"{file} is neither a CSV nor a Parquet file: export it as one of these.")
    with reading(file):
        names = _parquet_header(file) if is_parquet(file) else _csv_header(file)
    for name in names:
        if not name:
            raise UserError(f"{file} has a column without a name (row numbers?): name it or leave it out.")
        if names.count(name) > 1:
            raise UserError(f"{file} has the column '{name}' more than once: rename one.")
    return names


def csv_options(header: Sequence[str], names: Sequence[str], text: Sequence[str]) -> dict[str, Any]:
    """Return the options of ``pd.read_csv``; ``names`` are columns of clients, domains and groups, ``text`` stays text.

    Names are read as text, so that '001' does not become 1, and only an empty one is missing: 'NA' may be a name.
    """
    return {
        "encoding": "utf-8",
        "names": header,
        "header": 0,
        "na_values": {name: [""] if name in names else MISSING for name in header},
        "keep_default_na": False,
        "dtype": {name: str for name in text if name in header},
        "low_memory": False,
    }


def require_short_rows(file: Path, frame: pd.DataFrame) -> None:
    """Refuse rows with more entries than the header: pandas would use the first entries as the index."""
    if not isinstance(frame.index, pd.RangeIndex):
        raise UserError(f"{file} has more entries in its rows than in its header: mend the header or the rows.")


def mark_missing(values: pd.Series[Any], named: bool) -> pd.Series[Any]:
    """Return a column of a Parquet file in which '' and 'NA' are missing, as they are in a CSV file."""
    if not _holds_text(values):
        return values
    return values.mask(values.isin([""] if named else MISSING))


def _holds_text(values: pd.Series[Any]) -> bool:
    if values.dtype == object:
        return not nested(values).any()
    return pd.api.types.is_string_dtype(values) or isinstance(values.dtype, pd.CategoricalDtype)


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


def line_of(file: Path, row: int) -> str:
    """Return file and line (or row, for Parquet) for messages; ``row`` counts from 0."""
    return f"{file}, row {row + 1}" if is_parquet(file) else f"{file}, line {row + 2}"


def is_parquet(file: Path) -> bool:
    """Return whether the file's name ends in .parquet."""
    return file.suffix.lower() == ".parquet"


def _csv_header(file: Path) -> list[str]:
    first = pd.read_csv(file, encoding="utf-8", header=None, nrows=1, dtype=str, keep_default_na=False)
    header = [str(name).strip() for name in first.iloc[0]]
    if any(sign in name for name in header for sign in ";\t"):
        raise UserError(f"{file} is not separated by commas: save it as CSV with commas and decimal points.")
    return header


def _parquet_header(file: Path) -> list[str]:
    from pyarrow.parquet import read_schema

    schema = read_schema(file)
    index = _index_of(schema)
    return [name for name in schema.names if name not in index]


def _index_of(schema: Any) -> list[Any]:
    """Return the columns of a saved data frame that were its index; a range index is a description instead."""
    return list((schema.pandas_metadata or {}).get("index_columns", []))


def hint(file: Path, name: str, header: list[str]) -> str:
    """Return a hint for a name that is not a column of a file; it may be the index of a saved data frame."""
    if is_parquet(file):
        from pyarrow.parquet import read_schema

        if name in [each["name"] if isinstance(each, dict) else each for each in _index_of(read_schema(file))]:
            return "it is the index of the data frame; use reset_index() before saving."
    return nearest(name, header)


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Turn exceptions from reading a file into a ``UserError`` of one sentence."""
    try:
        yield
    except ImportError:
        raise UserError("reading Parquet needs one more package: pip install 'feddar[parquet]'.") from None
    except (OSError, UnicodeDecodeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        if isinstance(error, UnicodeDecodeError):
            raise UserError(f"cannot read {file}: {_not_utf_8(file)} (save it as CSV UTF-8).") from None
        raise UserError(f"cannot read {file}: {str(error).strip()}.") from None


def _not_utf_8(file: Path) -> str:
    """Say which line of a file is not UTF-8."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError:
                return f"line {number} is not UTF-8"
    return "it is not UTF-8"
