"""The user's own table as a source: a file or a folder, given by its path and read by ``feddar.data.tables``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from feddar.data.sources.source import Source
from feddar.data.table_options import TableOptions

if TYPE_CHECKING:
    from feddar.data.cohort import Cohort


def load(options: TableOptions, _: int) -> Cohort:
    """Return the table as a cohort, which is the same for every seed."""
    from feddar.data.tables import read_cohort

    return read_cohort(options)


def table_source(path: Path | str) -> Source:
    """Return the table at that path as a source; the path need not exist."""
    return Source("tables", f"{path}", TableOptions, load)
