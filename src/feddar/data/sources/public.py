"""Sources that are public tables of real sites and groups: their names, options and settings, fast to import.

Each is read by a module of its own, which gives a ``PublicTable``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from feddar.data.sources.data_folder import Folder
from feddar.data.sources.source import Source
from feddar.data.table_options import ColumnOptions

if TYPE_CHECKING:
    from feddar.data.cohort import Cohort


class PublicOptions(ColumnOptions):
    """The folder of the files, and as for any table the columns of client, domain and target."""

    folder: Folder = None


def _source(name: str, about: str, module: str, settings: dict[str, Any] | None = None) -> Source:
    def load(options: PublicOptions, _: int) -> Cohort:
        """Return the cohort, which is the same for every seed."""
        made: Cohort = import_module(f"feddar.data.sources.{module}").cohort(options)
        return made

    return Source(name, about, PublicOptions, load, settings or {})


SOURCES = (
    _source(
        "eicu",
        "eICU: intensive care at US hospitals; stays of more than 3 days or deaths, ethnicity as domains",
        "eicu_stays",
        {"lr": 0.01, "weight_decay": 0.03},
    ),
    _source(
        "covid-mx",
        "COVID-19 in Mexico: who is admitted to hospital; 32 states, health-care systems as domains",
        "covid_mx_cases",
    ),
    _source(
        "acs-income",
        "American Community Survey: who earns more than 50,000 dollars; US states, race as domains",
        "acs_income_persons",
    ),
)
