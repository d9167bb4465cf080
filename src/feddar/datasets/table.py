"""The user's own table: a CSV or Parquet file with columns for client, domain and target, or one file per client.

Every other column is a feature: a number, a truth value, a date or a category, with gaps (``feddar.columns``). A column
that is none of these is left out with a note, unless it was asked for. Whatever is wrong is said with the file, the
column and the line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from feddar.cohort import Cohort
from feddar.columns import Column, UnusableColumnError, infer
from feddar.errors import UserError
from feddar.methods import nearest
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
            raise UserError(f"say which column of {path} is the {role}: --{role} COLUMN.")
    given = {role: name for role, name in roles.items() if name is not None}
    frame, line = _read(path, given, options)
    columns, notes = _kinds(frame, given, options, line)
    cohort = Cohort.from_arrays(
        frame[[column.name for column in columns]],
        frame[roles["target"]],
        domain=crossed(frame, names_in(given["domain"])),
        client=frame[roles["client"]],
        group=frame[options.group] if options.group else None,
        task=options.task,
        columns=columns,
    )
    return replace(cohort, notes=notes)


def names_in(text: str) -> list[str]:
    """Return the names in a list separated by commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def _held(roles: dict[str, str]) -> list[str]:
    """Return the columns that play a role; the domain may be several."""
    return [name for role, given in roles.items() for name in (names_in(given) if role == "domain" else [given])]


def crossed(frame: pd.DataFrame, names: list[str]) -> pd.Series[Any]:
    """Return the domain: one column, or several crossed (race and sex: 'White, F'); missing where one of them is."""
    if len(names) == 1:
        return frame[names[0]]
    return frame[names[0]].astype("string").str.cat(frame[names[1:]].astype("string"), sep=", ")


Line = Callable[[int], str]
"""Says where a row of the table is: file and line."""


def _kinds(
    frame: pd.DataFrame, roles: dict[str, str], options: DataSettings, line: Line
) -> tuple[list[Column], tuple[str, ...]]:
    """Return the columns to learn from, and notes on those that were left out."""
    wanted, ignored = names_in(options.features), names_in(options.ignore)
    taken = _held(roles)
    found, notes = [], []
    for name in wanted or [str(name) for name in frame.columns if name not in {*taken, *ignored}]:
        try:
            found.append(infer(name, frame[name]))
        except UnusableColumnError as problem:
            if problem.row is not None:
                raise UserError(
                    f"{line(problem.row)}: column '{name}' {problem}; mend it, or leave it out with --ignore {name}."
                ) from None
            if wanted:
                raise UserError(f"{options.data}: column '{name}' {problem}; leave it out of --features.") from None
            notes.append(f"column '{name}' is left out: it {problem}.")
    if not found:
        raise UserError(f"{options.data} has no column left to learn from beside client, domain and target.")
    return found, tuple(notes)


def _read(path: Path, roles: dict[str, str], options: DataSettings) -> tuple[pd.DataFrame, Line]:
    """Read and check one file, or every file of a folder; also say where each row came from."""
    files = files_of(path)
    frames: list[pd.DataFrame] = []
    for file in files:
        frame = _read_file(file, roles)
        if frame.empty:
            who = f"client '{file.stem}' has no samples: " if path.is_dir() else ""
            raise UserError(f"{who}{file} has a header and no samples below it.")
        if path.is_dir():
            frame[FILE] = file.stem
        _check(file, frame, roles, [*names_in(options.ignore), *names_in(options.features)])
        if frames and list(frame.columns) != list(frames[0].columns):
            raise UserError(f"{file} has other columns than {files[0]}: every client's file needs the same ones.")
        frames.append(frame)
    starts = np.cumsum([0, *map(len, frames)])

    def line(row: int) -> str:
        number = int(np.searchsorted(starts, row, side="right")) - 1
        return f"{files[number]}, line {row - int(starts[number]) + 2}"

    return pd.concat(frames, ignore_index=True), line


