"""What the administrator of a site, and nobody else, says about it: ``local/feddar.toml`` in its startup kit.

FLARE keeps that folder at the site: no job and no server writes there. A site names its data::

    data = "/srv/study/patients.csv"

The server may name a folder for results of all jobs, by their names: it outlives a job, which FLARE's own does not, so
that the same job, submitted again, finds what it left::

    out = "/srv/study/results"

Paths that are not absolute start at the folder of the file. A table with the name of a site, as in ``[site-1]``, holds
for that site only: simulated sites share one file.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from feddar.errors import UserError

FILE = "feddar.toml"
_PATHS = ("data", "state", "out")


def read(folder: Path, name: str) -> dict[str, str]:
    """Return what the file in this folder says for a site of this name; nothing where there is no file."""
    file = folder / FILE
    try:
        said = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read ({error}): correct it at this site.") from None
    own = said.get(name)
    values = {**said, **(own if isinstance(own, dict) else {})}
    options = {key: str(value) for key, value in values.items() if not isinstance(value, dict)}
    return {key: str(folder / value) if key in _PATHS else value for key, value in options.items()}


def site_options(workspace: Path, name: str) -> dict[str, str]:
    """Return the options of the site with this workspace: its data, and where it keeps what never leaves it."""
    folder = workspace / "local"
    options = read(folder, name)
    if not options.get("data"):
        raise UserError(
            f"site '{name}' does not know its data: write the line data = \"/path/to/data.csv\" into {folder / FILE}."
        )
    return {"state": str(workspace / "feddar-state"), **options, "name": name}
