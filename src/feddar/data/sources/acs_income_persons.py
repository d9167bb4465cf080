"""The task ACSIncome of folktables (Ding et al., 2021): does a person earn more than 50,000 dollars a year?

Two layouts are read. In that of folktables' download, files of the Census Bureau are called `psam_pNN.csv`, with NN the
number of the state, in a folder such as `2018/1-Year`; persons are those over 16 who worked and earned more than 100
dollars. In the other each state is a file such as `CT.csv.gz` with the columns of the task, race grouped and the target
true or false. Both become one table with the columns' own names:

- clients: `state`; domains: `race` in five groups; target: `income`;
- features: age, hours and schooling as numbers, all other codes as categories.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from feddar.data.cohort import Cohort
from feddar.data.sources.data_folder import find_set
from feddar.data.sources.public import PublicOptions
from feddar.data.sources.public_table import PublicTable, numbers_in, read_columns, unreadable

ORIGIN = "https://github.com/socialfoundations/folktables"
OF_STATES = ("[A-Z][A-Z].csv.gz", "[A-Z][A-Z].csv")
OF_BUREAU = ("psam_p[0-9][0-9].csv", "*/1-Year/psam_p[0-9][0-9].csv", "*/5-Year/psam_p[0-9][0-9].csv")

PERSONS = PublicTable(
    name="acs-income",
    rows="persons",
    roles={"client": "state", "domain": "race", "target": "income"},
    outcomes=("income",),
    not_features=("state", "race"),
)

NUMBERS = ("AGEP", "WKHP", "SCHL")
CATEGORIES = ("COW", "MAR", "OCCP", "POBP", "RELP", "SEX")
RACES = ("White", "Black", "Asian", "Native", "other")
GROUPS = {1: 1, 2: 2, 3: 4, 4: 4, 5: 4, 6: 3, 7: 5, 8: 5, 9: 5}
"""The race group of each of the Bureau's codes."""
FIPS = {
    1: "AL", 2: "AK", 4: "AZ", 5: "AR", 6: "CA", 8: "CO", 9: "CT", 10: "DE", 11: "DC", 12: "FL", 13: "GA", 15: "HI",
    16: "ID", 17: "IL", 18: "IN", 19: "IA", 20: "KS", 21: "KY", 22: "LA", 23: "ME", 24: "MD", 25: "MA", 26: "MI",
    27: "MN", 28: "MS", 29: "MO", 30: "MT", 31: "NE", 32: "NV", 33: "NH", 34: "NJ", 35: "NM", 36: "NY", 37: "NC",
    38: "ND", 39: "OH", 40: "OK", 41: "OR", 42: "PA", 44: "RI", 45: "SC", 46: "SD", 47: "TN", 48: "TX", 49: "UT",
    50: "VT", 51: "VA", 53: "WA", 54: "WV", 55: "WI", 56: "WY", 72: "PR",
}  # fmt: skip
"""States by their federal number."""


def cohort(options: PublicOptions) -> Cohort:
    """Read the files as a cohort with the client, domain and target columns of the options."""
    place = find_set("acs_income", options.folder, files=[(*OF_STATES, *OF_BUREAU)], origin=ORIGIN)
    return PERSONS.cohort(read_persons(place), options)


def read_persons(place: Path) -> pd.DataFrame:
    """Return the table of persons, one row each; where there are several years, of the last."""
    files = _matching(place, OF_BUREAU)
    last = [file for file in files if file.parent == files[-1].parent]
    parts = [_of_bureau(file) for file in last] or [_of_state(file) for file in _matching(place, OF_STATES)]
    return pd.concat(parts, ignore_index=True)


def _matching(place: Path, patterns: tuple[str, ...]) -> list[Path]:
    return sorted(file for pattern in patterns for file in place.glob(pattern))


def _of_state(file: Path) -> pd.DataFrame:
    """Read one state's file, in which the task is already prepared."""
    raw = _read(file, [*NUMBERS, *CATEGORIES, "RAC1P"], "PINCP")
    rich = raw["PINCP"].map({"True": True, "False": False})
    return _persons(raw, file.name[:2], raw["RAC1P"], rich)


def _of_bureau(file: Path) -> pd.DataFrame:
    """Read one of the Bureau's files, and prepare the task as folktables does."""
    raw = _read(file, [*NUMBERS, *CATEGORIES, "RAC1P", "PINCP", "PWGTP"])
    kept = raw[(raw["AGEP"] > 16) & (raw["PINCP"] > 100) & (raw["WKHP"] > 0) & (raw["PWGTP"] >= 1)]
    number = int(file.stem[-2:])
    return _persons(kept, FIPS.get(number, str(number)), kept["RAC1P"].map(GROUPS), kept["PINCP"] > 50_000)


def _read(file: Path, numbers: list[str], *texts: str) -> pd.DataFrame:
    table = read_columns(file, [*numbers, *texts], ORIGIN, dtype=dict.fromkeys(texts, str))
    try:
        return pd.DataFrame({name: numbers_in(table[name]) if name in numbers else table[name] for name in table})
    except ValueError as error:
        raise unreadable(file, error, ORIGIN) from None


def _persons(raw: pd.DataFrame, state: str, race: pd.Series[float], rich: pd.Series[bool]) -> pd.DataFrame:
    roles = {
        "state": state,
        "race": race.map(dict(enumerate(RACES, start=1))),
        "income": rich.map({True: "over 50,000", False: "50,000 or less"}),
    }
    codes = {name: _code(raw[name]) for name in CATEGORIES}
    return pd.DataFrame(roles | {name: raw[name] for name in NUMBERS} | codes, index=raw.index)


def _code(values: pd.Series[float]) -> pd.Series[str]:
    """Return codes as text, which makes them categories and not quantities."""
    return ("c" + values.astype("Int64").astype("string")).astype(object)
