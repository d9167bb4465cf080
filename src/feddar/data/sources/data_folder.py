"""Where the real data lies: the folder that is named, else the one in FEDDAR_DATA, else ../shared/data if present."""

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
    """Return the data folder, or None if none is named and none lies beside the current folder or the project."""
    named = given or os.environ.get(VARIABLE)
    if named:
        return Path(named).expanduser()
    beside = (Path.cwd().parent / "shared" / "data", _PROJECT.parent / "shared" / "data")
    return next((folder for folder in beside if folder.is_dir()), None)


def find_set(name: str, given: str | Path | None, *, files: Sequence[str | tuple[str, ...]], origin: str) -> Path:
    """Return the folder of one set: `name` in the data folder, or the data folder itself if the files are there.

    Of several names for a file, one is enough.
    """
    wanted = [(file,) if isinstance(file, str) else file for file in files]
    folder = data_folder(given)
    places = [] if folder is None else [folder / name, folder]
    found = next(
        (place for place in places if any((place / file).exists() for names in wanted for file in names)), None
    )
    if found is None:
        where = "no data folder is named" if folder is None else f"{folder} has no set '{name}'"
        raise UserError(
            f"{where}: put {', '.join(names[0] for names in wanted)} into a folder '{name}' (from {origin}), and name "
            f"the folder around it with --data or {VARIABLE}."
        )
    absent = [names[0] for names in wanted if not any((found / file).exists() for file in names)]
    if absent:
        raise UserError(f"{found} lacks {', '.join(absent)}: get it from {origin}.")
    return found
