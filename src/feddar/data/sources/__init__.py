"""Data sources: the built-in cohorts by name, and the user's own tables by path.

A source declares its options and default training settings. Its file is fast to import, so that the command line knows
every option; slow packages are imported when the source is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from feddar.data.sources import digits, exam, fairface, public, synthetic
from feddar.data.sources.source import Source, flag_of
from feddar.data.sources.table import table_source
from feddar.data.table_options import COMPRESSED, SUFFIXES
from feddar.data.table_paths import is_pattern
from feddar.errors import UserError
from feddar.methods import nearest
from feddar.settings import DataSettings, checked

_COHORTS = (exam.SOURCE, synthetic.SOURCE, digits.SOURCE, fairface.SOURCE, *public.SOURCES)
BUILT_IN = {source.name: source for source in _COHORTS}
SOURCES = (table_source("a table"), *BUILT_IN.values())
"""All built-in sources, and one that stands for the user's tables."""


def find_source(data: str) -> Source:
    """Return the built-in source of that name, or the table at that path, which must exist."""
    path = Path(data)
    if data in BUILT_IN or path.exists() or is_pattern(path):
        return source_named(data)
    if path.suffix.lower() in (*SUFFIXES, *COMPRESSED) or len(path.parts) > 1 or data.endswith(("/", "\\")):
        lost = " (it is a link that leads nowhere)" if path.is_symlink() else ""
        raise UserError(f"there is no file or folder {path}{lost}.")
    raise UserError(f"unknown cohort '{data}': {nearest(data, list(BUILT_IN))}")


def cohorts_in(data: str) -> list[str]:
    """Return the cohorts that are named, separated by commas; a path may have commas of its own."""
    names = [name.strip() for name in data.split(",")]
    if data in BUILT_IN or len(names) == 1 or Path(data).exists() or is_pattern(Path(data)):
        return [data]
    for name in names:
        find_source(name)
    places = [Path(name).stem for name in names]
    twice = [name for name, place in zip(names, places, strict=True) if places.count(place) > 1]
    if twice:
        raise UserError(f"'{twice[0]}' and '{twice[1]}' would be kept in one folder: compare on them one by one.")
    return names


def source_named(data: str) -> Source:
    """Return the built-in source of that name, else the table at that path, which need not exist."""
    return BUILT_IN.get(data) or table_source(data)


def sources_with(option: str) -> list[Source]:
    """Return the sources that have an option."""
    return [source for source in SOURCES if option in source.options.model_fields]


def resolve_options(
    source: Source, data: str, given: Mapping[str, Any], file: Mapping[str, Any] | None = None
) -> DataSettings:
    """Return a source's options: those given, else those of a configuration file, else the defaults."""
    for name in given:
        having = sources_with(name)
        if having and name not in source.options.model_fields:
            raise UserError(f"{flag_of(name)} is for {_listed(having)}, not for {data}: leave it out.")
    return read_options(source.options, {**(file or {}), **given, "data": data})


def read_options(kind: type[DataSettings], table: Mapping[str, Any]) -> DataSettings:
    """Return a configuration's [data] table as options of this source, without the options of other sources.

    These are ignored because version 0.1 wrote the options of all sources into every file.
    """
    own = {name: value for name, value in table.items() if name in kind.model_fields or not sources_with(name)}
    return checked(kind, own)


def _listed(sources: list[Source]) -> str:
    names = [source.name for source in sources]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
