"""The source `covid-mx`: confirmed cases of COVID-19 in Mexico, read as a table by ``covid_mx_cases``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from feddar.data.sources.data_folder import Folder
from feddar.data.sources.source import Source
from feddar.data.table_options import ColumnOptions

if TYPE_CHECKING:
    from feddar.data.cohort import Cohort


class CovidOptions(ColumnOptions):
    """The folder of the file, and as for any table the columns of client, domain and target."""

    folder: Folder = None


def load(options: CovidOptions, _: int) -> Cohort:
    """Return the cohort of cases, which is the same for every seed."""
    from feddar.data.sources.covid_mx_cases import cohort

    return cohort(options)


SOURCE = Source(
    "covid-mx",
    "COVID-19 in Mexico: who is admitted to hospital; 32 states, health-care systems as domains",
    CovidOptions,
    load,
)
