"""The configuration file of a site, written by the site's own administrator: ``local/feddar.toml`` in its startup kit.

FLARE keeps that folder at the site: no job and no server writes there. A site gives its data, and the study that it has
agreed to and that is the only one it joins::

    data = "/srv/study/patients.csv"
    study = "/srv/study/study.toml"

The server may give a folder for the results of all jobs, by job name. Unlike FLARE's own folder it is kept after a job,
so that the same job, submitted again, finds its earlier results::

    out = "/srv/study/results"

Relative paths are relative to the folder of the file. A table with the name of a site, such as ``[site-1]``, is for
that site only: simulated sites share one file.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from feddar.errors import UserError

FILE = "feddar.toml"
_PATHS = ("data", "study", "state", "out")
_NEEDED = {"data": "/path/to/data.csv", "study": "/path/to/study.toml"}


def read(folder: Path, name: str) -> dict[str, str]:
    """Return the options for the site of this name in the folder's file; empty if there is no file."""
    file = folder / FILE
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read ({error}): correct it at this site.") from None
    own = content.get(name)
    values = {**content, **(own if isinstance(own, dict) else {})}
    options = {key: str(value) for key, value in values.items() if not isinstance(value, dict)}
    return {key: str(folder / value) if key in _PATHS else value for key, value in options.items()}


def site_options(workspace: Path, name: str) -> dict[str, str]:
    """Return the options of the site with this workspace: its data, its state folder and others."""
    folder = workspace / "local"
    options = read(folder, name)
    for needed, example in _NEEDED.items():
        if not options.get(needed):
            line = f'{needed} = "{example}"'
            raise UserError(f"site '{name}' does not know its {needed}: write the line {line} into {folder / FILE}.")
    return {"state": str(workspace / "feddar-state"), **options, "name": name}
