"""The source `eicu`: stays in intensive care at US hospitals, read as a table by ``eicu_stays``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from feddar.data.sources.data_folder import Folder
from feddar.data.sources.source import Source
from feddar.data.table_options import ColumnOptions

if TYPE_CHECKING:
    from feddar.data.cohort import Cohort


class EicuOptions(ColumnOptions):
    """The folder of the database, and as for any table the columns of client, domain and target."""

    folder: Folder = None


def load(options: EicuOptions, _: int) -> Cohort:
    """Return the cohort of stays, which is the same for every seed."""
    from feddar.data.sources.eicu_stays import cohort

    return cohort(options)


SOURCE = Source(
    "eicu",
    "eICU: intensive care at US hospitals; stays of more than 3 days or deaths, ethnicity as domains",
    EicuOptions,
    load,
    {"lr": 0.01, "weight_decay": 0.03},
)