def files_of(path: Path) -> list[Path]:
    """Return the file itself, or the tables of a folder, by name."""
    files = sorted(p for p in path.iterdir() if p.suffix.lower() in SUFFIXES) if path.is_dir() else [path]
    if not files:
        raise UserError(f"the folder {path} holds no CSV or Parquet file: put one per client there.")
    return files


def table_suffix(path: Path) -> str:
    """Return which kind of table a file is, by the end of its name."""
    if path.suffix.lower() not in SUFFIXES:
        raise UserError(f"{path} is neither a CSV nor a Parquet file: export it as one of these.")
    return path.suffix.lower()


def _read_file(path: Path, roles: dict[str, str]) -> pd.DataFrame:
    suffix = table_suffix(path)
    with reading(path):
        frame = pd.read_parquet(path).reset_index(drop=True) if suffix == ".parquet" else _read_csv(path, roles)
    return tidied(path, frame, _held(roles))


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn whatever is wrong with a file into one sentence."""
    try:
        yield
    except ImportError:
        raise UserError("reading Parquet needs one more package: pip install 'feddar[parquet]'.") from None
    except (OSError, UnicodeDecodeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        hint = " (save it as CSV UTF-8)" if isinstance(error, UnicodeDecodeError) else ""
        raise UserError(f"cannot read {path}: {str(error).strip()}{hint}.") from None


def tidied(path: Path, frame: pd.DataFrame, held: Sequence[str]) -> pd.DataFrame:
    """Strip the columns that play a role, since 'White' and 'White ' are one group; refuse rows that are too long."""
    for name in held:
        if name in frame.columns and not pd.api.types.is_numeric_dtype(frame[name]):
            frame[name] = frame[name].map(lambda value: value.strip() if isinstance(value, str) else value)
    if not isinstance(frame.index, pd.RangeIndex):
        raise UserError(f"{path} has more entries in its rows than in its header: mend the header or the rows.")
    return frame


def _read_csv(path: Path, roles: dict[str, str]) -> pd.DataFrame:
    header = csv_header(path)
    held = _held(roles)
    frame: pd.DataFrame = pd.read_csv(path, **csv_options(header, held, [n for n in held if n != roles["target"]]))
    return frame


def csv_header(path: Path) -> list[str]:
    """Return the names of a file's columns; one without a name, or twice the same, is an error."""
    first = pd.read_csv(path, encoding="utf-8", header=None, nrows=1, dtype=str, keep_default_na=False)
    header = [str(name).strip() for name in first.iloc[0]]
    if any(sign in name for name in header for sign in ";\t"):
        raise UserError(f"{path} is not separated by commas: save it as CSV with commas and decimal points.")
    for name in header:
        if not name:
            raise UserError(f"{path} has a column without a name (row numbers?): name it or leave it out.")
        if header.count(name) > 1:
            raise UserError(f"{path} has the column '{name}' more than once: rename one.")
    return header


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


def _check(path: Path, frame: pd.DataFrame, roles: dict[str, str], others: list[str]) -> None:
    """Refuse a file without the columns named, or with gaps in client, domain, target or group."""
    columns = [str(name) for name in frame.columns]
    held = _held(roles)
    for column in [*held, *others]:
        if column not in columns:
            raise UserError(f"{path} has no column '{column}': {nearest(column, columns)}")
    for name in held:
        missing = frame[name].isna()
        if missing.any():
            more = f" and in {int(missing.sum()) - 1:,} more" if missing.sum() > 1 else ""
            raise UserError(
                f"{path}, line {int(missing.argmax()) + 2}: column '{name}' is empty there{more}; fill it in or leave "
                "the rows out."
            )
    groups = len(frame[names_in(roles["domain"])].drop_duplicates())
    if groups > MOST_DOMAINS:
        raise UserError(f"{path}: column '{roles['domain']}' has {groups:,} distinct values; is it a group at all?")
