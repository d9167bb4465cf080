"""What is alike for trackers that keep runs in a store of their own: what a run there can do, names, and notes."""

from __future__ import annotations

import re
import unicodedata
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

from feddar.errors import Notice, one_line
from feddar.settings import CONFIG_FILE, read_config

PROJECT = "feddar"
"""What runs are gathered under where the user has not said it."""

Figure = tuple[str, str, str, float]
"""A metric, its scope and name, and its value."""


class StoredRun(Protocol):
    """The run of a folder in a tracker's store."""

    store: ClassVar[str]
    """What the store is called."""
    place: ClassVar[str]
    """The variable of the environment that says where the store is."""

    @classmethod
    def opened(cls, folder: Path) -> Self:
        """Return the run of a folder, which goes on; if it is not in the store, it begins, with its configuration."""

    @classmethod
    def found(cls, folder: Path) -> Self | None:
        """Return the run of a folder; None if it has none, or none in this place."""

    def last_round(self) -> int:
        """Return the last round that was logged, 0 if none was."""

    def log(self, figures: Iterable[Figure], step: int) -> None:
        """Log the figures of a round as metrics METRIC/SCOPE/NAME."""

    def log_results(self, figures: Iterable[Figure], step: int) -> None:
        """Log the figures of the round in use as result/METRIC/SCOPE/NAME."""

    def log_files(self, files: Iterable[Path]) -> None:
        """Keep those of the files that are there."""

    def adopt(self, folder: Path, labels: Mapping[str, Any]) -> None:
        """Show the run of a folder below this one, with labels as its name and beside it."""

    def end(self, finished: bool) -> None:
        """Say how the run has ended; it may be opened again."""


def key(*names: str) -> str:
    """Return the key of a metric; signs that not every store allows are named.

    >>> key("auc", "domain", "70+"), key("loss", "train", "")
    ('auc/domain/70 plus sign', 'loss/train')
    """
    return "/".join(re.sub(r"[^\w.\- :]+|^\.+$", _named, name) for name in names if name)[:250]


def _named(signs: re.Match[str]) -> str:
    words = " ".join(unicodedata.name(each, f"{ord(each):x}").lower() for each in signs[0])
    before, after = signs.string[: signs.start()], signs.string[signs.end() :]
    return f"{' ' if before else ''}{words}{' ' if after else ''}"


def configuration(folder: Path) -> dict[str, Any]:
    """Return the configuration of the run in a folder, as one table."""
    return {name: value for table in read_config(folder / CONFIG_FILE).values() for name, value in table.items()}


@dataclass
class Outcome:
    """Whether a block has gone well."""

    well: bool = True


@contextmanager
def noting(store: str, lost: str) -> Iterator[Outcome]:
    """Turn whatever a store raises within the block into a note on what is lost by it; training must not end by it."""
    outcome = Outcome()
    try:
        yield outcome
    except Exception as error:
        outcome.well = False
        warnings.warn(f"{store} failed ({one_line(error)}): {lost}.", Notice, stacklevel=3)
