"""Where tables lie: which files of a folder or a pattern are tables, and what they are called. It is fast to import."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from feddar.data.table_options import COMPRESSED, SUFFIXES
from feddar.errors import UserError


def is_table(path: Path) -> bool:
    """Return whether a file's name is that of a table."""
    return _ending(path) != ""


def name_of(path: Path) -> str:
    """Return a file's name without its ending: 'CT' for CT.csv.gz.

    >>> name_of(Path("states/CT.csv.gz")), name_of(Path("north.v2.parquet"))
    ('CT', 'north.v2')
    """
    return path.name[: len(path.name) - len(_ending(path))]


def _ending(path: Path) -> str:
    """Return the ending of a table's name, with that of its compression; "" if it is none of a table."""
    last = path.suffix.lower()
    ending = last if last not in COMPRESSED else Path(path.stem).suffix.lower() + last
    return ending if ending.removesuffix(last if last in COMPRESSED else "") in SUFFIXES else ""


def files_of(path: Path) -> list[Path]:
    """Return the file itself, the tables in a folder, or those that a pattern such as states/*.csv fits, by name."""
    if path.is_dir():
        files = _without_texts(_tables_among(path.iterdir()))
        if not files:
            raise UserError(f"there is no CSV, Parquet or Excel file in {path}: put one per client there.")
    elif is_pattern(path):
        parts = Path(path).parts
        first = next(place for place, part in enumerate(parts) if _is_wild(part))
        files = _tables_among(Path(*parts[:first]).glob(str(Path(*parts[first:]))))
        if not files:
            raise UserError(f"no CSV, Parquet or Excel file fits the pattern {path}: mend it, or name a folder.")
    else:
        files = [path]
    return files


def by_name(files: Sequence[Path], *, otherwise: str = "") -> dict[str, Path]:
    """Return the files by the names of their clients or sites; two of one name are refused, with a further remedy."""
    found: dict[str, Path] = {}
    for file in files:
        other = found.setdefault(name_of(file), file)
        if other is not file:
            raise UserError(
                f"{other} and {file} would both be the client '{name_of(file)}': rename one, or take one "
                f"away{otherwise}."
            )
    return found


def _tables_among(paths: Iterable[Path]) -> list[Path]:
    """Return the files with tables, by name, without hidden and lock files of a system or an office program."""
    named = sorted(path for path in paths if is_table(path) and not path.name.startswith((".", "~$")))
    for path in named:
        if path.is_symlink() and not path.exists():
            raise UserError(f"{path} is a link that leads nowhere: mend it, or take it away.")
    return [path for path in named if path.is_file()]


def _without_texts(files: list[Path]) -> list[Path]:
    """Return the files without those ending in .txt, such as a licence, unless all do."""
    return [file for file in files if file.suffix.lower() != ".txt"] or files


def is_of_several(path: Path) -> bool:
    """Return whether a path is a folder, or a pattern of several files."""
    return path.is_dir() or is_pattern(path)


def is_pattern(path: Path) -> bool:
    """Return whether a path stands for several files, such as states/*.csv."""
    return not path.exists() and any(map(_is_wild, path.parts))


def _is_wild(part: str) -> bool:
    return any(sign in part for sign in "*?[")
