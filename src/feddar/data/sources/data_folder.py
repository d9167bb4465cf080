"""Finds the folder of the real data sets: the one given, else FEDDAR_DATA, else ../shared/data if it exists."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field

from feddar.errors import UserError

VARIABLE = "FEDDAR_DATA"
Folder = Annotated[str | None, Field(description=f"Folder that holds the set; else {VARIABLE}.")]
_PROJECT = Path(__file__).parents[4]


def data_folder(given: str | Path | None = None) -> Path | None:
    """Return the data folder; None if none is given and there is no ../shared/data by the current folder or project."""
    named = given or os.environ.get(VARIABLE)
    if named:
        return Path(named).expanduser()
    beside = (Path.cwd().parent / "shared" / "data", _PROJECT.parent / "shared" / "data")
    return next((folder for folder in beside if folder.is_dir()), None)


def find_set(name: str, given: str | Path | None, *, files: Sequence[str | tuple[str, ...]], origin: str) -> Path:
    """Return the folder of one data set: `name` in the data folder, or the data folder itself if the files are there.

    An entry of `files` is a name or a pattern, or a tuple of alternatives, of which one must exist.
    """
    wanted = [(file,) if isinstance(file, str) else file for file in files]
    folder = data_folder(given)
    places = [] if folder is None else [folder / name, folder]
    found = next((place for place in places if any(_in(place, file) for names in wanted for file in names)), None)
    if found is None:
        where = "no data folder is named" if folder is None else f"{folder} has no set '{name}'"
        raise UserError(
            f"{where}: put {', '.join(names[0] for names in wanted)} into a folder '{name}' (from {origin}), and name "
            f"the folder around it with --data or {VARIABLE}."
        )
    absent = [names[0] for names in wanted if not any(_in(found, file) for file in names)]
    if absent:
        raise UserError(f"{found} lacks {', '.join(absent)}: get it from {origin}.")
    return found


def _in(place: Path, pattern: str) -> bool:
    return any(True for _ in place.glob(pattern))
