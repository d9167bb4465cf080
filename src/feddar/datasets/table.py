"""The user's own table: a CSV or Parquet file with columns for client, domain and target, or one file per client.

Every other column is a feature: a number, a truth value, a date or a category, with gaps (``feddar.columns``). A column
that is none of these is left out with a note, unless it was asked for. Whatever is wrong is said with the file, the
column and the line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from feddar.cohort import Cohort
from feddar.columns import Column, Table, UnusableColumnError, by_distinct, infer
from feddar.errors import RowError, UserError
from feddar.methods import nearest, there_are
from feddar.settings import DataSettings

SUFFIXES = (".csv", ".parquet")
MISSING = ["", "NA", "N/A", "n/a", "NaN", "nan", "null", "NULL", "None", "<NA>"]
MOST_DOMAINS = 100
FILE = "the file"
"""Stands for the name of the file where that is the client."""


def read_table(options: DataSettings) -> Cohort:
    """Read a file, or a folder with one file per client, as a cohort."""
    path = Path(options.data)
    roles = {"client": options.client, "domain": options.domain, "target": options.target, "group": options.group}
    if path.is_dir():
        if options.client is not None:
            raise UserError(f"{path} is a folder, where each file is a client: leave out --client.")
        roles["client"] = FILE
    for role in ("client", "domain", "target"):
        if roles[role] is None:
            raise unnamed(role, files_of(path)[0])
    given = {role: name for role, name in roles.items() if name is not None}
    table = Files(path, given, options.image)
    table.require(_held(given), [*names_in(options.ignore), *names_in(options.features), *names_in(options.image)])
    return as_cohort(table, given, options)


def unnamed(role: str, file: Path) -> UserError:
    """Return what to say where no column was named for a role that is needed."""
    columns = header_of(file)
    return UserError(f"say which column of {file} is the {role}: --{role} COLUMN; {there_are(columns)}")


def as_cohort(table: Table, roles: dict[str, str], options: DataSettings) -> Cohort:
    """Make a cohort of a table whose columns play these roles."""
    domain = crossed(table, names_in(roles["domain"]))
    groups = domain.nunique()
    if groups > MOST_DOMAINS:
        raise UserError(f"{options.data}: column '{roles['domain']}' has {groups:,} distinct values; is it a group?")
    columns, notes = _kinds(table, roles, options)
    target = table[roles["target"]]
    try:
        cohort = Cohort.from_arrays(
            table,
            target,
            domain=domain,
            client=table[roles["client"]],
            group=table[roles["group"]] if "group" in roles else None,
            task=options.task,
            columns=columns,
            classes=_classes(target, options),
        )
    except RowError as problem:
        raise UserError(f"{place(table, problem.row)}: {problem.reason}") from None
    return replace(cohort, notes=notes)


def names_in(text: str) -> list[str]:
    """Return the names in a list separated by commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def _held(roles: dict[str, str]) -> list[str]:
    """Return the columns that play a role; the domain may be several."""
    return [name for role, given in roles.items() for name in (names_in(given) if role == "domain" else [given])]


def crossed(table: Table, names: list[str]) -> pd.Series[Any]:
    """Return the domain: one column, or several crossed (race and sex: 'White, F'); missing where one of them is."""
    if len(names) == 1:
        return table[names[0]]
    others = pd.DataFrame({name: table[name].astype("string") for name in names[1:]})
    return table[names[0]].astype("string").str.cat(others, sep=", ")


def _classes(target: pd.Series[Any], options: DataSettings) -> list[Any] | None:
    """Return the two classes with the positive one last, where one was named."""
    if options.positive is None:
        return None
    found = sorted(target.unique().tolist(), key=str)
    if len(found) != 2 or options.positive not in map(str, found):
        raise UserError(
            f"--positive {options.positive} must be one of two values of column '{options.target}', which has "
            f"{', '.join(map(str, found[:10]))}{', …' if len(found) > 10 else ''}."
        )
    return sorted(found, key=lambda value: str(value) == options.positive)


def _kinds(table: Table, roles: dict[str, str], options: DataSettings) -> tuple[list[Column], tuple[str, ...]]:
    """Return the columns to learn from, and notes on those that were left out."""
    wanted, ignored = names_in(options.features), names_in(options.ignore)
    images, taken = names_in(options.image), _held(roles)
    if len(images) > 1:
        raise UserError(f"--image names the one column of image paths, and was '{options.image}'.")
    found = [Column(name, "image", size=options.image_size) for name in images]
    notes = []
    for name in wanted or [str(name) for name in table.columns if name not in {*taken, *ignored}]:
        if name in images:
            continue
        try:
            found.append(infer(name, table[name]))
        except UnusableColumnError as problem:
            if problem.row is not None:
                raise UserError(
                    f"{place(table, problem.row)}: column '{name}' {problem}; mend it, or leave it out with "
                    f"--ignore {name}."
                ) from None
            if wanted:
                raise UserError(f"{options.data}: column '{name}' {problem}; leave it out of --features.") from None
            notes.append(f"column '{name}' is left out: it {problem}.")
    if not found:
        raise UserError(f"{options.data} has no column left to learn from beside client, domain and target.")
    return found, tuple(notes)


