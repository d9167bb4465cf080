"""Reads new samples for a trained model chunk by chunk, so that a file may be larger than memory.

A table is read as ``feddar.data.tables`` reads one for training, with the columns that the model was trained on.
Columns with a role (client, domain, target, group) may be absent where the model does not need them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from feddar.data.cohort import CHUNK, Cohort
from feddar.data.columns import Column, require_columns
from feddar.data.domain_structure import DomainStructure, crossed, terms_in
from feddar.data.files import BY_LOOKING, Reading, TableFile, open_tables
from feddar.data.images import SUFFIXES, read_images
from feddar.data.spellings import as_spelled
from feddar.data.table_paths import is_of_several, name_of
from feddar.data.tables import (
    as_names,
    columns_of,
    missing_role,
    paths_beside,
    quoted,
    require_none,
    stripped,
)
from feddar.errors import RowError, UserError

ROWS = 128 * CHUNK
"""Rows of a chunk: a multiple of the encoder's batch, so that batches are the same as if all rows came at once."""

ROLES = ("client", "domain", "group", "target")
"""The roles a column can have other than that of a feature."""


@dataclass(frozen=True)
class Chunk:
    """Consecutive samples of a file."""

    x: pd.DataFrame | tuple[Tensor, ...]
    first: int
    """The number of the first row in the file, counted from 0."""
    roles: dict[str, pd.Series[Any]]
    """The columns of client, domain and group that the file has, by role."""
    labels: pd.DataFrame | None
    """The columns of labels; None if the file has none."""
    where: Callable[[int], str]
    """Returns file and line of a row of this chunk, for messages."""

    notes: dict[int, str] = field(default_factory=dict)
    """What is to be said of some rows, by their place in this chunk."""

    def __len__(self) -> int:
        return len(self.x) if isinstance(self.x, pd.DataFrame) else len(self.x[0])


def table_chunks(
    path: Path, columns: Sequence[Column], roles: Mapping[str, str], required: Sequence[str], rows: int = ROWS, *,
    reading: Reading = BY_LOOKING, known: Mapping[str, Sequence[str]] | None = None,
    structure: DomainStructure | None = None,
) -> Iterator[Chunk]:  # fmt: skip
    """Yield the rows of a file, or of every file in a folder; then the files' names are the clients.

    ``roles`` is the column of each role; the columns of ``required`` roles must be there. Names of roles that are
    ``known`` are read as these where only letter case or blanks differ. Domains are named as their ``structure`` says.
    """
    rows = CHUNK if any(column.kind == "image" for column in columns) else rows
    several = is_of_several(path)
    for opened in open_tables(path, reading):
        header = opened.header
        needed = [column.name for column in columns if not column.optional or column.name in header]
        roles = {role: quoted(role, name, header) for role, name in roles.items()}
        of_roles = {role: _naming(role, name) for role, name in roles.items()}
        by_role = {role: names for role, names in of_roles.items() if names and {*names} <= {*header}}
        numbers = [] if structure is None else structure.ordered(by_role.get("domain", []))
        names = [name for role in by_role if role != "target" for name in by_role[role] if name not in numbers]
        text = [*names, *by_role.get("target", []), *(column.name for column in columns if not column.is_numeric)]
        file = opened.with_roles(names, text)
        absent = [role for role in required if role not in by_role and not (role == "client" and several)]
        require_none([*_lacking(file, needed, "which the model needs"), *_lacking_roles(file, roles, absent)])
        wanted = list(dict.fromkeys([*needed, *chain(*by_role.values())]))
        first = 0
        for frame in filter(len, file.chunks(wanted, rows)):
            for name in [*names, *by_role.get("target", [])]:
                frame[name] = (as_names if name in names else stripped)(frame[name])
            for column in columns:
                if column.kind == "image":
                    frame[column.name] = paths_beside(file.path, frame[column.name])
            where = _line(file, first)
            named = {role: frame[name] for role, (name, *_) in by_role.items() if role not in ("domain", "target")}
            notes: dict[int, str] = {}
            if "domain" in by_role:
                named["domain"], notes = _domains([frame[name] for name in by_role["domain"]], structure, where)
            labels = frame[by_role["target"]] if "target" in by_role else None
            for role, names_of_role in (known or {}).items():
                if role in named:
                    named[role] = as_spelled(named[role], names_of_role)
            if several:
                named.setdefault("client", pd.Series(name_of(file.path), index=frame.index))
            yield Chunk(frame[needed], first, named, labels, where, notes)
            first += len(frame)
        if not first:
            raise UserError(f"{file.path} has a header and no samples below it{file.elsewhere}.")


def _naming(role: str, given: str) -> list[str]:
    """Return the columns of a role that name a sample's domain, client and so on; not those that domains belong to."""
    return [term.column for term in terms_in(given)] if role == "domain" else columns_of(role, given)


def _domains(
    columns: Sequence[pd.Series[Any]], structure: DomainStructure | None, where: Callable[[int], str]
) -> tuple[pd.Series[Any], dict[int, str]]:
    """Return the domain of each row, and notes; columns of another number than training had say it as they are."""
    if structure is None or len(columns) != len(structure.naming):
        return crossed(columns), {}
    try:
        return structure.names(columns), structure.outside(columns)
    except RowError as problem:
        raise UserError(f"{where(problem.row)}: {problem.reason}") from None


def image_chunks(path: Path, column: str | None, size: int, roles: Mapping[str, str]) -> Iterator[Chunk]:
    """Yield an image, or all images in a folder; ``roles`` are the domain and the client of all of them.

    If the model was trained on a table, they are its ``column`` of paths; otherwise they are read as pixels.
    """
    files = images_in(path)
    for first in range(0, len(files), CHUNK):
        some = [str(file) for file in files[first : first + CHUNK]]
        named = {"image": some} | {role: [name] * len(some) for role, name in roles.items()}
        x = (read_images([Path(file) for file in some], size),) if column is None else pd.DataFrame({column: some})
        yield Chunk(x, first, {role: pd.Series(values) for role, values in named.items()}, None, some.__getitem__)


def images_in(path: Path) -> list[Path]:
    """Return the path itself if it is an image, or all images below a folder, sorted by name."""
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    return [file for file in files if file.suffix.lower() in SUFFIXES]


def cohort_chunks(cohort: Cohort, rows: int = ROWS) -> Iterator[Chunk]:
    """Yield the samples of a cohort in chunks."""
    for first in range(0, len(cohort), rows):
        part = cohort.rows(torch.arange(first, min(first + rows, len(cohort))))
        named = {"client": pd.Series(part.client_names), "domain": pd.Series(part.domain_names)}
        yield Chunk(part.x, first, named, part.objective.written(part.y.numpy()), _sample(first))


def _sample(first: int) -> Callable[[int], str]:
    return lambda row: f"sample {first + row}"


def _line(file: TableFile, first: int) -> Callable[[int], str]:
    return lambda row: file.line(first + row)


def _lacking_roles(file: TableFile, roles: Mapping[str, str], absent: Sequence[str]) -> Iterator[str]:
    """Yield a sentence for each role whose column is not known, or not in the file."""
    for role in absent:
        if role in roles:
            yield from _lacking(file, _naming(role, roles[role]), f"its {role}; --{role} COLUMN names another")
        else:
            yield str(missing_role(role, file))


def _lacking(file: TableFile, names: Sequence[str], what: str) -> Iterator[str]:
    """Yield a sentence that names all of these columns that a file lacks, if it lacks any."""
    try:
        require_columns(str(file.path), names, file.header, what, file.hint)
    except UserError as problem:
        yield str(problem)
