"""The source `acs-income`: persons of the American Community Survey, read as a table by ``acs_income_persons``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from feddar.data.sources.data_folder import Folder
from feddar.data.sources.source import Source
from feddar.data.table_options import ColumnOptions

if TYPE_CHECKING:
    from feddar.data.cohort import Cohort


class AcsOptions(ColumnOptions):
    """The folder of the files, and as for any table the columns of client, domain and target."""

    folder: Folder = None


def load(options: AcsOptions, _: int) -> Cohort:
    """Return the cohort of persons, which is the same for every seed."""
    from feddar.data.sources.acs_income_persons import cohort

    return cohort(options)


SOURCE = Source(
    "acs-income",
    "American Community Survey: who earns more than 50,000 dollars; US states, race as domains",
    AcsOptions,
    load,
)