def place(table: Table, row: int | None) -> str:
    """Say where a row of a table is: file and line where it came from files, else its number."""
    return table.line(row) if isinstance(table, Files) and row is not None else f"row {row}"


class Files:
    """A table in one file, or in several with the same columns. Parquet files are read a column at a time."""

    def __init__(self, path: Path, roles: dict[str, str], image: str = "") -> None:
        self.image = image
        self.files = files_of(path)
        self.held, self.target = _held(roles), roles.get("target")
        self.of_clients = roles.get("client") == FILE
        self.frames: dict[Path, pd.DataFrame] = {}
        headers = [header_of(file) for file in self.files]
        for file, header in zip(self.files, headers, strict=True):
            if header != headers[0]:
                raise UserError(f"{file} has other columns than {self.files[0]}: every file needs the same ones.")
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
        return stripped(values) if name in self.held else values

    def line(self, row: int) -> str:
        """Say where a row is: file and line."""
        file = self.files[int(np.searchsorted(self.starts, row, side="right")) - 1]
        within = row - int(self.starts[self.files.index(file)])
        return line_of(file, within)

    def require(self, roles: list[str], others: list[str]) -> None:
        """Refuse a table without the columns named, or with gaps in those that play a role."""
        for name in [*roles, *others]:
            if name not in self.columns:
                raise UserError(f"{self.files[0]} has no column '{name}': {nearest(name, self.columns)}")
        for name in roles:
            missing = self[name].isna()
            if missing.any():
                more = f" and in {int(missing.sum()) - 1:,} more" if missing.sum() > 1 else ""
                raise UserError(
                    f"{self.line(int(missing.argmax()))}: column '{name}' is empty there{more}; fill it in or leave "
                    "the rows out."
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
        else:
            values = self.frames[file][name]
        if name == self.image:
            return paths_beside(file, values)
        return values

    def _read_csv(self, file: Path) -> pd.DataFrame:
        text = [name for name in self.held if name != self.target]
        frame: pd.DataFrame = pd.read_csv(file, **csv_options(_csv_header(file), self.held, text))
        require_short_rows(file, frame)
        return frame


def files_of(path: Path) -> list[Path]:
    """Return the file itself, or the tables of a folder, by name."""
    files = sorted(p for p in path.iterdir() if p.suffix.lower() in SUFFIXES) if path.is_dir() else [path]
    if not files:
        raise UserError(f"the folder {path} holds no CSV or Parquet file: put one per client there.")
    return files


def header_of(file: Path) -> list[str]:
    """Return the names of a file's columns; one without a name, or twice the same, is an error."""
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


def csv_options(header: Sequence[str], held: Sequence[str], text: Sequence[str]) -> dict[str, Any]:
    """Say how pandas shall read a file with columns ``held`` that play a role, and ``text`` ones, kept as they are.

    Names are text, so that '001' stays what it is, and only an empty one is missing.
    """
    return {
        "encoding": "utf-8",
        "names": header,
        "header": 0,
        "na_values": {name: [""] if name in held else MISSING for name in header},
        "keep_default_na": False,
        "dtype": {name: str for name in text if name in header},
        "low_memory": False,
    }


def require_short_rows(file: Path, frame: pd.DataFrame) -> None:
    """Refuse rows with more entries than the header: pandas would take the first ones for names of rows."""
    if not isinstance(frame.index, pd.RangeIndex):
        raise UserError(f"{file} has more entries in its rows than in its header: mend the header or the rows.")


def stripped(values: pd.Series[Any]) -> pd.Series[Any]:
    """Return names without blanks around them: 'White' and 'White ' are one group."""
    if pd.api.types.is_numeric_dtype(values):
        return values
    return by_distinct(values, lambda distinct: distinct.map(_strip))


def _strip(value: Any) -> Any:
    return value.strip() if isinstance(value, str) else value


def paths_beside(file: Path, values: pd.Series[Any]) -> pd.Series[Any]:
    """Return paths as they are seen from the folder of their table."""
    return values.map(lambda path: str(file.parent / str(path)), na_action="ignore")


def line_of(file: Path, row: int) -> str:
    """Say where a row of a file is."""
    return f"{file}, row {row + 1}" if is_parquet(file) else f"{file}, line {row + 2}"


def is_parquet(file: Path) -> bool:
    """Tell the kind of a table by the end of its name."""
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
    index = (schema.pandas_metadata or {}).get("index_columns", [])
    return [name for name in schema.names if name not in index]


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Turn what can go wrong with a file into one sentence."""
    try:
        yield
    except ImportError:
        raise UserError("reading Parquet needs one more package: pip install 'feddar[parquet]'.") from None
    except (OSError, UnicodeDecodeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        hint = " (save it as CSV UTF-8)" if isinstance(error, UnicodeDecodeError) else ""
        raise UserError(f"cannot read {file}: {str(error).strip()}{hint}.") from None
